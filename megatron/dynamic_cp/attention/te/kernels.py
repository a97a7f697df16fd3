"""Which kernel TransformerEngine computes attention for packed sequences (THD) with, over a group of lanes on a device.

If it has none, it raises at the first micro-batch on several lanes, and on one lane uses an attention with quadratic
memory. Which exchanges a kernel serves is in `support`.

Source: the filters of `get_attention_backend` in TransformerEngine 2.11 to 2.20; for cuDNN's compute capabilities its
`nvte_get_fused_attn_backend`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal

Capability = tuple[int, int]
FlashAttn = Literal[2, 3, 4]
Kernel = Literal["cuDNN", "flash-attn 2", "flash-attn 3", "flash-attn 4"]

FLASH_SINCE: Capability = (8, 0)
FUSED_SINCE: Capability = (9, 0)
NOT_FUSED: frozenset[Capability] = frozenset({(12, 0)})
"""Of packed sequences: flash is the package flash-attn, fused is cuDNN."""
FLASH_4_OVER_LANES_SINCE = (2, 19)
"""First version of TransformerEngine that computes over a CP group with flash-attn 4."""

NO_FLASH_ATTN = "no flash-attn that it accepts is installed (pip install flash-attn)"


def choose_kernel(backend: str, capability: Capability, *, flash_attn: FlashAttn | None) -> tuple[Kernel | None, str]:
    """Return (the kernel, ""), or (None, why there is none).

    Args:
        backend: --attention-backend; Megatron-LM also has "local".
        capability: compute capability of the device.
        flash_attn: see `installed_flash_attn`.
    """
    device = f"the device has sm{capability[0]}{capability[1]}"
    if backend in ("unfused", "local"):
        return None, (
            f"--attention-backend {backend} leaves TransformerEngine no attention over several lanes: "
            "--attention-backend auto has one"
        )
    flash = fused = None
    if capability < FLASH_SINCE:
        flash = f"flash-attn needs sm80, {device}"
    elif flash_attn is None:
        flash = NO_FLASH_ATTN
    if capability < FUSED_SINCE or capability in NOT_FUSED:
        fused = f"cuDNN needs sm90 or sm100, {device}"
    if fused is None and backend != "flash":  # which it prefers where it has both
        return "cuDNN", ""
    if flash is None and backend != "fused":
        return f"flash-attn {flash_attn}", ""  # type: ignore[return-value]
    if backend in ("flash", "fused"):
        return None, (
            f"TransformerEngine has no attention for packed sequences with --attention-backend {backend}: "
            f"{flash if backend == 'flash' else fused}; --attention-backend auto takes what there is"
        )
    return None, f"TransformerEngine has no attention for packed sequences here: {fused}, and {flash}"


def installed_flash_attn(capability: Capability, release: tuple[int, int]) -> FlashAttn | None:
    """Return which of the installed flash-attn TransformerEngine takes: by its own look at them, if it has one.

    Args:
        capability: compute capability of the device.
        release: of TransformerEngine.
    """
    try:
        utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    except ImportError:
        return 2 if importlib.util.find_spec("flash_attn") is not None else None
    flags = utils.FlashAttentionUtils
    if flags.v3_is_installed and capability == (9, 0):
        return 3
    if release >= FLASH_4_OVER_LANES_SINCE and flags.v4_is_installed and capability >= (9, 0):
        return 4
    return 2 if flags.is_installed else None
