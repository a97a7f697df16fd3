"""The shape and the architecture of a model from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.types import Experts, ModelShape

_GEMMAS = ("gemma", "gemma2", "gemma3_text")
"""Decoders whose layers differ from those of the others in what is not priced, and which tie their embeddings."""
_LATENTS = ("deepseek_v2", "deepseek_v3")
"""Decoders with multi-latent attention; version 3 may predict further tokens."""
_DEEPSEEKS = ("deepseek", *_LATENTS)
_MOES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", *_DEEPSEEKS)
"""Decoders with experts, in some layers at least; those of DeepSeek may have none."""
_DECODERS = ("llama", "mistral", "qwen2", "qwen3", *_GEMMAS, *_MOES)
"""With a gate and an up projection in each MLP, whatever their hidden_act."""
_QWENS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
"""Have windows only where use_sliding_window says so."""
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type -> class of transformers, of what `config` writes."""
_ENCODERS = {"bert": False, "modernbert": True}
"""Dense, tokens attend to their whole sample -> whether the MLP has a gate."""
MODEL_TYPES = (*_DECODERS, *_ENCODERS)
_SLIDING, _WHOLE = "sliding_attention", "full_attention"
"""Entries of layer_types."""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NOT_PRICED = {
    **dict.fromkeys(_EXPERT_COUNTS, ("experts", 2)),
    "kv_lora_rank": ("multi-head latent attention", 1),
    "q_lora_rank": ("multi-head latent attention", 1),
    "num_nextn_predict_layers": ("prediction of several tokens", 1),
}
"""Key of what the cost model has no formula for -> what it is, and from which value on it is there."""

_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
}

_LATENT_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_OF_LATENTS = frozenset({*_LATENT_SIZES, "q_lora_rank", "num_nextn_predict_layers"})
_OF_EXPERTS = frozenset(
    {
        "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok", "first_k_dense_replace",
        "moe_layer_freq", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor",
        "scoring_func", "seq_aux", "aux_loss_alpha", "ep_size",
    }
)  # fmt: skip
"""What configs of DeepSeek say of experts, whether layers have some or not."""

_ARCHITECTURE = frozenset(
    {
        "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "attention_bias",
        "mlp_bias", "attention_dropout", "hidden_act", "initializer_range", "max_position_embeddings",
        "norm_topk_prob",
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
        # How text is generated.
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "chunk_size_feed_forward", "is_decoder",
        # What routers put out and learn by, which is the run's choice.
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    }
)  # fmt: skip
"""Entries that change nothing that is trained."""
_PRICED = frozenset(
    {
        *_SIZES, *_NOT_PRICED, *_OF_LATENTS, "model_type", "num_experts_per_tok", "moe_intermediate_size",
        "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "n_shared_experts",
        "shared_expert_intermediate_size", "tie_word_embeddings", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "sliding_window_pattern", "_sliding_window_pattern",
    }
)  # fmt: skip
"""What `model_shape` reads or refuses."""


_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core has fixed of the scaled RoPE of Llama 3.1 to 3.3; the factor is free."""
_LLAMA_3_KEYS = {*_LLAMA_3, "factor", "rope_type", "type", "rope_theta"}


def is_config(data: Mapping[str, Any]) -> bool:
    """Return whether `data` looks like a Hugging Face config.json rather than a file of this project."""
    return "model_type" in data or "num_hidden_layers" in data


def model_shape(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the shape in `data`.

    Args:
        where: what to call the file in errors.
        data: the content of a config.json.

    Raises:
        UnsupportedFeatureError: a model_type whose layers are not known here, or what has no price.
        InvalidInputError: a key that is missing or of the wrong type, or windows that contradict each other.

    Limits: biases, query/key norms and the layer before a masked LM's head are not counted.
    """
    model_type = data.get("model_type")
    _refuse_what_has_no_price(where, data)
    if model_type not in MODEL_TYPES:
        raise UnsupportedFeatureError(
            f"{where}: model_type is {model_type!r}, known are {', '.join(MODEL_TYPES)}: "
            "write the numbers into a file like the bundled models",
            key="model_type",
        )
    layer_types = data.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise InvalidInputError(f"{where}: layer_types is {layer_types!r}, it must be a list", key="layer_types")
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
    values = dict(data)
    latents = _latents(where, data)
    if latents:
        # transformers has other numbers in head_dim of some of these; each query head has keys of its own.
        values["head_dim"] = latents["qk_head_dim"] + latents["qk_pos_emb_head_dim"]
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type in _ENCODERS:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type in (*_ENCODERS, *_GEMMAS):
        values.setdefault("tie_word_embeddings", True)
    if model_type == "llama" and values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type not in ("qwen3", "qwen3_moe", "gpt_oss") and values.get("head_dim") is None:
        values["head_dim"] = _divided(where, values)
    sizes: dict[str, Any] = {name: whole_number(where, values, key) for key, name in _SIZES.items()}
    tied = values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise InvalidInputError(
            f"{where}: tie_word_embeddings is {tied!r}, it must be true or false", key="tie_word_embeddings"
        )
    return ModelShape(
        **sizes,
        gated_linear_unit=_ENCODERS.get(model_type, True),
        causal_attention=model_type not in _ENCODERS or bool(data.get("is_decoder")),
        share_embeddings_and_output_weights=tied,
        **_windows(where, data, sizes["num_layers"]),
        experts=_experts(where, data, sizes["num_layers"]) if _has_experts(data) else None,
        **latents,
        source=f"{where} (Hugging Face config, model_type {model_type})",
    )


