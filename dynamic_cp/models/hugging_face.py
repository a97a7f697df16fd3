"""The shape and the architecture of a model from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import hybrids
from dynamic_cp.models.architecture import Architecture, architecture_of
from dynamic_cp.models.entries import SIZES as SIZES
from dynamic_cp.models.entries import (
    in_one_number,
    interval,
    is_tied,
    named,
    number,
    others,
    some_layers,
    sparse_layers,
    whole_number,
)
from dynamic_cp.models.rotation import rotation
from dynamic_cp.models.routing import routing
from dynamic_cp.types import Experts, ModelShape

_GEMMAS = ("gemma", "gemma2", "gemma3_text")
"""Decoders that tie their embeddings unless they say so."""
WHY_NOT_TRAINED = {
    "gemma2": "scores and logits that are capped",
    **dict.fromkeys(("olmo2", "olmo3"), "norms behind attention and MLP alone, and of all heads together"),
}
"""Decoders whose layers differ from the others' in what is not priced -> how they differ."""
_LATENTS = ("deepseek_v2", "deepseek_v3")
"""Decoders with multi-latent attention; version 3 may predict further tokens."""
_DEEPSEEKS = ("deepseek", *_LATENTS)
_MOES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *_DEEPSEEKS)
"""Decoders with experts, in some layers at least; those of DeepSeek may have none."""
_GLMS = ("glm", "glm4")
"""Decoders that rotate neighbouring channels, of half a head unless they say so, with biases in the QKV projection."""
_DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    *_GLMS,
    *_GEMMAS,
    *_MOES,
)
"""Decoders with a gate and an up projection in each MLP, whatever their hidden_act."""
_QWENS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_ASKED_FOR = (*_QWENS, "smollm3")
"""Decoders that have windows only if use_sliding_window says so."""
_NO_WINDOWS = ("llama", "gemma", "granite", "olmo2", *_GLMS)
PARTLY_ROTATED = ("phi3", *_GLMS, *hybrids.PARTLY_ROTATED)
"""Families for which transformers reads partial_rotary_factor."""
MODULES = hybrids.MODULES
"""Entry: modules that predict further tokens."""
_ENCODERS = {"bert": False, "modernbert": True}
"""Dense models whose tokens attend to their whole sample -> whether the MLP has a gate."""
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""model_type -> the one whose layers it has."""
MODEL_TYPES = (*_DECODERS, *SAME_AS, *hybrids.MODEL_TYPES, *_ENCODERS)
_SLIDING, _WHOLE = "sliding_attention", "full_attention"
"""Entries of layer_types."""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NOT_ATTENTION = {
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_key_head_dim", "linear_attn_config", "attn_type_list"), "linear attention"
    ),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "ssm_state_size", "state_size"), "state spaces"),
    "conv_L_cache": "short convolutions",
    "lru_width": "recurrent layers",
    "index_topk": "sparse attention",
    "attention_chunk_size": "attention within chunks",
    "is_encoder_decoder": "an encoder beside the decoder",
}
"""Key that says tokens meet otherwise than in attention to all before, or to a window -> what it is."""
_NOT_PRICED = {
    **dict.fromkeys(_EXPERT_COUNTS, ("experts", 2)),
    "kv_lora_rank": ("multi-head latent attention", 1),
    "q_lora_rank": ("multi-head latent attention", 1),
    MODULES: ("prediction of several tokens", 1),
}
"""Key of what the cost model has no formula for -> what it is, and the least value with which it is there."""

LATENT_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Entry of latent attention -> field of `ModelShape`."""
_OF_LATENTS = frozenset({*LATENT_SIZES, "q_lora_rank", MODULES})
_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps says."""
_QUICK_GELU = 1.702
"""Factor in the gates of gpt-oss."""
FACTORS = ("residual_multiplier", "embedding_multiplier", "logits_scaling")
"""Entries of Granite, and flags."""
_OF_FAMILY = {
    "gpt_oss": frozenset({"swiglu_alpha", "swiglu_limit", "experts_per_token", "initial_context_length"}),
    "qwen2_moe": frozenset({"qkv_bias"}),
    "phi3": frozenset({"original_max_position_embeddings"}),
    "smollm3": frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    "granite": frozenset({"attention_multiplier", *FACTORS}),
    "gemma": frozenset({"hidden_activation"}),
    "gemma2": frozenset({"hidden_activation", "query_pre_attn_scalar"}),
    "gemma3_text": frozenset({"hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq"}),
}
"""Further entries of a family. The last two of gpt_oss repeat others; that of phi3 belongs to a RoPE that is
refused."""
_OF_EXPERTS = frozenset(
    {
        "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok", "first_k_dense_replace",
        "moe_layer_freq", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor",
        "scoring_func", "seq_aux", "aux_loss_alpha", "ep_size", "qk_head_dim", "rope_interleave",
    }
)  # fmt: skip
"""Entries of DeepSeek on experts, whether layers have some or not, and on heads."""

_ARCHITECTURE = frozenset(
    {
        "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "attention_bias",
        "mlp_bias", "attention_dropout", "hidden_act", "initializer_range", "max_position_embeddings",
        "norm_topk_prob", "quantization_config",
    }
)  # fmt: skip
_NOT_THE_MODEL = frozenset(
    {
        # Files and software.
        "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "transformers.js_config",
        "name_or_path", "_name_or_path", "_commit_hash", "_attn_implementation", "attn_implementation",
        "_attn_implementation_autoset", "use_cache", "torchscript", "pretraining_tp", "use_bfloat16", "tf_legacy_loss",
        "return_dict", "output_hidden_states", "output_attentions", "output_scores", "return_dict_in_generate",
        # Token ids and heads for classes.
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
        "tokenizer_class", "prefix", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
        # Of all models: how a text is computed in parts, and whether tokens attend to those before only.
        "chunk_size_feed_forward", "is_decoder",
        # What routers put out and learn by, which is the run's choice.
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    }
)  # fmt: skip
"""Entries that change nothing that is trained."""
_PRICED = frozenset(
    {
        *SIZES, *_NOT_PRICED, *_OF_LATENTS, "model_type", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "n_shared_experts",
        "shared_expert_intermediate_size", "tie_word_embeddings", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "sliding_window_pattern", "_sliding_window_pattern",
    }
)  # fmt: skip
"""Entries that `model_shape` reads or refuses."""


def is_config(data: Mapping[str, Any]) -> bool:
    """Return whether `data` looks like a Hugging Face config.json rather than a file of this project."""
    return "model_type" in data or "num_hidden_layers" in data


def model_shape(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the shape in `data`, the content of a config.json; `where` names the file in errors.

    Raises:
        UnsupportedFeatureError: a model_type whose layers are not known here, or what has no price.
        InvalidInputError: a key that is missing or of the wrong type, or windows that contradict each other.

    Limits: biases, query/key norms and the layer before a masked LM's head are not counted.
    """
    if hybrids.is_config(data):
        return hybrids.model_shape(where, data)
    source = f"{where} (Hugging Face config, model_type {data.get('model_type')})"
    data = _as_family(data)
    model_type = data.get("model_type")
    _refuse_what_has_no_price(where, data)
    if str(model_type) not in MODEL_TYPES:
        raise UnsupportedFeatureError(
            f"{where}: model_type is {model_type!r}, known are {', '.join(MODEL_TYPES)}: "
            "write the numbers into a file like the bundled models",
            key="model_type",
        )
    _check_layer_types(where, data)
    latents = _latents(where, data)
    values = _completed(where, data, latents)
    sizes: dict[str, Any] = {name: whole_number(where, values, key, SIZES) for key, name in SIZES.items()}
    with named(where):
        return ModelShape(
            **sizes,
            gated_linear_unit=_ENCODERS.get(str(model_type), True),
            causal_attention=model_type not in _ENCODERS or bool(data.get("is_decoder")),
            share_embeddings_and_output_weights=is_tied(where, values),
            sandwich_norm=model_type in ("glm4", "gemma3_text"),
            **_windows(where, data, sizes["num_layers"]),
            experts=_experts(where, data, sizes["num_layers"]) if _has_experts(data) else None,
            **latents,
            source=source,
        )


