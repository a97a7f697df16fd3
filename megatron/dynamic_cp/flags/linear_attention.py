"""Layers of linear attention as Megatron-LM's flags say them: in the place of attention, or in a pattern of halves.

    --experimental-attention-variant gated_delta_net --linear-attention-freq 4   attention in every fourth layer
    --hybrid-override-pattern M-M*M-                                             a symbol for each layer, half a layer

Pure functions of flags and configurations; neither torch nor megatron-core is needed. A configuration has no field for
the pattern, which megatron-core hands its own class of model: `set_pattern` keeps it there.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.flags import ALIASES, GATED_DELTA_NET, LINEAR_PATTERN, MAMBA, MEANINGS, unknown_variant
from dynamic_cp.models.table import flag_of, shown
from dynamic_cp.types import STATE_EXCHANGE_USES, LinearAttention, is_placed, layers_with_experts
from dynamic_cp.types.linear_layers import LINEAR_SYMBOLS, check_symbols, layers_with_linear_attention
from megatron.dynamic_cp.flags import fp8
from megatron.dynamic_cp.flags.attention import windows_of
from megatron.dynamic_cp.flags.exclusions import PATTERN, VARIANT, refuse_pairs
from megatron.dynamic_cp.flags.experts import num_experts

FREQ = "--linear-attention-freq"
DELTA_SIZES, MAMBA_SIZES = (
    {name: means.usual for name, means in MEANINGS.items() if means.needs == f"linear_attention={kind}"}
    for kind in (GATED_DELTA_NET, MAMBA)
)
"""Flag -> Megatron-LM's default; None: as many heads as make twice the hidden size."""
Mixer = Literal["attention", "linear"]
MLP = Literal["dense", "experts"]


class Parts(NamedTuple):
    """What a layer has; None: not this half."""

    mixer: Mixer | None
    mlp: MLP | None


PLAIN = Parts("attention", "dense")
_OF_SYMBOL = {
    **dict.fromkeys(LINEAR_SYMBOLS, Parts("linear", None)),
    "*": Parts("attention", None),
    "-": Parts(None, "dense"),
    "E": Parts(None, "experts"),
}


def is_on(config: Any) -> bool:
    """Return whether flags or a configuration ask for layers of linear attention."""
    return kind_of(config) is not None


def pattern_of(config: Any) -> str:
    """Return the symbols of the layers, "" where layers are whole ones."""
    names = ("hybrid_override_pattern", "hybrid_layer_pattern")  # Megatron-LM's, until 0.18 and since
    return next((value for name in names if (value := getattr(config, name, None))), "")


def set_pattern(config: Any, pattern: str | None) -> None:
    """Let layers that are built of a TransformerConfig be halves: it has no field for that."""
    if pattern:
        vars(config)["hybrid_override_pattern"] = pattern
        config.hetereogenous_dist_checkpoint = True  # layers are saved by their numbers


def kind_of(config: Any) -> str | None:
    """Return the kind of linear attention, None: there is none."""
    symbol = next((symbol for symbol in pattern_of(config) if symbol in LINEAR_SYMBOLS), None)
    if symbol is not None:
        return LINEAR_SYMBOLS[symbol]
    name = getattr(config, "experimental_attention_variant", None)
    return None if name is None else ALIASES.get(name, name)


def linear_attention_of(config: Any) -> LinearAttention | None:
    """Return the sizes of its layers of linear attention, None: there are none. `config`: completed flags or a
    configuration."""
    kind = kind_of(config)
    if kind not in (GATED_DELTA_NET, MAMBA):
        return None
    sizes = {
        means.shape.removeprefix("linear_attention."): getattr(config, name)
        for name, means in MEANINGS.items()
        if means.needs == f"linear_attention={kind}"
    }
    if kind == MAMBA:
        sizes["num_heads"] = mamba_heads(config)
    return LinearAttention(kind=kind, **sizes)  # type: ignore[arg-type]


def mamba_heads(config: Any) -> int:
    """Return its heads, which flags of a Megatron-LM checkpoint may leave to the hidden size."""
    heads: int = config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim
    return heads


def parts_of_layers(config: Any) -> tuple[Parts, ...]:
    """Return what each layer of the model has. `config`: checked flags or a configuration."""
    symbols = pattern_of(config)
    if symbols:
        return tuple(_OF_SYMBOL[symbol] for symbol in symbols)
    layers, freq = config.num_layers, getattr(config, "linear_attention_freq", None)
    is_linear = layers_with_linear_attention(freq, layers) if is_on(config) else (False,) * layers
    has_experts = (False,) * layers
    if num_experts(config) is not None:
        has_experts = layers_with_experts(config.moe_layer_freq, layers)
    return tuple(
        Parts("linear" if linear else "attention", "experts" if experts else "dense")
        for linear, experts in zip(is_linear, has_experts, strict=True)
    )


