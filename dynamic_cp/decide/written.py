"""A config.json of a model: what `hugging_face` reads, written."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models import hugging_face, hybrids, rotation
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.types import Experts, ModelShape

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
"""model_type -> class of transformers."""
_NO_PART = ("source",)
"""Of a shape: what says nothing of a model."""
_NO_COST = ("imbalance",)
"""Of experts: what no config says."""


def config(where: str, shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    """Return a config.json that `hugging_face` reads as this model; the type of the weights is not in it.

    The model_type is that of the first family that has such layers: a model keeps no other trace of its own.

    Args:
        where: what to call the model in errors.
        architecture: its `not_trained` says nothing here.

    Raises:
        UnsupportedFeatureError: no family has such layers.
    """
    if shape.linear_attention is not None:
        values = _common(shape, architecture) | hybrids.written(shape, architecture)
        values["architectures"] = [_CLASSES[values["model_type"]]]
        _check_read_back(where, values, shape, architecture)
        return values
    reasons = [
        *(["no RMSNorm"] * (architecture["normalization"] != "RMSNorm")),
        *(["no gated MLP"] * (not shape.gated_linear_unit)),
        *(
            [f"positions by {architecture['position_embedding_type']}"]
            * (architecture["position_embedding_type"] not in ("rope", "yarn"))
        ),
        *(
            [f"rotary_percent {architecture['rotary_percent']}"]
            * (architecture["rotary_percent"] != 1 and not architecture["rotary_interleaved"])
        ),
        *(["modules that predict further tokens"] * (shape.mtp_num_layers > 0 and not shape.kv_lora_rank)),
    ]
    model_type = _family(shape, architecture, reasons)
    if reasons:
        raise UnsupportedFeatureError(f"{where} has {', '.join(reasons)}: none of {', '.join(_CLASSES)} does")
    values = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "rms_norm_eps": architecture["norm_epsilon"],
        **_common(shape, architecture),
    }
    if shape.experts is not None:
        values |= _experts(shape.experts, shape.num_layers, architecture, model_type)
    if shape.kv_lora_rank:
        values |= _latents(shape, architecture)
    elif model_type in ("llama", "smollm3", "granite"):
        values |= dict.fromkeys(("attention_bias", "mlp_bias"), not architecture["disable_bias_linear"])
        if model_type == "smollm3":
            values["no_rope_layers"] = [1 - one for one in architecture["no_rope_freq"]]
        if model_type == "granite":
            values |= {name: architecture[name] for name in hugging_face.FACTORS}
            values["attention_multiplier"] = architecture["softmax_scale"] or shape.kv_channels**-0.5
    elif model_type in ("gemma", "gemma3_text"):
        values |= _gemma(shape, architecture)
    elif model_type in ("glm", "glm4"):
        values |= {
            "attention_bias": architecture["add_qkv_bias"],
            "partial_rotary_factor": architecture["rotary_percent"],
        }
    elif model_type == "gpt_oss":
        values |= {"attention_bias": True, "swiglu_limit": architecture["activation_func_clamp_value"]}
        values["sliding_window"] = shape.window_tokens or None
        values["layer_types"] = list(hugging_face.layer_types(shape.windowed_layers))
        if architecture["position_embedding_type"] == "rope":  # there YaRN is what a config without it has
            values["rope_parameters"] = {"rope_type": "default", "rope_theta": architecture["rotary_base"]}
    elif model_type in ("mistral", "mixtral"):
        values["sliding_window"] = shape.window_tokens or None
    else:
        values |= {"use_sliding_window": shape.num_windowed_layers > 0, "sliding_window": shape.window_tokens or None}
        if model_type != "qwen3_moe":
            values["layer_types"] = list(hugging_face.layer_types(shape.windowed_layers))
    if model_type in ("smollm3", "glm", "glm4"):
        values["pad_token_id"] = None  # by default it is one of their own vocabulary
    if model_type == "qwen2_moe":
        values["qkv_bias"] = architecture["add_qkv_bias"]
    _check_read_back(where, values, shape, architecture)
    return values


def _gemma(shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if not shape.sandwich_norm:
        return values
    bases = {"full_attention": architecture["rotary_base"], "sliding_attention": architecture["window_rotary_base"]}
    scale = architecture["softmax_scale"]
    return values | {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "query_pre_attn_scalar": round(scale**-2) if scale else shape.kv_channels,
        "sliding_window": shape.window_tokens or None,
        "layer_types": list(hugging_face.layer_types(shape.windowed_layers)),
    }


def _common(shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    """Return the entries of all families."""
    rotates = architecture["position_embedding_type"] in ("rope", "yarn")
    return {
        **{key: getattr(shape, name) for key, name in hugging_face.SIZES.items()},
        **(rotation.written(architecture) if rotates else {}),
        "max_position_embeddings": architecture["max_position_embeddings"],
        "initializer_range": architecture["init_method_std"],
        "tie_word_embeddings": shape.share_embeddings_and_output_weights,
        "attention_dropout": 0.0,
    }


def _family(shape: ModelShape, architecture: Architecture, reasons: list[str]) -> str:
    """Return the model_type of a model, and add to `reasons` what it does not have."""
    only_some = 0 < shape.num_windowed_layers < shape.num_layers
    if shape.experts is not None and architecture["softmax_type"] == "learnable" and not shape.kv_lora_rank:
        return "gpt_oss"
    reasons += [f"softmax_type {architecture['softmax_type']}"] * (architecture["softmax_type"] != "vanilla")
    reasons += ["gates of another kind than SiLU's"] * architecture["quick_geglu"]
    has_biases = not architecture["disable_bias_linear"] or architecture["add_qkv_bias"]
    if shape.kv_lora_rank:
        reasons += ["latents that are not normalized"] * (not architecture["qk_layernorm"])
        reasons += ["biases and latent attention"] * has_biases
        return "deepseek_v3" if _is_third(shape, architecture) else "deepseek_v2"
    if shape.experts is not None:
        reasons += ["biases and experts"] * (not architecture["disable_bias_linear"])
        if architecture["qk_layernorm"]:
            reasons += ["biases and norms of queries and keys"] * architecture["add_qkv_bias"]
            return "qwen3_moe"
        if architecture["add_qkv_bias"] or shape.experts.shared_ffn_hidden_size:
            return "qwen2_moe"
        return "mixtral"
    if architecture["geglu"]:
        return "gemma3_text" if shape.sandwich_norm else "gemma"
    if shape.sandwich_norm or architecture["rotary_interleaved"]:
        return "glm4" if shape.sandwich_norm else "glm"
    if architecture["softmax_scale"] or any(architecture[name] != 1 for name in hugging_face.FACTORS):
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


def _is_third(shape: ModelShape, architecture: Architecture) -> bool:
    """Return which version of DeepSeek's layers a model has: 3 or 2."""
    if shape.experts is None:
        return shape.q_lora_rank > 0 or shape.mtp_num_layers > 0
    return bool(architecture["moe_router_score_function"] == "sigmoid")


