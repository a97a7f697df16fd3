"""What TransformerEngine can exchange for packed sequences (THD), by version and kernel: the only place that knows.

    choose_layers(...)           TransformerEngine's layers or local ones, and why; refuses what the version lacks
    way(exchange, version, ...)  who does an exchange: TransformerEngine ("native"), or we around it ("wrapped")

Our wrapper shares out heads by all-to-all (`heads`), then calls TransformerEngine's attention with the local heads: in
the ring of outer lanes for a2a+p2p, on whole sequences for a2a. It does so on versions and kernels that lack the
exchange or are slow at it, and where the number of KV heads is not divisible by the lanes that share them, which
TransformerEngine refuses.

Source: the assertions of `context_parallel.py` in TransformerEngine 2.11 to 2.20; of flash-attn 2 the docstring of its
`AttnFuncWithCPAndKVAllGather` (2.20) and the skips of its `test_attention_with_cp.py`, nothing that raises.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CpCommType, is_placed
from megatron.dynamic_cp.attention.te.kernels import Capability, FlashAttn, Kernel, choose_kernel
from megatron.dynamic_cp.flags.fp8 import why_no_device, why_not_gathered
from megatron.dynamic_cp.flags.positions import SOFTMAX_TYPES

if TYPE_CHECKING:
    import torch  # parsing flags must not wait for it

Release = tuple[int, int]
TransformerImpl = Literal["local", "transformer_engine"]
TRANSFORMER_IMPLS: tuple[TransformerImpl, ...] = ("local", "transformer_engine")

OLDEST: Release = (2, 9)
"""What megatron-core 0.16.1 asks for at least."""

PERMITTED_SINCE: dict[CpCommType, Release] = {"p2p": OLDEST, "a2a": (2, 11), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
"""First version whose attention over a CP group does this exchange with packed sequences."""

NATIVE_SINCE: dict[CpCommType, Release] = {**PERMITTED_SINCE, "a2a": (2, 18)}
"""First version that we let do it. Until 2.17 a2a puts rows in order by a Python loop over sequences and lanes, which
reads each boundary from the device: the host waits thousands of times a step. From 2.18 it is one kernel."""

NOT_SERVED: Mapping[Kernel | None, frozenset[CpCommType]] = MappingProxyType(
    {"flash-attn 2": frozenset({"all_gather"}), "flash-attn 4": frozenset({"a2a+p2p"})}
)
"""Exchanges that TransformerEngine does not do with a kernel. all_gather has to say apart where the keys of a sequence
begin and how many a query sees; flash-attn 2 takes one number for both, TransformerEngine calls it all the same, and
what comes out is wrong. For a2a+p2p it never takes flash-attn 4."""

HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
"""Of the flash and cuDNN kernels that TransformerEngine calls."""

WRAPPED: frozenset[CpCommType] = frozenset({"a2a", "a2a+p2p"})
"""Exchanges that our wrapper does around any version."""

LACKS_MASKS = "TransformerEngine's attention, which this model has, computes the mask of its layers only"

Way = Literal["native", "wrapped"]


def release_of(version: str) -> Release:
    """Return (major, minor) of a version such as 2.11.0 or 2.12.0.dev0+5671fd36."""
    from packaging.version import Version  # comes with megatron-core

    release = Version(version).release
    return release[0], release[1] if len(release) > 1 else 0


def shown(release: Release) -> str:
    """Return a release as people write it."""
    return f"{release[0]}.{release[1]}"


def way(exchange: CpCommType, version: str, kernel: Kernel | None, *, kv_heads: int, inner_cp_size: int) -> Way:
    """Return who does an exchange.

    Args:
        version: of TransformerEngine.
        kernel: that it computes with, see `kernels.choose_kernel`.
        kv_heads: of a tensor-parallel rank.
        inner_cp_size: lanes that share out heads, as in `dynamic_cp.types.Bucket`.

    Raises:
        UnsupportedFeatureError: neither TransformerEngine nor the wrapper can do it.
    """
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
        f"local, {remedy}",
        exchange=exchange,
        installed=version,
        needed=needed,
        kernel=kernel,
    )


def missing_exchanges(exchanges: Sequence[CpCommType], version: str, kernel: Kernel | None) -> tuple[CpCommType, ...]:
    """Return those of `exchanges` that neither this version with this kernel nor the wrapper does."""
    release, not_served = release_of(version), NOT_SERVED.get(kernel, ())
    return tuple(one for one in exchanges if one not in WRAPPED and (release < NATIVE_SINCE[one] or one in not_served))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Which layers a run has.

    Attributes:
        impl: of the layers.
        reason: why.
        left_out: exchanges that --cp-comm-type auto does not choose from: this version or its kernel lacks them.
        kernel: that TransformerEngine computes attention with.
    """

    impl: TransformerImpl
    reason: str
    left_out: tuple[CpCommType, ...] = ()
    kernel: Kernel | None = None

    def describe(self) -> str:
        """Return one line for the log."""
        without = f"; the planner does without {', '.join(self.left_out)}" if self.left_out else ""
        kernel = f", attention by {self.kernel}" if self.kernel else ""
        return f"layers: {self.impl} ({self.reason}{kernel}){without}"

    def check_masks(self, samples: str) -> None:
        """Refuse samples with masks of their own where TransformerEngine's attention would compute them.

        Args:
            samples: what to call them.

        Raises:
            UnsupportedFeatureError: it would.
        """
        if self.impl == "transformer_engine":
            raise UnsupportedFeatureError(
                f"{samples} have masks of their own, and {LACKS_MASKS} ({self.reason}): use --transformer-impl local"
            )


