"""What TransformerEngine can exchange for packed sequences (THD), by version and kernel: the only place that knows.

Without a kernel TransformerEngine raises at the first micro-batch on several lanes, and on one lane its memory is
quadratic. Our wrapper (`attention`) shares out heads by all-to-all and calls TransformerEngine with the local heads: in
the ring of outer lanes for a2a+p2p, on whole sequences for a2a. It serves versions and kernels that lack the exchange
or are slow at it, and KV heads that the lanes do not divide, which TransformerEngine refuses.

Source: in TransformerEngine 2.11 to 2.20 the filters of `get_attention_backend`, the assertions of
`context_parallel.py`, and `nvte_get_fused_attn_backend` for cuDNN's compute capabilities; of flash-attn 2 the docstring
of its `AttnFuncWithCPAndKVAllGather` (2.20) and the skips of its `test_attention_with_cp.py`, nothing that raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.flags import TransformerImpl
from dynamic_cp.types import CpCommType
from megatron.dynamic_cp.flags.fp8 import why_no_device, why_not_gathered
from megatron.dynamic_cp.flags.shape import LayerNeeds

if TYPE_CHECKING:
    import torch  # parsing flags must not wait for it


Capability = tuple[int, int]
FlashAttn = Literal[2, 3, 4]
Kernel = Literal["cuDNN", "flash-attn 2", "flash-attn 3", "flash-attn 4"]

FLASH_SINCE: Capability = (8, 0)
FUSED_SINCE: Capability = (9, 0)
NOT_FUSED: frozenset[Capability] = frozenset({(12, 0)})
"""Compute capabilities for packed sequences: flash is the package flash-attn, fused is cuDNN."""
FLASH_4_OVER_LANES_SINCE = (2, 19)
"""First version of TransformerEngine that computes over a CP group with flash-attn 4."""

REPEATS = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""0: TransformerEngine 2.19 and newer have no cuDNN for packs whose heads * sequences * longest^2 reach 2^30."""
NO_FLASH_ATTN = "no flash-attn that it accepts is installed (pip install flash-attn)"
Release = tuple[int, int]
OLDEST: Release = (2, 9)
"""The oldest that megatron-core 0.16.1 accepts."""
NEWEST: Release = (2, 20)
"""The newest that tests cover; setup.py asks for no newer one."""
PERMITTED_SINCE: dict[CpCommType, Release] = {"p2p": OLDEST, "a2a": (2, 11), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
"""First version whose attention over a CP group does this exchange with packed sequences."""
NATIVE_SINCE: dict[CpCommType, Release] = {**PERMITTED_SINCE, "a2a": (2, 18)}
"""First version that we let do it. Until 2.17 a2a orders rows by a Python loop over sequences and lanes that reads each
boundary from the device: the host waits thousands of times a step. From 2.18 it is one kernel."""
NOT_SERVED: Mapping[Kernel | None, frozenset[CpCommType]] = MappingProxyType(
    {"flash-attn 2": frozenset({"all_gather"}), "flash-attn 4": frozenset({"a2a+p2p"})}
)
"""Exchanges that TransformerEngine does not do with a kernel. all_gather needs both the first key of a sequence and how
many a query sees; flash-attn 2 takes one number for both, and is called all the same with wrong results. a2a+p2p
never takes flash-attn 4."""
WRAPPED: frozenset[CpCommType] = frozenset({"a2a", "a2a+p2p"})
"""Exchanges that our wrapper does around any version."""
LACKS_MASKS = "TransformerEngine's attention, which this model has, computes the mask of its layers only"
Provider = Literal["native", "wrapped"]


def choose_kernel(backend: str, capability: Capability, *, flash_attn: FlashAttn | None) -> tuple[Kernel | None, str]:
    """Return (the kernel, ""), or (None, why there is none); `backend` is --attention-backend, or Megatron-LM's
    "local". `capability` is the device's compute capability; `flash_attn` comes from `installed_flash_attn`."""
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
    elif capability == FUSED_SINCE and os.environ.get(REPEATS, "1") == "0":
        fused = f"with {REPEATS}=0 cuDNN needs memory by the square of lengths for packs on sm90: unset it"
    if fused is None and backend != "flash":  # preferred where both are there
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
    """Return which installed flash-attn this release of TransformerEngine takes on such a device, None: none."""
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


def release_of(version: str) -> Release:
    """Return (major, minor) of a version such as 2.11.0 or 2.12.0.dev0+5671fd36."""
    from packaging.version import Version  # comes with megatron-core

    release = Version(version).release
    return release[0], release[1] if len(release) > 1 else 0


def shown(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def untested() -> str:
    """Return how messages describe a version above NEWEST."""
    return f"newer than {shown(NEWEST)}, up to which tests go"


def provider(
    exchange: CpCommType, version: str, kernel: Kernel | None, *, kv_heads: int, inner_cp_size: int
) -> Provider:
    """Return who does an exchange: TransformerEngine or our wrapper. `version` and `kernel` are TransformerEngine's,
    `kv_heads` those of a tensor-parallel rank; `inner_cp_size` lanes share out heads, as in
    `dynamic_cp.types.Bucket`. Raises UnsupportedFeatureError: neither can do it."""
    is_old, is_served = release_of(version) < NATIVE_SINCE[exchange], exchange not in NOT_SERVED.get(kernel, ())
    if not is_old and is_served and kv_heads % inner_cp_size == 0:
        return "native"
    if exchange in WRAPPED:
        return "wrapped"
    needed = shown(NATIVE_SINCE[exchange])
    if is_old:
        why, remedy = f"needs TransformerEngine {needed}, {version} is installed", "or upgrade TransformerEngine"
    else:
        why = f"needs cuDNN or flash-attn 3 below TransformerEngine, {kernel} would run here and compute something else"
        remedy = "or on sm90 and sm100 --attention-backend auto"
    raise UnsupportedFeatureError(
        f"--cp-comm-type {exchange} with packed sequences {why}: use --cp-comm-type p2p or auto, --transformer-impl "
        f"local, {remedy}"
    )


def missing_exchanges(exchanges: Sequence[CpCommType], version: str, kernel: Kernel | None) -> tuple[CpCommType, ...]:
    """Return the exchanges that neither this version with this kernel nor the wrapper does."""
    release, not_served = release_of(version), NOT_SERVED.get(kernel, ())
    return tuple(one for one in exchanges if one not in WRAPPED and (release < NATIVE_SINCE[one] or one in not_served))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """The layers of a run, and why; TransformerEngine's `kernel` for attention. `left_out` are exchanges that
    --cp-comm-type auto does not choose from: this version or its kernel lacks them."""

    impl: TransformerImpl
    reason: str
    left_out: tuple[CpCommType, ...] = ()
    kernel: Kernel | None = None

    def describe(self) -> str:
        without = f"; the planner does without {', '.join(self.left_out)}" if self.left_out else ""
        kernel = f", attention by {self.kernel}" if self.kernel else ""
        return f"layers: {self.impl} ({self.reason}{kernel}){without}"

    def check_masks(self, samples: str) -> None:
        """Raise UnsupportedFeatureError for samples with masks (named `samples`) if layers are TransformerEngine's."""
        if self.impl == "transformer_engine":
            raise UnsupportedFeatureError(
                f"{samples} have masks of their own, and {LACKS_MASKS} ({self.reason}): use --transformer-impl local"
            )


def why_no_masks(model: Iterable[torch.nn.Module]) -> str | None:
    """Return why samples of a model must not bring masks of their own, None if they may."""
    names = (type(module).__name__ for chunk in model for module in chunk.modules())
    return LACKS_MASKS if "TransformerEngineAttention" in names else None


def choose_layers(
    needs: LayerNeeds,
    *,
    capability: Capability | None,
    flash_attn: FlashAttn | None,
    version: str | None,
    why_missing: str = "",
) -> LayerChoice:
    """Return the layers of a run: TransformerEngine's where they can be used and local ones are not asked for.

    Args:
        capability: compute capability of the CUDA device; None: this run trains on the CPU.
        flash_attn: see `installed_flash_attn`.
        version: of TransformerEngine; None: it cannot be imported, because of `why_missing`.

    Raises UnsupportedFeatureError: TransformerEngine is asked for and cannot be used, or lacks the exchange that is
    asked for; norms shall be recomputed, which its layers cannot; FP8 where its layers cannot be used, on a device
    without it, or in blocks that it does not gather."""
    if needs.requested == "local":
        return LayerChoice(impl="local", reason="--transformer-impl local")
    kernel, obstacle = None, why_not_installed(capability, version, why_missing) or needs.why_local
    if obstacle is None:
        assert capability is not None
        kernel, obstacle = choose_kernel(needs.backend, capability, flash_attn=flash_attn)
    if kernel is None:
        assert obstacle is not None
        return _local_layers(needs, obstacle)
    assert version is not None
    assert capability is not None
    _check_te_computes(needs, capability, version)
    left_out: tuple[CpCommType, ...] = ()
    if needs.exchange == "auto":
        left_out = missing_exchanges(tuple(NATIVE_SINCE), version, kernel)
    else:
        provider(needs.exchange, version, kernel, kv_heads=1, inner_cp_size=1)
    reason = f"TransformerEngine {version} is installed"
    if release_of(version) > NEWEST:
        reason += f", {untested()}"
    return LayerChoice(impl="transformer_engine", reason=reason, left_out=left_out, kernel=kernel)


def why_not_installed(capability: Capability | None, version: str | None, why_missing: str) -> str | None:
    """Return why no layer of TransformerEngine runs here, whatever the model; None if some do."""
    if capability is None:
        return "TransformerEngine needs CUDA devices, this run trains on the CPU"
    if version is None:
        return f"TransformerEngine {shown(OLDEST)} or newer is needed, it cannot be imported ({why_missing})"
    if release_of(version) < OLDEST:
        return f"TransformerEngine {version} is installed, {shown(OLDEST)} is needed"
    return None


def _local_layers(needs: LayerNeeds, obstacle: str) -> LayerChoice:
    if needs.requested is not None:
        raise UnsupportedFeatureError(
            f"--transformer-impl {needs.requested}: {obstacle}; change that (docs/GPU.md), or "
            "use --transformer-impl local"
        )
    if needs.fp8_recipe is not None:
        raise UnsupportedFeatureError(
            f"--fp8-format is for TransformerEngine's layers, and {obstacle}; change that "
            "(docs/GPU.md), or leave it out"
        )
    return LayerChoice(impl="local", reason=obstacle)


def _check_te_computes(needs: LayerNeeds, capability: Capability, version: str) -> None:
    if needs.fp8_recipe is not None:
        why = why_no_device(needs.fp8_recipe, capability, importlib.import_module("torch").version.cuda)
        if needs.gathered_hidden_size is not None:
            why = why or why_not_gathered(needs.fp8_recipe, needs.gathered_hidden_size, release_of(version))
        if why is not None:
            raise UnsupportedFeatureError(why)
    if needs.recomputes_norms:
        raise UnsupportedFeatureError(
            "--recompute-modules layernorm: norms are parts of the matrices of TransformerEngine's layers, "
            "nothing would be recomputed: leave layernorm out, or use --transformer-impl local"
        )


def installed_version() -> tuple[str | None, str]:
    """Return (version of the TransformerEngine that megatron-core uses, ""), or (None, why it uses none)."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import get_te_version

    if HAVE_TE:
        return str(get_te_version()), ""
    try:
        importlib.import_module("transformer_engine.pytorch.fp8")
    except ImportError as error:
        return None, str(error)
    return None, "it can be imported now, but could not when megatron-core was imported"