def _experts(experts: Experts, num_layers: int, architecture: Architecture, model_type: str) -> dict[str, Any]:
    have_some = experts.moe_layers(num_layers)
    values: dict[str, Any] = {"num_experts_per_tok": experts.topk}
    if model_type in ("mixtral", "gpt_oss"):
        return values | {"num_local_experts": experts.num_experts}
    values["moe_intermediate_size"] = experts.ffn_hidden_size
    if model_type in ("qwen2_moe", "qwen3_moe"):
        values |= {
            "num_experts": experts.num_experts,
            "norm_topk_prob": not architecture["moe_router_pre_softmax"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, has_some in enumerate(have_some) if not has_some],
        }
        if model_type == "qwen2_moe":
            values["shared_expert_intermediate_size"] = experts.shared_ffn_hidden_size
        return values
    is_third = model_type == "deepseek_v3"
    return values | {
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_ffn_hidden_size // experts.ffn_hidden_size,
        "first_k_dense_replace": have_some.index(True),
        "moe_layer_freq": 1,
        "norm_topk_prob": is_third,
        "scoring_func": architecture["moe_router_score_function"],
        "topk_method": "noaux_tc"
        if is_third
        else "group_limited_greedy"
        if architecture["moe_router_num_groups"]
        else "greedy",
        "n_group": architecture["moe_router_num_groups"] or 1,
        "topk_group": architecture["moe_router_group_topk"] or 1,
        "routed_scaling_factor": architecture["moe_router_topk_scaling_factor"],
    }


def _latents(shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {key: getattr(shape, name) for key, name in hugging_face.LATENT_SIZES.items()}
    values |= {
        "head_dim": shape.qk_pos_emb_head_dim,
        "num_key_value_heads": shape.num_attention_heads,
        "q_lora_rank": shape.q_lora_rank or None,
        "attention_bias": False,
    }
    if shape.experts is None:
        values["first_k_dense_replace"] = shape.num_layers
    if _is_third(shape, architecture):
        values[hugging_face.MODULES] = shape.mtp_num_layers
    return values


def _check_read_back(where: str, values: dict[str, Any], shape: ModelShape, architecture: Architecture) -> None:
    """Check that these values are read as the model that they were written for.

    Raises:
        UnsupportedFeatureError: they are not: the model has something that its family has not.
    """
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
            f"{where} has {', '.join(differ)}, which {values['model_type']} has not: none of {', '.join(_CLASSES)} does"
        )
