"""Whether TransformerEngine has attention for packed sequences (THD) over a group of lanes on a device.

If it has none, it raises at the first micro-batch on several lanes, and on one lane uses an attention with quadratic
memory.

Source: the filters of `get_attention_backend` in TransformerEngine 2.11 to 2.20; for cuDNN's compute capabilities its
`nvte_get_fused_attn_backend`.
"""

from __future__ import annotations

import importlib
import importlib.util

Capability = tuple[int, int]

FLASH_SINCE: Capability = (8, 0)
FUSED_SINCE: Capability = (9, 0)
NOT_FUSED: frozenset[Capability] = frozenset({(12, 0)})
"""Of packed sequences: flash is the package flash-attn, fused is cuDNN."""

NO_FLASH_ATTN = "no flash-attn that it accepts is installed (pip install flash-attn)"


def why_no_kernel(backend: str, capability: Capability, *, flash_attn: bool) -> str | None:
    """Return why there is no kernel, None if there is one.

    Args:
        backend: --attention-backend; Megatron-LM also has "local".
        capability: compute capability of the device.
        flash_attn: whether TransformerEngine takes the installed flash-attn.
    """
    device = f"the device has sm{capability[0]}{capability[1]}"
    if backend in ("unfused", "local"):
        return (
            f"--attention-backend {backend} leaves TransformerEngine no attention over several lanes: "
            "--attention-backend auto has one"
        )
    flash = fused = None
    if capability < FLASH_SINCE:
        flash = f"flash-attn needs sm80, {device}"
    elif not flash_attn:
        flash = NO_FLASH_ATTN
    if capability < FUSED_SINCE or capability in NOT_FUSED:
        fused = f"cuDNN needs sm90 or sm100, {device}"
    if backend in ("flash", "fused"):
        lacking = flash if backend == "flash" else fused
        if lacking is None:
            return None
        return (
            f"TransformerEngine has no attention for packed sequences with --attention-backend {backend}: {lacking}; "
            "--attention-backend auto takes what there is"
        )
    if flash is None or fused is None:
        return None
    return f"TransformerEngine has no attention for packed sequences here: {fused}, and {flash}"


def flash_attention_installed(capability: Capability) -> bool:
    """Return whether TransformerEngine takes the installed flash-attn: by its own look at the version, if it has one.

    Hopper's flash-attn-3 counts there.
    """
    try:
        utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    except ImportError:
        return importlib.util.find_spec("flash_attn") is not None
    flags = utils.FlashAttentionUtils
    return bool(flags.is_installed or (flags.v3_is_installed and capability == (9, 0)))