def why_no_masks(model: Iterable[torch.nn.Module]) -> str | None:
    """Return why samples of a model must not bring masks of their own; None where they may."""
    names = (type(module).__name__ for chunk in model for module in chunk.modules())
    return LACKS_MASKS if "TransformerEngineAttention" in names else None


def choose_layers(
    requested: TransformerImpl | None,
    exchange: CpCommType | Literal["auto"],
    *,
    capability: Capability | None,
    flash_attn: FlashAttn | None,
    backend: str,
    bf16: bool,
    head_dim: int,
    has_windows: bool = False,
    recomputes_norms: bool = False,
    fp32_residual: bool = False,
    softmax_type: str = SOFTMAX_TYPES[0],
    latent_attention: bool = False,
    why_local: str | None = None,
    fp8_recipe: str | None = None,
    gathered_hidden_size: int | None = None,
    version: str | None,
    why_missing: str = "",
) -> LayerChoice:
    """Return the layers of a run: TransformerEngine's where they can be used and local ones are not asked for.

    Args:
        requested: --transformer-impl.
        exchange: --cp-comm-type.
        capability: compute capability of the CUDA device; None: this run trains on the CPU.
        flash_attn: see `kernels.installed_flash_attn`.
        backend: --attention-backend, which megatron-core hands on to TransformerEngine.
        bf16: whether it trains in bf16.
        head_dim: --kv-channels.
        has_windows: some layers have a window.
        recomputes_norms: --recompute-modules has layernorm.
        fp32_residual: --fp32-residual-connection.
        softmax_type: --softmax-type.
        latent_attention: --multi-latent-attention.
        why_local: what of its MLPs is checked with local layers only; None: nothing.
        fp8_recipe: --fp8-recipe, which local layers do not have; None: nothing is in FP8.
        gathered_hidden_size: --hidden-size where sequence parallelism gathers it; None: it does not.
        version: of TransformerEngine; None: it cannot be imported, because of `why_missing`.

    Raises:
        UnsupportedFeatureError: TransformerEngine is asked for and cannot be used, or lacks the exchange that is asked
            for; its layers recompute no norms; FP8 where they cannot be used, on a device without it, or in blocks that
            it does not gather.
    """
    if requested == "local":
        return LayerChoice(impl="local", reason="--transformer-impl local")
    obstacle = kernel = None
    if capability is None:
        obstacle = "TransformerEngine needs CUDA devices, this run trains on the CPU"
    elif version is None:
        obstacle = f"TransformerEngine {shown(OLDEST)} or newer is needed, it cannot be imported ({why_missing})"
    elif release_of(version) < OLDEST:
        obstacle = f"TransformerEngine {version} is installed, {shown(OLDEST)} is needed"
    elif not bf16:
        obstacle = "TransformerEngine's attention over several lanes needs --bf16, this run trains in fp32"
    elif latent_attention:
        obstacle = "latent attention (--multi-latent-attention) is checked with local layers only"
    elif head_dim % HEAD_DIM_MULTIPLE or head_dim > LARGEST_HEAD_DIM:
        obstacle = (
            f"TransformerEngine's attention needs --kv-channels that are a multiple of {HEAD_DIM_MULTIPLE} up to "
            f"{LARGEST_HEAD_DIM}, they are {head_dim}"
        )
    elif is_placed(exchange):
        obstacle = f"TransformerEngine's attention cannot be placed (--cp-comm-type {exchange})"
    elif has_windows:
        obstacle = "layers with a window (--window-size) are checked with local layers only"
    elif fp32_residual:
        obstacle = "a residual in float32 (--fp32-residual-connection) is checked with local layers only"
    elif softmax_type != SOFTMAX_TYPES[0]:
        obstacle = f"a score beside those of keys (--softmax-type {softmax_type}) is checked with local layers only"
    elif why_local is not None:
        obstacle = why_local
    else:
        kernel, why_none = choose_kernel(backend, capability, flash_attn=flash_attn)
        obstacle = None if kernel is not None else why_none
    if obstacle is not None and requested is None and fp8_recipe is not None:
        raise UnsupportedFeatureError(
            f"--fp8-format is for TransformerEngine's layers, and {obstacle}; change that "
            "(docs/how-to/transformer-engine.md), or leave it out",
            installed=version,
        )
    if obstacle is not None and requested is None:
        return LayerChoice(impl="local", reason=obstacle)
    if obstacle is not None:
        raise UnsupportedFeatureError(
            f"--transformer-impl {requested}: {obstacle}; change that (docs/how-to/transformer-engine.md), or use "
            "--transformer-impl local",
            installed=version,
            needed=shown(OLDEST),
        )
    assert version is not None
    assert capability is not None
    if fp8_recipe is not None:
        why = why_no_device(fp8_recipe, capability)
        if gathered_hidden_size is not None:
            why = why or why_not_gathered(fp8_recipe, gathered_hidden_size, release_of(version))
        if why is not None:
            raise UnsupportedFeatureError(why, flag="--fp8-recipe")
    if recomputes_norms:
        raise UnsupportedFeatureError(
            "--recompute-modules layernorm: norms are parts of the matrices of TransformerEngine's layers, "
            "nothing would be recomputed: leave layernorm out, or use --transformer-impl local",
            flag="--recompute-modules",
        )
    if exchange == "auto":
        left_out = missing_exchanges(tuple(NATIVE_SINCE), version, kernel)
    else:
        left_out = ()
        way(exchange, version, kernel, kv_heads=1, inner_cp_size=1)
    reason = f"TransformerEngine {version} is installed"
    return LayerChoice(impl="transformer_engine", reason=reason, left_out=left_out, kernel=kernel)


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
