"""A config.json of a model: what `hugging_face` reads, written by the same rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dynamic_cp.decide.config_json import hugging_face, rotation
from dynamic_cp.decide.config_json.architecture import Architecture
from dynamic_cp.decide.config_json.entries import SIZES
from dynamic_cp.decide.config_json.families import (
    FACTORS,
    FAMILIES,
    LATENT_SIZES,
    MODULES,
    MODULES_AGAIN,
    SLIDING,
    TANH_GELU,
    WHOLE,
    Family,
)
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import Experts, ModelShape

_NO_PART = ("source",)
"""Of a shape: what says nothing of a model."""
_NO_COST = ("imbalance",)
"""Of experts: what no config says."""
_NO_STEP = 1e-9
"""time_step_min: transformers bounds the steps of Mamba-2 by it, though it is about initial weights; we do not."""
_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Symbol of a pattern of layers -> what transformers calls such a layer."""
_WRITTEN = ", ".join(name for name, family in FAMILIES.items() if family.called)


def config(where: str, shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    """Return a config.json that `hugging_face` reads as this model, without the type of its weights. The model_type is
    that of the first family that has such layers: a model keeps no other trace of its own. Raise
    UnsupportedFeatureError, naming the model by `where`, if no family has; `not_trained` says nothing here."""
    reasons: list[str] = []
    name = _family(shape, architecture, reasons)
    if reasons:
        raise UnsupportedFeatureError(f"{where} has {', '.join(reasons)}: none of {_WRITTEN} does")
    family, values = FAMILIES[name], asdict(shape)
    linear = values["linear_attention"] or {}
    said = {**values, **architecture.flags, **{f"linear_attention.{field}": value for field, value in linear.items()}}
    rotates = architecture["position_embedding_type"] in ("rope", "yarn")
    found = {
        "architectures": [family.called],
        "model_type": name,
        family.act[0]: family.act[1],
        family.epsilon[0]: architecture["norm_epsilon"],
        **{key: said[field] for key, field in SIZES.items()},
        **(rotation.written(architecture) if rotates else {}),
        "max_position_embeddings": architecture["max_position_embeddings"],
        "initializer_range": architecture["init_method_std"],
        "tie_word_embeddings": shape.share_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        **{row.entry: row.turned(said[row.flag]) for row in (*family.linear, *family.rows)},
        **(_experts(family, shape.experts, shape.num_layers, architecture) if shape.experts else {}),
        **(_latents(name, shape) if family.has_latents else _own(name, shape, architecture)),
    }
    _check_read_back(where, found, shape, architecture)
    return found


def _own(name: str, shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    """Return the entries that a family has of its own, beside rows."""
    biases = dict.fromkeys(("attention_bias", "mlp_bias"), not architecture["disable_bias_linear"])
    window = {"sliding_window": shape.window_tokens or None}
    some = {**window, "layer_types": [SLIDING if has_one else WHOLE for has_one in shape.windowed_layers]}
    asked = {"use_sliding_window": shape.num_windowed_layers > 0}
    no_token = {"pad_token_id": None}  # by default it is one of their own vocabulary
    bases = {WHOLE: architecture["rotary_base"], SLIDING: architecture["window_rotary_base"]}
    plain = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    share, scale = {"partial_rotary_factor": architecture["rotary_percent"]}, architecture["softmax_scale"]
    match name:
        case "llama":
            return biases
        case "smollm3":
            return biases | no_token | {"no_rope_layers": [1 - one for one in architecture["no_rope_freq"]]}
        case "granite":
            return biases | {"attention_multiplier": scale or shape.kv_channels**-0.5}
        case "glm" | "glm4":
            return share | no_token
        case "gemma":
            return {"hidden_activation": TANH_GELU}
        case "gemma3_text":
            query = {"query_pre_attn_scalar": round(scale**-2) if scale else shape.kv_channels}
            return some | query | {"hidden_activation": TANH_GELU, "rope_parameters": plain}
        case "gpt_oss":
            is_plain = architecture["position_embedding_type"] == "rope"  # YaRN is what a config without it has
            return some | {"attention_bias": True, **({"rope_parameters": plain[WHOLE]} if is_plain else {})}
        case "mistral" | "mixtral":
            return window
        case "qwen3_moe":
            return asked | window
        case "nemotron_h":
            layers = {"layers_block_type": [_NAMES.get(symbol, symbol) for symbol in shape.layer_pattern]}
            return layers | {"time_step_min": _NO_STEP}
        case "qwen3_next" | "qwen3_5_text":
            linear = {"layer_types": ["linear_attention" if one else WHOLE for one in shape.linear_layers]}
            return share | linear | modules(shape.mtp_num_layers)
    return asked | some


def modules(num_layers: int) -> dict[str, int]:
    """Return the entries for so many modules that predict further tokens; {} without them, as published."""
    return dict.fromkeys((MODULES, MODULES_AGAIN), num_layers) if num_layers else {}


def _family(shape: ModelShape, architecture: Architecture, reasons: list[str]) -> str:
    """Return the model_type of a model, and add to `reasons` what it does not have."""
    if shape.linear_attention is not None:
        return "nemotron_h" if shape.layer_pattern else "qwen3_next" if shape.experts else "qwen3_5_text"
    kind, share = architecture["position_embedding_type"], architecture["rotary_percent"]
    reasons += ["no RMSNorm"] * (architecture["normalization"] != "RMSNorm")
    reasons += ["no gated MLP"] * (not shape.gated_linear_unit)
    reasons += [f"positions by {kind}"] * (kind not in ("rope", "yarn"))
    reasons += [f"rotary_percent {share}"] * (share != 1 and not architecture["rotary_interleaved"])
    reasons += ["modules that predict further tokens"] * (shape.mtp_num_layers > 0 and not shape.kv_lora_rank)
    only_some = 0 < shape.num_windowed_layers < shape.num_layers
    if shape.experts is not None and architecture["softmax_type"] == "learnable" and not shape.kv_lora_rank:
        return "gpt_oss"
    reasons += [f"softmax_type {architecture['softmax_type']}"] * (architecture["softmax_type"] != "vanilla")
    reasons += ["gates of another kind than SiLU's"] * architecture["quick_geglu"]
    has_biases = not architecture["disable_bias_linear"] or architecture["add_qkv_bias"]
    if shape.kv_lora_rank:
        reasons += ["latents that are not normalized"] * (not architecture["qk_layernorm"])
        reasons += ["biases and latent attention"] * has_biases
        if shape.experts is not None:
            return "deepseek_v3" if architecture["moe_router_score_function"] == "sigmoid" else "deepseek_v2"
        return "deepseek_v3" if shape.q_lora_rank > 0 or shape.mtp_num_layers > 0 else "deepseek_v2"
    if shape.experts is not None:
        reasons += ["biases and experts"] * (not architecture["disable_bias_linear"])
        if architecture["qk_layernorm"]:
            reasons += ["biases and norms of queries and keys"] * architecture["add_qkv_bias"]
            return "qwen3_moe"
        return "qwen2_moe" if architecture["add_qkv_bias"] or shape.experts.shared_ffn_hidden_size else "mixtral"
    if architecture["geglu"]:
        return "gemma3_text" if shape.sandwich_norm else "gemma"
    if shape.sandwich_norm or architecture["rotary_interleaved"]:
        return "glm4" if shape.sandwich_norm else "glm"
    if architecture["softmax_scale"] or any(architecture[name] != 1 for name in FACTORS):
        return "granite"
    if architecture["no_rope_freq"]:
        return "smollm3"
    if architecture["qk_layernorm"]:
        reasons += ["biases and norms of queries and keys"] * has_biases
        return "qwen3"
    if architecture["add_qkv_bias"] and architecture["disable_bias_linear"]:
        return "qwen2"
    if shape.num_windowed_layers:
        reasons += ["biases and windows"] * (not architecture["disable_bias_linear"])
        reasons += ["windows in some layers, without biases of QKV or norms of queries and keys"] * only_some
        return "mistral"
    return "llama"


def _experts(family: Family, experts: Experts, num_layers: int, architecture: Architecture) -> dict[str, Any]:
    entries, have_some = family.experts, experts.moe_layers(num_layers)
    if entries is None:
        return {}
    values: dict[str, Any] = {entries.number: experts.num_experts, "num_experts_per_tok": experts.topk}
    if entries.width not in SIZES:
        values[entries.width] = experts.ffn_hidden_size
    if entries.shared:
        shared, width = experts.shared_ffn_hidden_size, experts.ffn_hidden_size
        values[entries.shared] = shared // width if entries.layers == "later" else shared
    if entries.layers == "not listed":
        dense = [layer for layer, has_some in enumerate(have_some) if not has_some]
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if entries.number != "n_routed_experts":
        return values
    values |= {
        "norm_topk_prob": family.routing is not None and family.routing.score == "sigmoid",
        "routed_scaling_factor": architecture["moe_router_topk_scaling_factor"],
        "n_group": architecture["moe_router_num_groups"] or 1,
        "topk_group": architecture["moe_router_group_topk"] or 1,
    }
    if family.routing is None or family.kind:
        return values | {"n_shared_experts": 1}
    limited = "group_limited_greedy" if architecture["moe_router_num_groups"] else "greedy"
    return values | {
        "first_k_dense_replace": have_some.index(True),
        "moe_layer_freq": 1,
        "scoring_func": family.routing.score,
        "topk_method": "noaux_tc" if family.routing.score == "sigmoid" else limited,
    }


def _latents(name: str, shape: ModelShape) -> dict[str, Any]:
    return {
        **{key: getattr(shape, field) for key, field in LATENT_SIZES.items()},
        "head_dim": shape.qk_pos_emb_head_dim,
        "num_key_value_heads": shape.num_attention_heads,
        "q_lora_rank": shape.q_lora_rank or None,
        "attention_bias": False,
        **({"first_k_dense_replace": shape.num_layers} if shape.experts is None else {}),
        **({MODULES: shape.mtp_num_layers} if name == "deepseek_v3" else {}),
    }


def _check_read_back(where: str, values: dict[str, Any], shape: ModelShape, architecture: Architecture) -> None:
    """Raise UnsupportedFeatureError if these values are not read as the model that they were written for, which has
    something that its family has not."""
    read_shape, read = hugging_face.model_shape(where, values), hugging_face.architecture(where, values)
    differ = list(read.not_trained)
    differ += [f"not_imported {architecture.not_imported!r}"] * (architecture.not_imported != read.not_imported)
    for ours, theirs in ((asdict(shape), asdict(read_shape)), (architecture.flags, read.flags)):
        for name, value in ours.items():
            if name in _NO_PART or value == theirs[name]:
                continue
            parts = value if isinstance(value, dict) and theirs[name] is not None else {name: value}
            other = theirs[name] if parts is value else theirs
            differ += [f"{key} {one!r}" for key, one in parts.items() if key not in _NO_COST and other[key] != one]
    if differ:
        raise UnsupportedFeatureError(
            f"{where} has {', '.join(differ)}, which {values['model_type']} has not: none of {_WRITTEN} does"
        )