def complete_linear_attention(flags: Any) -> None:
    """Fill in what flags of linear attention leave open; sizes that say nothing are refused. Raises InvalidInputError:
    flags of it without it, or a hidden size that Mamba-2's heads do not share evenly."""
    _check_one_kind(pattern_of(flags))
    kind = kind_of(flags)
    for sizes, own, remedy in (
        (DELTA_SIZES, GATED_DELTA_NET, f"add {VARIANT} {GATED_DELTA_NET}, or G to {PATTERN}"),
        (MAMBA_SIZES, MAMBA, f"add M to {PATTERN}"),
    ):
        for name, default in sizes.items():
            if getattr(flags, name) is None:
                setattr(flags, name, default)
            elif kind != own:
                raise InvalidInputError(
                    f"{flag_of(name)} {getattr(flags, name)} is for layers that this model does not have: {remedy}, or "
                    "leave it out"
                )
    if kind == MAMBA and flags.mamba_num_heads is None:
        if 2 * flags.hidden_size % flags.mamba_head_dim:
            raise InvalidInputError(
                f"--mamba-head-dim {flags.mamba_head_dim} does not divide twice --hidden-size {flags.hidden_size}, "
                "which is the width of all heads: change one of them or give --mamba-num-heads"
            )
        flags.mamba_num_heads = 2 * flags.hidden_size // flags.mamba_head_dim
    if flags.linear_attention_freq is not None and flags.experimental_attention_variant is None:
        raise InvalidInputError(
            f"{FREQ} {shown(flags.linear_attention_freq)} says which layers have linear attention: add {VARIANT} "
            f"{GATED_DELTA_NET}, or leave it out"
        )


def check_linear_attention(config: Any) -> None:
    """Refuse what cannot be, and what was not checked together with linear attention. `config`: completed flags or a
    configuration. Raises InvalidInputError: layers or heads that do not fit. Raises UnsupportedFeatureError: another
    variant, or another feature, which the message names."""
    name, symbols = getattr(config, "experimental_attention_variant", None), pattern_of(config)
    if name is not None and ALIASES.get(name, name) != GATED_DELTA_NET:
        raise UnsupportedFeatureError(f"{VARIANT} {unknown_variant(name)}")
    if getattr(config, "is_hybrid_model", False) and not symbols:
        raise UnsupportedFeatureError(
            f"{PATTERN} (TransformerConfig.is_hybrid_model) without a pattern is not supported: give one, or leave it "
            "out"
        )
    if symbols:
        _check_pattern(config, symbols)
    elif name is not None:
        if config.linear_attention_freq is None:
            raise InvalidInputError(f"{VARIANT} needs {FREQ}, which layers have it: {LINEAR_PATTERN}")
        layers_with_linear_attention(config.linear_attention_freq, config.num_layers)
    attention = linear_attention_of(config)
    if attention is None:
        return
    of_rank = attention.of_rank(config.tensor_model_parallel_size)
    refuse_pairs(PATTERN if symbols else VARIANT, config, value=symbols or name)
    _check_layers_have_windows(config)
    _check_matrices_in_fp8(config, of_rank)


def _check_layers_have_windows(config: Any) -> None:
    windows, layers = windows_of(config), enumerate(parts_of_layers(config), 1)
    if windows.are_there and not any(windows.of_layer(at) for at, parts in layers if parts.mixer == "attention"):
        raise InvalidInputError(
            "--window-size is for layers with attention, and none of them has a window: change "
            f"--window-attn-skip-freq {shown(windows.skip_freq)}, or leave both out"
        )


def _check_matrices_in_fp8(config: Any, of_rank: LinearAttention) -> None:
    """Refuse matrices of a tensor-parallel rank whose rows or columns FP8 does not multiply.

    megatron-core asks it of the whole first matrix, TransformerEngine of what a rank has.
    """
    multiple = fp8.ALIGNMENTS.get(fp8.recipe_of(config) or "", 1)
    rows = of_rank.convolved_channels + of_rank.value_channels + of_rank.gate_channels
    for size, what in ((rows, "rows of the first matrix"), (of_rank.value_channels, "columns of the last matrix")):
        if size % multiple:
            raise UnsupportedFeatureError(
                f"{fp8.FLAG} with {of_rank.kind}: the {what} are {size} on a tensor-parallel rank, and "
                f"{fp8.RECIPE_FLAG} {fp8.recipe_of(config)} needs a multiple of {multiple}: change "
                f"--tensor-model-parallel-size, or leave {fp8.FLAG} out"
            )


def check_state_exchange(config: Any, way: str) -> None:
    """Refuse a way to share layers of linear attention where there are none. Raises InvalidInputError: the message has
    the remedy."""
    if way != STATE_EXCHANGE_USES[0] and not is_on(config):
        raise InvalidInputError(
            f"--dynamic-cp-state-exchange {way} is for layers that this model does not have, those with linear "
            f"attention: add {VARIANT} or {PATTERN}, or leave it out"
        )
    exchange = config.cp_comm_type
    if way == "heads" and isinstance(exchange, str) and is_placed(exchange):
        raise InvalidInputError(
            f"--dynamic-cp-state-exchange heads needs equal chunks of a sample on all lanes, and --cp-comm-type "
            f"{exchange} places tokens anywhere: leave one of them out"
        )


def _check_pattern(config: Any, symbols: str) -> None:
    check_symbols(symbols, config.num_layers, has_experts=num_experts(config) is not None)
    _check_one_kind(symbols)
    if getattr(config, "experimental_attention_variant", None) is not None:
        raise InvalidInputError(f"{PATTERN} and {VARIANT} both say which layers are linear: give one of them")


def _check_one_kind(symbols: str) -> None:
    if symbols and len(set(symbols) & set(LINEAR_SYMBOLS)) != 1:
        has = "both" if set(LINEAR_SYMBOLS) <= set(symbols) else "neither"
        raise InvalidInputError(
            f"{PATTERN} {symbols} needs M or G, and has {has}: a model has one kind of linear attention"
        )


def shape_of(model: Any) -> dict[str, Any]:
    """Return what `ModelShape` has of linear attention; {} without it."""
    attention = linear_attention_of(model)
    if attention is None:
        return {}
    symbols = pattern_of(model)
    if symbols:
        return {"linear_attention": attention, "layer_pattern": symbols}
    freq = model.linear_attention_freq
    return {"linear_attention": attention, "linear_attention_freq": freq if isinstance(freq, int) else tuple(freq)}