def _latents(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of latent attention and of further tokens as `ModelShape` has them; {} of other models."""
    if data.get("model_type") not in _LATENTS:
        return {}
    found = {name: whole_number(where, data, key, _LATENT_SIZES) for key, name in _LATENT_SIZES.items()}
    for key, name in (("q_lora_rank", "q_lora_rank"), ("num_nextn_predict_layers", "mtp_num_layers")):
        if data.get(key) is not None:
            found[name] = whole_number(where, data, key)
    return found


def _has_experts(data: Mapping[str, Any]) -> bool:
    """Return whether any layer has experts."""
    if data.get("model_type") not in _DEEPSEEKS:
        return data.get("model_type") in _MOES
    first, layers = data.get("first_k_dense_replace"), data.get("num_hidden_layers")
    return data.get("n_routed_experts") is not None and not (
        isinstance(first, int) and isinstance(layers, int) and first >= layers
    )


def _windows(where: str, data: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return `window_tokens` and `window_attn_skip_freq` of the shape, as transformers would have the layers.

    A sliding window counts the token itself, as `window_tokens` does.
    """
    model_type, layer_types = data.get("model_type"), data.get("layer_types")
    is_used = data.get("use_sliding_window", model_type not in _QWENS)
    window = data.get("sliding_window") if is_used and model_type not in _ENCODERS else None
    if window is None:
        if layer_types and _SLIDING in layer_types:
            raise InvalidInputError(
                f"{where}: layer_types has {_SLIDING}, and sliding_window is {data.get('sliding_window')!r}, "
                f"use_sliding_window {data.get('use_sliding_window')!r}: give the window, or {_WHOLE} only",
                key="layer_types",
            )
        return {}
    if model_type in ("llama", "gemma"):
        raise UnsupportedFeatureError(
            f"{where}: sliding_window is {window!r}, which model_type {model_type} does not have: set it to null",
            key="sliding_window",
        )
    window = whole_number(where, data, "sliding_window")
    if layer_types:
        windowed = [one == _SLIDING for one in layer_types]
        if len(windowed) != num_layers:
            raise InvalidInputError(
                f"{where}: layer_types has {len(windowed)} entries, num_hidden_layers is {num_layers}: give one for "
                "each layer",
                key="layer_types",
            )
    elif model_type in _QWENS:
        first = whole_number(where, {"max_window_layers": 28, **data}, "max_window_layers")
        windowed = [layer >= first for layer in range(num_layers)]
    elif model_type in _GEMMAS:
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in data else "sliding_window_pattern"
        every = whole_number(where, {key: 2 if model_type == "gemma2" else 6, **data}, key)
        if every < 1:
            raise InvalidInputError(f"{where}: {key} is {every}, it must be at least 1", key=key)
        windowed = [layer % every != 0 for layer in range(1, num_layers + 1)]
    else:
        windowed = [True] * num_layers
    return {"window_tokens": window, "window_attn_skip_freq": _skip_freq(windowed)} if any(windowed) else {}


def _experts(where: str, data: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of a model of one of `_MOES`, as transformers would have the layers."""
    model_type = data["model_type"]

    def number(key: str, default: int | None = None) -> int:
        return whole_number(where, data if data.get(key) is not None else {**data, key: default}, key, needed)

    if model_type in ("mixtral", "gpt_oss"):
        needed: tuple[str, ...] = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
        counts, width, moe = "num_local_experts", number("intermediate_size"), [True] * num_layers
    elif model_type in _DEEPSEEKS:
        needed = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        counts, width = "n_routed_experts", number("moe_intermediate_size")
        first, every = number("first_k_dense_replace", 0), number("moe_layer_freq", 1)
        moe = [layer >= first and layer % every == 0 for layer in range(num_layers)]
    else:
        needed = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        counts, width, every = "num_experts", number("moe_intermediate_size"), number("decoder_sparse_step", 1)
        dense = data.get("mlp_only_layers") or []
        moe = [layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)]
    shared = number("n_shared_experts", 0) * width if model_type in _DEEPSEEKS else 0
    if model_type == "qwen2_moe":
        shared = number("shared_expert_intermediate_size", 0)
    return Experts(
        num_experts=number(counts),
        topk=number("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        shared_gate=model_type == "qwen2_moe" and shared > 0,
        layer_freq=1 if all(moe) else tuple(map(int, moe)),
    )


def _skip_freq(windowed: Sequence[bool]) -> int | tuple[int, ...]:
    """Return the layers with a window as `ModelShape.window_attn_skip_freq` says them, by one number where it can."""
    if all(windowed):
        return 0
    every = windowed.index(False) + 1
    if all(one == (layer % every != 0) for layer, one in enumerate(windowed, 1)):
        return every
    return tuple(map(int, windowed))


def _refuse_what_has_no_price(where: str, data: Mapping[str, Any]) -> None:
    parts = [data, *(part for part in data.values() if isinstance(part, Mapping))]  # text_config, ffn_config
    found: dict[str, str] = {}
    model_type = data.get("model_type")
    priced = {*(_EXPERT_COUNTS if model_type in _MOES else ()), *(_OF_LATENTS if model_type in _LATENTS else ())}
    for part in parts:
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
    """Return what `data`, of which `model_shape` has read the shape, says beyond it.

    What pretrain_gpt.py does not have is in `not_trained`, entries among them that are not known here and switch
    something on: nothing that a config says is left out silently.

    Args:
        where: what to call the file in errors.
        data: the content of a config.json.

    Raises:
        InvalidInputError: a value of the wrong type.
    """
    rope, not_trained = _rope(data)
    base = _number(where, {**data, **rope}, "rope_theta", 10000)
    rotary_percent = _number(where, {**data, **rope}, "partial_rotary_factor", 1.0)
    attention_bias, mlp_bias = bool(data.get("attention_bias")), bool(data.get("mlp_bias"))
    if base != int(base):
        not_trained.append(f"rope_theta {base}: a whole number is needed")
    if attention_bias != mlp_bias:
        on, off = ("attention_bias", "mlp_bias") if attention_bias else ("mlp_bias", "attention_bias")
        not_trained.append(
            f"{on} without {off}: linear layers have biases everywhere, in the QKV projection or nowhere"
        )
    if data.get("model_type") in _ENCODERS:
        not_trained.append(f"model_type {data['model_type']}: an encoder")
    if data.get("model_type") in _GEMMAS:
        not_trained.append(f"model_type {data['model_type']}: norms, activation and embeddings of its own kind")
    if _has_experts(data):
        not_trained += _why_experts_differ(data)
    if data.get("attention_dropout"):
        not_trained.append(f"attention_dropout {data['attention_dropout']}: attention has none")
    if data.get("hidden_act", "silu") not in ("silu", "swish"):
        not_trained.append(f"hidden_act {data['hidden_act']}: a gated MLP has SiLU")
    known = _PRICED | _ARCHITECTURE | _NOT_THE_MODEL
    if data.get("model_type") in _LATENTS:
        known |= _OF_EXPERTS
    not_trained += [f"{key} {value!r}: not known here" for key, value in data.items() if key not in known and value]
    return Architecture(
        normalization="RMSNorm",
        norm_epsilon=_number(where, data, "rms_norm_eps", 1e-6),
        position_embedding_type="rope",
        add_bias_linear=attention_bias and mlp_bias,
        add_qkv_bias=data.get("model_type") in ("qwen2", "qwen2_moe"),
        qk_layernorm=data.get("model_type") in ("qwen3", "qwen3_moe", *_LATENTS),
        rotary_base=int(base),
        rotary_percent=float(rotary_percent),
        use_rope_scaling="factor" in rope,
        rope_scaling_factor=float(_number(where, rope, "factor", 8.0)),
        max_position_embeddings=int(_number(where, data, "max_position_embeddings", 0)),
        init_method_std=_number(where, data, "initializer_range", 0.02),
        not_trained=tuple(not_trained),
    )


def _why_experts_differ(data: Mapping[str, Any]) -> list[str]:
    """Return what of experts and their layers pretrain_gpt.py does not have."""
    model_type = data["model_type"]
    if model_type == "gpt_oss":
        return ["model_type gpt_oss: experts with biases and an activation of their own"]
    if model_type in _LATENTS:
        return [f"model_type {model_type}: experts together with latent attention"]
    if model_type == "deepseek":
        return ["model_type deepseek: its weights of experts do not sum to 1"]
    # Softmax over all experts of which some are chosen and brought to sum 1: the softmax over the chosen ones.
    if model_type != "mixtral" and not data.get("norm_topk_prob", False):
        return ["norm_topk_prob false: weights of the experts of a token sum to 1"]
    return []


def config(where: str, shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    """Return a config.json that `model_shape` and `architecture` read as these; the type of the weights is not in it.

    The model_type is that of the first family that has such layers: a model keeps no other trace of its own.

    Args:
        where: what to call the model in errors.
        architecture: its `not_trained` says nothing here.

    Raises:
        UnsupportedFeatureError: no family has such layers.
    """
    model_type = _family(where, shape, architecture)
    values: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        **{key: getattr(shape, name) for key, name in _SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rotary_base,
        "max_position_embeddings": architecture.max_position_embeddings,
        "initializer_range": architecture.init_method_std,
        "tie_word_embeddings": shape.share_embeddings_and_output_weights,
        "attention_dropout": 0.0,
    }
    if architecture.use_rope_scaling:
        values["rope_scaling"] = {"rope_type": "llama3", "factor": architecture.rope_scaling_factor, **_LLAMA_3}
    if model_type == "llama":
        values |= {"attention_bias": architecture.add_bias_linear, "mlp_bias": architecture.add_bias_linear}
    elif model_type == "mistral":
        values["sliding_window"] = shape.window_tokens or None
    else:
        values |= {"use_sliding_window": shape.num_windowed_layers > 0, "sliding_window": shape.window_tokens or None}
        values["layer_types"] = [_SLIDING if has_one else _WHOLE for has_one in shape.windowed_layers]
    return values


def _family(where: str, shape: ModelShape, architecture: Architecture) -> str:
    """Return the model_type of a model."""
    reasons = [
        *(["experts, which are read and not written"] * (shape.experts is not None)),
        *(["no RMSNorm"] * (architecture.normalization != "RMSNorm")),
        *(["no gated MLP"] * (not shape.gated_linear_unit)),
        *([f"positions by {architecture.position_embedding_type}"] * (architecture.position_embedding_type != "rope")),
        *(["latent attention"] * (shape.kv_lora_rank > 0)),
        *(["modules that predict further tokens"] * (shape.mtp_num_layers > 0)),
        *([f"rotary_percent {architecture.rotary_percent}"] * (architecture.rotary_percent != 1)),
    ]
    only_some = 0 < shape.num_windowed_layers < shape.num_layers
    if architecture.qk_layernorm:
        model_type = "qwen3"
        reasons += ["biases and norms of queries and keys"] * (
            architecture.add_bias_linear or architecture.add_qkv_bias
        )
    elif architecture.add_qkv_bias and not architecture.add_bias_linear:
        model_type = "qwen2"
    elif shape.num_windowed_layers:
        model_type = "mistral"
        reasons += ["biases and windows"] * architecture.add_bias_linear
        reasons += ["windows in some layers, without biases of QKV or norms of queries and keys"] * only_some
    else:
        model_type = "llama"
    if reasons:
        raise UnsupportedFeatureError(f"{where} has {', '.join(reasons)}: none of {', '.join(_CLASSES)} does")
    return model_type


def _rope(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of RoPE, which are in a place of their own since transformers 5, and what of it is not had."""
    found: dict[str, Any] = {}
    not_trained = []
    for key in ("rope_scaling", "rope_parameters"):
        entry = data.get(key)
        if not entry:
            continue
        kind = entry.get("rope_type", entry.get("type")) if isinstance(entry, Mapping) else None
        if isinstance(entry, Mapping) and (kind == "default" or (kind is None and set(entry) == {"rope_theta"})):
            found |= {name: value for name, value in entry.items() if value is not None}
        elif kind == "llama3" and _LLAMA_3.items() <= entry.items() and entry.keys() <= _LLAMA_3_KEYS:
            found |= entry
        else:
            not_trained.append(f"{key} {entry!r}: RoPE is scaled as in Llama 3 only, with {_LLAMA_3}")
    return found, not_trained


def _number(where: str, values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a number >= 0", key=key)
    return value


def whole_number(where: str, values: Mapping[str, Any], key: str, needed: Iterable[str] = _SIZES) -> int:
    """Return an entry of a config.

    Raises:
        InvalidInputError: it is missing, where those of `needed` must be there, or no whole number.
    """
    value = values.get(key)
    if value is None:
        raise InvalidInputError(f"{where} lacks {key}: it needs {', '.join(needed)}", key=key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a whole number", key=key)
    return value


def _divided(where: str, values: Mapping[str, Any]) -> int:
    """Return the width of a head where the file does not state it."""
    hidden_size, heads = whole_number(where, values, "hidden_size"), whole_number(where, values, "num_attention_heads")
    if heads < 1 or hidden_size % heads:
        raise InvalidInputError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}: give head_dim",
            key="head_dim",
        )
    return hidden_size // heads
