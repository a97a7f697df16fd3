"""Layers of a hybrid from a Hugging Face config.json: some of them have linear attention.

Qwen3-Next and the text of Qwen3.5 have gated delta nets; Nemotron-H, Granite 4 and Bamba have Mamba-2, as patterns of
half layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dynamic_cp.decide.config_json.entries import SIZES, Entries, in_one_number
from dynamic_cp.decide.config_json.families import FACTORS, FAMILIES, MODULES, MODULES_AGAIN, PATTERN, Family, names
from dynamic_cp.decide.config_json.rotation import experts_of
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import LinearAttention

_SYMBOLS = {
    **dict.fromkeys(("linear_attention", "mamba"), "M"),
    **dict.fromkeys(("full_attention", "attention"), "*"),
    "mlp": "-",
    "moe": "E",
}
"""Entry of a list of layers -> symbol of a pattern."""
_KNOWN = names(
    """layers_block_type full_attention_interval moe_shared_expert_intermediate_size routed_scaling_factor n_group
    topk_group shared_intermediate_size attn_layer_indices position_embedding_type layer_norm_epsilon mlp_hidden_act
    mamba_hidden_act expand mamba_expand use_conv_bias mamba_conv_bias use_bias mamba_proj_bias residual_in_fp32
    hidden_dropout time_step_limit mamba_dt_limit attention_multiplier attn_output_gate output_gate_type
    mamba_ssm_dtype"""
    # How kernels compute, how weights begin, what is kept while text is generated, and modules of other files.
    """ chunk_size mamba_chunk_size use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep time_step_min
    time_step_max time_step_floor rescale_prenorm_residual moe_shared_expert_overlap mtp_hybrid_override_pattern
    mtp_layers_block_type mamba_dt_min mamba_dt_max mamba_dt_init_floor z_loss_coefficient"""
) | {PATTERN, MODULES_AGAIN, *FACTORS, *(row.entry for family in FAMILIES.values() for row in family.linear)}
"""Entries that are read, refused, or change nothing that is trained, beside those of all families."""


def known_entries(model_type: str) -> frozenset[str]:
    """Return the entries of a hybrid that are known here, beside those of all families."""
    return _KNOWN | (_AGAIN_IN_NEMOTRON.keys() if model_type == "nemotron_h" else frozenset())


def layers(config: Entries, family: Family) -> dict[str, Any]:
    """Return the fields of `ModelShape` that describe the layers; errors as of `hugging_face.model_shape`."""
    hidden_size, heads = (config.whole(key, SIZES) for key in ("hidden_size", "num_attention_heads"))
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.whole("num_key_value_heads", SIZES, heads),
        "vocab_size": config.whole("vocab_size", SIZES),
        **_LAYERS[config["model_type"]](config, family),
        "linear_attention": _linear(config, family),
    }


def _linear(config: Entries, family: Family) -> LinearAttention:
    values = {row.name.rpartition(".")[2]: row.read(config) for row in family.linear}
    return LinearAttention(kind=family.kind, **values)  # type: ignore[arg-type]


def _listed(config: Entries, family: Family, *keys: str) -> str | None:
    """Return the layers as symbols, from the entries that say them; None if none of `keys` does. Raise
    UnsupportedFeatureError for a layer that this family lacks, InvalidInputError for contradictions."""
    given = {key: _symbols(config, family, key) for key in keys if config.get(key) is not None}
    num_layers = config.whole("num_hidden_layers", SIZES, 0)
    for key, symbols in given.items():
        if num_layers:
            config.check_length(key, symbols, num_layers)
    if len(set(given.values())) > 1:
        raise InvalidInputError(f"{config.where}: {' and '.join(given)} say other layers: leave one of them out")
    return next(iter(given.values()), None)


def _symbols(config: Entries, family: Family, key: str) -> str:
    found, known = config[key], family.entries
    if key == PATTERN and isinstance(found, str):
        return found  # `ModelShape` looks at its symbols
    if not isinstance(found, list) or (unknown := [one for one in found if one not in known]):
        wrong = f"has {unknown[0]!r}" if isinstance(found, list) else f"is {found!r}"
        raise UnsupportedFeatureError(f"{config.where}: {key} {wrong}, layers are {', '.join(known)}")
    return "".join(_SYMBOLS[one] for one in found)


def _head_dim(config: Entries, default: int) -> int:
    """Return the width of a head; default 0: hidden_size over the heads."""
    hidden_size, heads = (config.whole(key, SIZES) for key in ("hidden_size", "num_attention_heads"))
    return config.whole("head_dim", SIZES, default or hidden_size // max(1, heads))


def _of_qwen(config: Entries, family: Family) -> dict[str, Any]:
    """Return layers of Qwen3-Next and of the text of Qwen3.5: gated delta nets in all but every fourth."""
    num_layers = config.whole("num_hidden_layers", SIZES)
    has_some = family.experts is not None and config.whole(family.experts.number, SIZES) > 0
    experts = experts_of(config, family, num_layers) if has_some else None
    symbols = _listed(config, family, "layer_types")
    freq = None if symbols is None else in_one_number([symbol == "M" for symbol in symbols])
    return {
        "num_layers": num_layers,
        "kv_channels": _head_dim(config, 256),
        "ffn_hidden_size": config.whole("intermediate_size", SIZES, experts.ffn_hidden_size if experts else None),
        "linear_attention_freq": config.whole("full_attention_interval", SIZES, 4) if freq is None else freq,
        "mtp_num_layers": config.whole(MODULES, SIZES, 0),
        "experts": experts,
    }


def _of_nemotron(config: Entries, family: Family) -> dict[str, Any]:
    """Return layers of Nemotron-H and 3: a symbol for each half of a layer."""
    pattern, latents = _pattern(config, family), config.get("moe_latent_size")
    if latents:
        raise UnsupportedFeatureError(
            f"{config.where}: moe_latent_size is {latents}: experts of latents are not priced"
        )
    return {
        "num_layers": len(pattern),
        "kv_channels": _head_dim(config, 128),
        "ffn_hidden_size": config.whole("intermediate_size", SIZES),
        "layer_pattern": pattern,
        "experts": experts_of(config, family, len(pattern)) if "E" in pattern else None,
    }


def _pattern(config: Entries, family: Family) -> str:
    symbols = _listed(config, family, "layers_block_type", "layer_types", PATTERN)
    if symbols is None:
        raise InvalidInputError(
            f"{config.where} lacks layers_block_type and {PATTERN}: one of them says what layers are"
        )
    return symbols


def route_to_experts(config: Entries, family: Family) -> bool:
    """Return whether routers of a hybrid have choices beside those that rows say."""
    return config["model_type"] == "nemotron_h" and "E" in _pattern(config, family)


def _with_mlp(config: Entries, family: Family) -> dict[str, Any]:
    """Return layers of Granite 4 and Bamba: a mixer and an MLP, or experts; a pattern has two halves for each."""
    num_layers, experts = config.whole("num_hidden_layers", SIZES), None
    symbols = _listed(config, family, "layer_types", "layers_block_type")
    if symbols is None:
        whole = [] if family.experts else config.some_layers("attn_layer_indices")
        symbols = "".join("*" if layer in whole else "M" for layer in range(num_layers))
    if family.experts is None:
        width = config.whole("intermediate_size", SIZES)
    else:
        config[family.experts.shared] = width = config.whole(family.experts.shared, SIZES, 1024)
        if config.whole(family.experts.number, SIZES, 0):
            experts = experts_of(config, family, num_layers)
    kv_channels, heads = _head_dim(config, 0), config.whole("mamba_n_heads", SIZES, 128)
    inner = config.whole("mamba_expand", SIZES, 2) * config.whole("hidden_size", SIZES) // max(1, heads)
    if config.get("mamba_d_head", "auto") == "auto":
        config["mamba_d_head"] = inner
    return {
        "num_layers": 2 * num_layers,
        "kv_channels": kv_channels,
        "ffn_hidden_size": width,
        "layer_pattern": "".join(symbol + ("E" if experts else "-") for symbol in symbols),
        "experts": experts,
    }


_LAYERS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _of_qwen),
    "nemotron_h": _of_nemotron,
    **dict.fromkeys(("granitemoehybrid", "bamba"), _with_mlp),
}
_SAME = {
    "hidden_act": ("silu", "swish"),
    "mamba_hidden_act": ("silu",),
    "mlp_hidden_act": ("relu2",),
    "use_conv_bias": (True,),
    "mamba_conv_bias": (True,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
}
"""Entry -> values with which layers are those of pretrain_gpt.py."""
_SAME_OF_NEMOTRON = {**_SAME, "hidden_act": ("relu2", "silu")}
"""Its MLPs go by mlp_hidden_act."""
_AGAIN_IN_NEMOTRON = {
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
    "attention_head_dim": ("head_dim", 128),
}
"""Entry -> the entry that transformers reads, which must be equal, and its default."""
_OFF = (
    *("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "attention_dropout", "hidden_dropout"),
    *("residual_in_fp32", "sliding_window"),
)
"""Entries that must be off: hybrids here have no such thing."""


def differs(config: Entries, family: Family) -> Iterator[str]:
    """Yield what a config says that no run of ours does."""
    is_nemotron = config["model_type"] == "nemotron_h"
    for key, same in (_SAME_OF_NEMOTRON if is_nemotron else _SAME).items():
        if config.get(key, same[0]) not in same:
            yield f"{key} {config[key]!r}: it is {same[0]}"
    for key, (read, default) in _AGAIN_IN_NEMOTRON.items() if is_nemotron else ():
        value = default if config.get(read) is None else config[read]
        if config.get(key) not in (None, value):
            yield f"{key} {config[key]!r}: {read} is {value}"
    for key in _OFF if family.kind == "gated_delta_net" else (*_OFF, MODULES):
        if config.get(key):
            yield f"{key} {config[key]!r}: layers of hybrids have none"
    limits = config.get("time_step_limit") or config.get("mamba_dt_limit")
    if isinstance(limits, Sequence) and any(isinstance(one, int | float) and 0 < one < float("inf") for one in limits):
        yield f"time_step_limit {list(limits)}: steps of Mamba-2 have no limits"
    if family.differs:
        yield f"model_type {config['model_type']}: {family.differs}"
        for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):
            if config.get(key, 1.0) != 1.0:
                yield f"{key} {config[key]}: no factors"