def _as_family(data: Mapping[str, Any]) -> Mapping[str, Any]:
    same = SAME_AS.get(str(data.get("model_type")))
    return data if same is None else {**data, "model_type": same}


def _check_layer_types(where: str, data: Mapping[str, Any]) -> None:
    """Refuse layers whose attention has no price."""
    model_type = data.get("model_type")
    layer_types = some_layers(where, data, "layer_types")
    every = data.get("global_attn_every_n_layers", 3)
    if model_type == "modernbert" and not layer_types and every != 1:
        raise UnsupportedFeatureError(
            f"{where}: global_attn_every_n_layers is {every!r}, only attention over whole sequences is priced: set it "
            "to 1",
            key="global_attn_every_n_layers",
        )
    priced = {_WHOLE} if model_type in _ENCODERS else {_WHOLE, _SLIDING}
    if others := {str(one) for one in layer_types} - priced:
        raise UnsupportedFeatureError(
            f"{where}: layer_types has {', '.join(sorted(others))}, only {' and '.join(sorted(priced))} are priced for "
            f"model_type {model_type}",
            key="layer_types",
        )


def _completed(where: str, data: Mapping[str, Any], latents: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with the sizes that a model type leaves to its code."""
    model_type = data.get("model_type")
    values = dict(data)
    if latents:
        # transformers has other numbers in head_dim of some of these; each query head has its own keys.
        values["head_dim"] = latents["qk_head_dim"] + latents["qk_pos_emb_head_dim"]
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type in _ENCODERS:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type in (*_ENCODERS, *_GEMMAS, "smollm3"):
        values.setdefault("tie_word_embeddings", True)
    if model_type in ("llama", "phi3") and values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type not in ("qwen3", "qwen3_moe", "gpt_oss") and values.get("head_dim") is None:
        values["head_dim"] = _divided(where, values)
    return values


def _latents(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of latent attention and of further tokens under the names of `ModelShape`; {} for other
    models."""
    if data.get("model_type") not in _LATENTS:
        return {}
    found = {name: whole_number(where, data, key, LATENT_SIZES) for key, name in LATENT_SIZES.items()}
    for key, name in (("q_lora_rank", "q_lora_rank"), (MODULES, "mtp_num_layers")):
        if data.get(key) is not None:
            found[name] = whole_number(where, data, key, (key,))
    return found


def num_modules(where: str, data: Mapping[str, Any]) -> int:
    """Return the number of modules that predict further tokens."""
    return 0 if data.get(MODULES) is None else whole_number(where, data, MODULES, (MODULES,))


def _has_experts(data: Mapping[str, Any]) -> bool:
    if data.get("model_type") not in _DEEPSEEKS:
        return data.get("model_type") in _MOES
    first, layers = data.get("first_k_dense_replace"), data.get("num_hidden_layers")
    return data.get("n_routed_experts") is not None and not (
        isinstance(first, int) and isinstance(layers, int) and first >= layers
    )


def _windows(where: str, data: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return `window_tokens` and `window_attn_skip_freq` of the shape, with the layers of transformers. A sliding
    window counts the token itself, as `window_tokens` does."""
    model_type, layer_types = data.get("model_type"), data.get("layer_types")
    is_used = data.get("use_sliding_window", model_type not in _ASKED_FOR)
    window = data.get("sliding_window") if is_used and model_type not in _ENCODERS else None
    if window is None:
        if layer_types and _SLIDING in layer_types:
            raise InvalidInputError(
                f"{where}: layer_types has {_SLIDING}, and sliding_window is {data.get('sliding_window')!r}, "
                f"use_sliding_window {data.get('use_sliding_window')!r}: give the window, or {_WHOLE} only",
                key="layer_types",
            )
        return {}
    if model_type in _NO_WINDOWS:
        raise UnsupportedFeatureError(
            f"{where}: sliding_window is {window!r}, which model_type {model_type} does not have: set it to null",
            key="sliding_window",
        )
    window = whole_number(where, data, "sliding_window", ("sliding_window",))
    if layer_types:
        windowed = [one == _SLIDING for one in layer_types]
        if len(windowed) != num_layers:
            raise InvalidInputError(
                f"{where}: layer_types has {len(windowed)} entries, num_hidden_layers is {num_layers}: give one for "
                "each layer",
                key="layer_types",
            )
    elif model_type in _QWENS:
        first = whole_number(where, {"max_window_layers": 28, **data}, "max_window_layers", ())
        windowed = [layer >= first for layer in range(num_layers)]
    elif model_type in _GEMMAS:
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in data else "sliding_window_pattern"
        every = interval(where, data, key, 2 if model_type == "gemma2" else 6)
        windowed = [layer % every != 0 for layer in range(1, num_layers + 1)]
    else:
        windowed = [True] * num_layers
    if not any(windowed):
        return {}
    return {"window_tokens": window, "window_attn_skip_freq": 0 if all(windowed) else in_one_number(windowed)}


def _experts(where: str, data: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of a model of one of `_MOES`, with the layers of transformers."""
    model_type = data["model_type"]

    def entry(key: str, default: int | None = None) -> int:
        return whole_number(where, data if data.get(key) is not None else {**data, key: default}, key, needed)

    if model_type in ("mixtral", "gpt_oss"):
        needed: tuple[str, ...] = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
        counts, width, moe = "num_local_experts", entry("intermediate_size"), [True] * num_layers
    elif model_type in _DEEPSEEKS:
        needed = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        counts, width = "n_routed_experts", entry("moe_intermediate_size")
        first, every = entry("first_k_dense_replace", 0), interval(where, data, "moe_layer_freq", 1)
        moe = [layer >= first and layer % every == 0 for layer in range(num_layers)]
    else:
        needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        # transformers 5 writes this name into configs of qwen3_moe.
        counts = "num_local_experts" if data.get("num_experts") is None and "num_local_experts" in data else needed[0]
        width, moe = entry("moe_intermediate_size"), sparse_layers(where, data, num_layers)
    shared = entry("n_shared_experts", 0) * width if model_type in _DEEPSEEKS else 0
    if model_type == "qwen2_moe":
        shared = entry("shared_expert_intermediate_size", 0)
    return Experts(
        num_experts=entry(counts),
        topk=entry("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        shared_gate=model_type == "qwen2_moe" and shared > 0,
        layer_freq=1 if all(moe) else tuple(map(int, moe)),
    )


def layer_types(windowed: Sequence[bool]) -> Iterator[str]:
    """Yield the entries of layer_types for layers with and without a window."""
    yield from (_SLIDING if has_one else _WHOLE for has_one in windowed)


def _refuse_what_has_no_price(where: str, data: Mapping[str, Any]) -> None:
    """Refuse what the cost model has no formula for; other ways for tokens to meet are named first, and alone."""
    parts = [data, *(part for part in data.values() if isinstance(part, Mapping))]  # text_config, ffn_config
    found: dict[str, str] = {}
    for part in parts:
        for key, what in _NOT_ATTENTION.items():
            if value := part.get(key):
                number = f" {value}" if isinstance(value, int) else ""
                found.setdefault(what, f"{what} ({key}{number})")
    model_type = data.get("model_type")
    priced = {*(_EXPERT_COUNTS if model_type in _MOES else ()), *(_OF_LATENTS if model_type in _LATENTS else ())}
    for part in () if found else parts:
        for key, (what, least) in _NOT_PRICED.items():
            value = None if key in priced and part is data else part.get(key)
            if isinstance(value, int) and value >= least:
                found.setdefault(what, f"{what} ({key} {value})")
    if found:
        raise UnsupportedFeatureError(
            f"{where}: model_type {data.get('model_type')!r} has {' and '.join(found.values())}, which cannot be "
            f"priced yet: give one of {', '.join(MODEL_TYPES)}",
            key=next(iter(found)),
        )


def architecture(where: str, data: Mapping[str, Any]) -> Architecture:
    """Return what `data`, whose shape `model_shape` has read, says beyond it; InvalidInputError for a wrong type.
    Nothing is left out silently: `not_trained` has what pretrain_gpt.py lacks, `not_read` what transformers does not
    read either, `not_imported` quantized weights, which do not matter to a run that starts without them."""
    if hybrids.is_config(data):
        return hybrids.architecture(where, data, _ARCHITECTURE | _NOT_THE_MODEL)
    data = _as_family(data)
    model_type = data.get("model_type")
    rotates, not_trained = rotation(where, data)
    routes, why_routed_otherwise = routing(where, data) if _has_experts(data) else ({}, [])
    attention_bias, mlp_bias = bool(data.get("attention_bias")), bool(data.get("mlp_bias"))
    of_qkv = model_type == "qwen2" or (model_type == "qwen2_moe" and bool(data.get("qkv_bias", True)))
    if model_type in _GLMS:
        attention_bias, of_qkv = False, bool(data.get("attention_bias", True))
    not_trained += why_routed_otherwise
    if model_type == "gpt_oss":
        # One entry is for all biases, those of experts and of their router among them.
        attention_bias = mlp_bias = bool(data.get("attention_bias", True))
        not_trained += _why_gpt_oss_differs(data)
    not_trained += _why_trained_otherwise(where, data, rotates, attention_bias, mlp_bias)
    refused, not_read = ([], ()) if model_type in _ENCODERS else others(data, known_entries(str(model_type)))
    not_trained += refused
    return architecture_of(
        {
            "normalization": "RMSNorm",
            "norm_epsilon": number(where, data, "rms_norm_eps", 1e-6),
            "disable_bias_linear": not (attention_bias and mlp_bias),
            "add_qkv_bias": of_qkv,
            "qk_layernorm": model_type in ("qwen3", "qwen3_moe", "gemma3_text", *_LATENTS),
            **rotates,
            "rotary_interleaved": model_type in _GLMS,
            "no_rope_freq": _unrotated(where, data) if model_type == "smollm3" else (),
            **(_factors(where, data) if model_type == "granite" else {}),
            **(_of_gemma(where, data) if model_type in _GEMMAS else {}),
            **routes,
            **(_activation(where, data) if model_type == "gpt_oss" else {}),
            "max_position_embeddings": int(number(where, data, "max_position_embeddings", 0)),
            "init_method_std": number(where, data, "initializer_range", 0.02),
        },
        not_trained=tuple(not_trained),
        not_imported=(f"quantization_config {quantized!r}: weights are quantized, save the model in bfloat16",)
        if (quantized := data.get("quantization_config"))
        else (),
        not_read=not_read,
    )


def known_entries(model_type: str) -> frozenset[str]:
    """Return the entries of a config of `model_type` that are read or refused here, or change nothing."""
    if model_type in hybrids.MODEL_TYPES:
        return hybrids.known_entries(model_type, _ARCHITECTURE | _NOT_THE_MODEL)
    of_experts = _OF_EXPERTS if model_type in _LATENTS else frozenset()
    return _PRICED | _ARCHITECTURE | _NOT_THE_MODEL | of_experts | _OF_FAMILY.get(model_type, frozenset())


def _why_trained_otherwise(
    where: str, data: Mapping[str, Any], rotates: Mapping[str, Any], attention_bias: bool, mlp_bias: bool
) -> list[str]:
    """Return what a config says that no run of ours does."""
    model_type, reasons = data.get("model_type"), []
    if attention_bias != mlp_bias:
        on, off = ("attention_bias", "mlp_bias") if attention_bias else ("mlp_bias", "attention_bias")
        reasons.append(f"{on} without {off}: linear layers have biases everywhere, in the QKV projection or nowhere")
    if model_type in _ENCODERS:
        reasons.append(f"model_type {model_type}: an encoder")
    if model_type in WHY_NOT_TRAINED:
        reasons.append(f"model_type {model_type}: {WHY_NOT_TRAINED[model_type]}")
    if model_type in _LATENTS:
        reasons += _why_latents_differ(where, data)
        if not rotates.get("yarn_correction_range_round_to_int", True):
            reasons.append("truncate false of YaRN: latent attention rounds where stretching begins and ends")
    if model_type == "qwen3_moe" and data.get("use_sliding_window") and data.get("sliding_window"):
        reasons.append("use_sliding_window true of qwen3_moe: releases of transformers disagree which layers have one")
    if data.get("attention_dropout"):
        reasons.append(f"attention_dropout {data['attention_dropout']}: attention has none")
    if model_type in _GEMMAS:
        key = "hidden_activation" if data.get("hidden_activation") else "hidden_act"
        if data.get(key, _TANH_GELU) != _TANH_GELU:
            reasons.append(f"{key} {data[key]}: a gated MLP of Gemma has {_TANH_GELU}")
    elif data.get("hidden_act", "silu") not in ("silu", "swish"):
        reasons.append(f"hidden_act {data['hidden_act']}: a gated MLP has SiLU")
    return reasons


_TANH_GELU = "gelu_pytorch_tanh"


def _of_gemma(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of what layers of Gemma do in their own way."""
    values = _completed(where, data, {})
    hidden_size, width = (whole_number(where, values, key, SIZES) for key in ("hidden_size", "head_dim"))
    found = {"apply_layernorm_1p": True, "geglu": True, "embedding_multiplier": float(hidden_size) ** 0.5}
    scale = number(where, data, "query_pre_attn_scalar", 256)
    if scale == 0:
        raise InvalidInputError(
            f"{where}: query_pre_attn_scalar is 0: scores are divided by its root", key="query_pre_attn_scalar"
        )
    if data["model_type"] != "gemma" and scale != width:
        found["softmax_scale"] = float(scale) ** -0.5
    return found


def _factors(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of a Granite; that of scores is 0 if it follows from the width of a head."""
    width = whole_number(where, _completed(where, data, {}), "head_dim", SIZES)
    scale = float(number(where, data, "attention_multiplier", 1.0))
    factors = {name: float(number(where, data, name, 1.0)) for name in FACTORS}
    return factors | {"softmax_scale": 0.0 if scale == width**-0.5 else scale}


def _unrotated(where: str, data: Mapping[str, Any]) -> tuple[int, ...]:
    """Return 1 for each layer of a SmolLM3 that does not rotate and 0 for others, () if all do."""
    num_layers = whole_number(where, data, "num_hidden_layers", SIZES)
    rotated = data.get("no_rope_layers")  # which, despite its name, has 1 for those that do
    if rotated is None:
        every = interval(where, data, "no_rope_layer_interval", 4)
        rotated = [int(layer % every != 0) for layer in range(1, num_layers + 1)]
    if not isinstance(rotated, list) or len(rotated) != num_layers or set(rotated) - {0, 1}:
        raise InvalidInputError(
            f"{where}: no_rope_layers is {rotated!r}: give 1 (rotates) or 0 for each of the {num_layers} layers",
            key="no_rope_layers",
        )
    return tuple(1 - one for one in rotated) if 0 in rotated else ()


def _activation(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of MLPs and attention of a gpt-oss model."""
    return {
        "softmax_type": "learnable",
        "quick_geglu": True,
        "activation_func_clamp_value": float(number(where, data, "swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
    }


def _why_gpt_oss_differs(data: Mapping[str, Any]) -> list[str]:
    """Return what a gpt-oss model has that pretrain_gpt.py does not."""
    why_not = []
    if not data.get("attention_bias", True):
        why_not.append("attention_bias false: linear layers of gpt_oss have biases, those of experts and routers, too")
    if data.get("swiglu_alpha", _QUICK_GELU) != _QUICK_GELU:
        why_not.append(f"swiglu_alpha {data['swiglu_alpha']}: gates have {_QUICK_GELU}")
    if data.get("sliding_window") and not data.get("layer_types"):
        why_not.append("layer_types: it is missing, and sliding_window is not for all layers")
    return why_not


def _why_latents_differ(where: str, data: Mapping[str, Any]) -> list[str]:
    """Return what latent attention has that pretrain_gpt.py does not."""
    why_not = []
    epsilon = number(where, data, "rms_norm_eps", _LATENT_EPSILON)
    if epsilon != _LATENT_EPSILON:
        why_not.append(f"rms_norm_eps {epsilon}: norms of latents have {_LATENT_EPSILON}, all norms have one here")
    if data.get("attention_bias"):
        why_not.append("attention_bias true: projections of latents have no biases")
    if not data.get("rope_interleave", True):
        why_not.append("rope_interleave false: neighbouring channels are pairs")
    together = sum(whole_number(where, data, key, LATENT_SIZES) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if data.get("qk_head_dim", together) != together:
        why_not.append(f"qk_head_dim {data['qk_head_dim']}: qk_nope_head_dim and qk_rope_head_dim are {together}")
    return why_not


def _divided(where: str, values: Mapping[str, Any]) -> int:
    """Return the width of a head if the file does not state it."""
    hidden_size, heads = (whole_number(where, values, key, SIZES) for key in ("hidden_size", "num_attention_heads"))
    if heads < 1 or hidden_size % heads:
        raise InvalidInputError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}: give head_dim",
            key="head_dim",
        )
    return hidden_size // heads
