"""The shape and the architecture of a model from a Hugging Face config.json; the latter also by name or file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dynamic_cp.decide.config_json import hybrids
from dynamic_cp.decide.config_json.architecture import Architecture, architecture_of, architecture_of_file
from dynamic_cp.decide.config_json.entries import SIZES, Entries, in_one_number, named
from dynamic_cp.decide.config_json.families import (
    FAMILIES,
    LATENT_SIZES,
    MODULES,
    SAME_AS,
    SLIDING,
    TANH_GELU,
    TEXTS,
    WHOLE,
    Family,
    names,
)
from dynamic_cp.decide.config_json.rotation import experts_of, has_experts, rotation, routing
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.types import ModelShape

MODEL_TYPES = tuple(FAMILIES)
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
_OF_LATENTS = frozenset({*LATENT_SIZES, "q_lora_rank", MODULES})
_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps says."""
_QUICK_GELU = 1.702
"""Factor in the gates of gpt-oss."""
_OF_ALL = names(
    # Flags.
    """rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor attention_bias mlp_bias
    attention_dropout hidden_act initializer_range max_position_embeddings norm_topk_prob quantization_config
    model_type num_experts_per_tok moe_intermediate_size decoder_sparse_step mlp_only_layers
    shared_expert_intermediate_size tie_word_embeddings sliding_window layer_types n_routed_experts num_experts
    num_local_experts n_shared_experts"""
    # Files and software.
    """ architectures auto_map dtype torch_dtype transformers_version transformers.js_config name_or_path _name_or_path
    _commit_hash _attn_implementation attn_implementation _attn_implementation_autoset use_cache torchscript
    pretraining_tp use_bfloat16 tf_legacy_loss return_dict output_hidden_states output_attentions output_scores
    return_dict_in_generate"""
    # Token ids and heads for classes.
    """ bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    id2label label2id problem_type finetuning_task task_specific_params"""
    # Of all models: how a text is computed in parts, and whether tokens attend to those before only.
    """ chunk_size_feed_forward is_decoder"""
    # What routers put out and learn by, which is the run's choice.
    """ output_router_logits router_aux_loss_coef router_jitter_noise"""
) | {*SIZES, MODULES}
"""Entries of all families that are read or refused here, or change nothing that is trained."""
_OF_OTHERS = names(
    """first_k_dense_replace moe_layer_freq use_sliding_window max_window_layers sliding_window_pattern
    _sliding_window_pattern"""
) | {*_NOT_PRICED, *_OF_LATENTS}
"""More of them, of all but hybrids."""


def known_entries(model_type: str) -> frozenset[str]:
    """Return the entries of a config of `model_type` that are read or refused here, or change nothing."""
    family = FAMILIES.get(model_type, Family())
    own = hybrids.known_entries(model_type) if family.kind else _OF_OTHERS | family.known
    return _OF_ALL | own | {row.entry for row in family.rows}


def _opened(where: str, data: Mapping[str, Any]) -> tuple[Entries, Family]:
    """Return the entries of a language model, without towers around it, and its family. They include the family's own
    defaults, and model_type is the one whose layers it has."""
    name = str(data.get("model_type"))
    if name in TEXTS:
        text = data.get("text_config")
        if not isinstance(text, Mapping):
            raise InvalidInputError(f"{where}: text_config is {text!r}, model_type {name} has its language model in it")
        data = {"tie_word_embeddings": data.get("tie_word_embeddings", False), **text}
    same = TEXTS.get(name) or SAME_AS.get(name)
    family = FAMILIES.get(same or name, Family())
    return Entries(where, {**family.defaults, **data, **({"model_type": same} if same else {})}), family


def model_shape(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the shape in `data`, the content of a config.json; `where` names the file in errors.

    Raises UnsupportedFeatureError: a model_type whose layers are not known here, or what has no price. Raises
    InvalidInputError: a key that is missing or of the wrong type, or windows that contradict each other.

    Limits: biases, query/key norms and the layer before a masked LM's head are not counted."""
    config, family = _opened(where, data)
    called = config["model_type"] if family.kind else data.get("model_type")
    with named(where):
        return ModelShape(
            **{
                "gated_linear_unit": True,
                **{name: value for name, value in family.has.items() if name in _OF_SHAPE},
                **{row.flag: row.read(config) for row in family.rows if row.flag in _OF_SHAPE},
                **(hybrids.layers(config, family) if family.kind else _layers(config, family)),
            },
            causal_attention=not family.is_encoder or bool(config.get("is_decoder")),
            share_embeddings_and_output_weights=config.is_tied(),
            source=f"{where} (Hugging Face config, model_type {called})",
        )


_OF_SHAPE = frozenset(field.name for field in fields(ModelShape))


def _layers(config: Entries, family: Family) -> dict[str, Any]:
    """Return the fields of `ModelShape` that describe the layers."""
    model_type = config.get("model_type")
    _refuse_what_has_no_price(config, family)
    if str(model_type) not in MODEL_TYPES:
        raise UnsupportedFeatureError(
            f"{config.where}: model_type is {model_type!r}, known are {', '.join(MODEL_TYPES)}: "
            "write the numbers into a file like the bundled models"
        )
    _check_layer_types(config, family)
    found: dict[str, Any] = {}
    if family.has_latents:
        found = {name: config.whole(key, LATENT_SIZES) for key, name in LATENT_SIZES.items()}
        more = {"q_lora_rank": "q_lora_rank", MODULES: "mtp_num_layers"}
        found |= {name: config.whole(key) for key, name in more.items() if config.get(key) is not None}
        # transformers has other numbers in head_dim of some of these; each query head has its own keys.
        config["head_dim"] = found["qk_head_dim"] + found["qk_pos_emb_head_dim"]
    if family.kv_heads == "all" or (family.kv_heads == "or left out" and config.get("num_key_value_heads") is None):
        config["num_key_value_heads"] = config.get("num_attention_heads")
    if family.divided:
        config["head_dim"] = _head_dim(config)
    found |= {name: config.whole(key, SIZES) for key, name in SIZES.items()}
    found |= _windows(config, family, found["num_layers"])
    if has_experts(config, family):
        found["experts"] = experts_of(config, family, found["num_layers"])
    return found


def _head_dim(config: Entries) -> int:
    """Return the width of a head, also if the file does not state it."""
    if config.get("head_dim") is not None:
        return config.whole("head_dim", SIZES)
    hidden_size, heads = (config.whole(key, SIZES) for key in ("hidden_size", "num_attention_heads"))
    if heads < 1 or hidden_size % heads:
        raise InvalidInputError(
            f"{config.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}: give head_dim"
        )
    return hidden_size // heads


def _check_layer_types(config: Entries, family: Family) -> None:
    """Refuse layers whose attention has no price."""
    layer_types, every = config.some_layers("layer_types"), config.get("global_attn_every_n_layers", 3)
    if config["model_type"] == "modernbert" and not layer_types and every != 1:
        raise UnsupportedFeatureError(
            f"{config.where}: global_attn_every_n_layers is {every!r}, only attention over whole sequences is priced: "
            "set it to 1"
        )
    priced = {WHOLE} if family.is_encoder else {WHOLE, SLIDING}
    if others := {str(one) for one in layer_types} - priced:
        raise UnsupportedFeatureError(
            f"{config.where}: layer_types has {', '.join(sorted(others))}, only {' and '.join(sorted(priced))} are "
            f"priced for model_type {config['model_type']}"
        )


def _windows(config: Entries, family: Family, num_layers: int) -> dict[str, Any]:
    """Return `window_tokens` and `window_attn_skip_freq` of the shape, with the layers of transformers. A sliding
    window counts the token itself, as `window_tokens` does."""
    where, layer_types = config.where, config.get("layer_types")
    is_used = config.get("use_sliding_window", not family.asked) and family.windows != "none"
    window = config.get("sliding_window") if is_used else None
    if window is None:
        if layer_types and SLIDING in layer_types:
            raise InvalidInputError(
                f"{where}: layer_types has {SLIDING}, and sliding_window is {config.get('sliding_window')!r}, "
                f"use_sliding_window {config.get('use_sliding_window')!r}: give the window, or {WHOLE} only"
            )
        return {}
    if family.windows == "refused":
        raise UnsupportedFeatureError(
            f"{where}: sliding_window is {window!r}, which model_type {config['model_type']} does not have: set it to "
            "null"
        )
    window = config.whole("sliding_window")
    if layer_types:
        config.check_length("layer_types", layer_types, num_layers)
        windowed = [one == SLIDING for one in layer_types]
    elif family.windows == "last":
        first = Entries(where, {"max_window_layers": 28, **config}).whole("max_window_layers")
        windowed = [layer >= first for layer in range(num_layers)]
    elif family.windows == "most":
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in config else "sliding_window_pattern"
        every = config.interval(key, family.defaults["sliding_window_pattern"])
        windowed = [layer % every != 0 for layer in range(1, num_layers + 1)]
    else:
        windowed = [True] * num_layers
    if not any(windowed):
        return {}
    return {"window_tokens": window, "window_attn_skip_freq": 0 if all(windowed) else in_one_number(windowed)}


def _refuse_what_has_no_price(config: Entries, family: Family) -> None:
    """Refuse what the cost model has no formula for; other ways for tokens to meet are named first, and alone."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]  # text_config, ffn_config
    found: dict[str, str] = {}
    for part in parts:
        for key, what in _NOT_ATTENTION.items():
            if value := part.get(key):
                number = f" {value}" if isinstance(value, int) else ""
                found.setdefault(what, f"{what} ({key}{number})")
    priced = {*(_EXPERT_COUNTS if family.experts else ()), *(_OF_LATENTS if family.has_latents else ())}
    for part in () if found else parts:
        for key, (what, least) in _NOT_PRICED.items():
            value = None if key in priced and part is config else part.get(key)
            if isinstance(value, int) and value >= least:
                found.setdefault(what, f"{what} ({key} {value})")
    if found:
        raise UnsupportedFeatureError(
            f"{config.where}: model_type {config.get('model_type')!r} has {' and '.join(found.values())}, which cannot "
            f"be priced yet: give one of {', '.join(MODEL_TYPES)}"
        )


def architecture(where: str, data: Mapping[str, Any]) -> Architecture:
    """Return what `data`, whose shape `model_shape` has read, says beyond it; InvalidInputError for a wrong type.
    Nothing is left out silently: `not_trained` has what pretrain_gpt.py lacks, `not_read` what transformers does not
    read either, `not_imported` quantized weights, which do not matter to a run that starts without them."""
    config, family = _opened(where, data)
    model_type = str(config.get("model_type"))
    flags = {name: value for name, value in family.has.items() if name not in _OF_SHAPE}
    if "position_embedding_type" not in flags:
        flags |= rotation(config, family)
    if hybrids.route_to_experts(config, family) if family.kind else has_experts(config, family):
        flags |= routing(config, family)
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if family.biases != "with mlp_bias":
        attention = family.biases == "of all" and bool(config.get("attention_bias", True))
        mlp = mlp if family.biases == "a row" else attention
    differs = hybrids.differs(config, family) if family.kind else _differs(config, family, flags, attention, mlp)
    config.why_not += differs
    not_read = () if family.is_encoder else config.others(known_entries(model_type))
    flags |= {row.flag: row.read(config) for row in family.rows if row.flag not in _OF_SHAPE}
    return architecture_of(
        {
            "normalization": "RMSNorm",
            "norm_epsilon": config.number(*family.epsilon),
            "disable_bias_linear": not (attention and mlp),
            "add_qkv_bias": False,
            "qk_layernorm": False,
            **flags,
            **(_OWN[model_type](config) if model_type in _OWN else {}),
            "max_position_embeddings": int(config.number("max_position_embeddings", 0)),
            "init_method_std": config.number("initializer_range", 0.02),
        },
        not_trained=tuple(config.why_not),
        not_imported=_not_imported(config, family),
        not_read=not_read,
    )


def _not_imported(config: Entries, family: Family) -> tuple[str, ...]:
    if family.kind:
        why = f"weights of model_type {config['model_type']}: names of layers with linear attention are not known"
        return (why,) if family.differs else ()
    quantized = config.get("quantization_config")
    return (f"quantization_config {quantized!r}: weights are quantized, save the model in bfloat16",) * bool(quantized)


def load_architecture(name_or_path: str | Path) -> Architecture | None:
    """Return what the model of `load_model` is beyond what is priced; None where its file does not say. Raises
    InvalidInputError: as `load_model`, or an `architecture` with an entry that is missing or of the wrong type."""
    where, data = catalog.read("models", name_or_path)
    if catalog.library_of(data) == "hugging_face":
        return architecture(where, data)
    if catalog.ARCHITECTURE not in data:
        return None
    return architecture_of_file(where, catalog.typed(where, data, catalog.ARCHITECTURE, dict))


def _differs(
    config: Entries, family: Family, flags: Mapping[str, Any], attention_bias: bool, mlp_bias: bool
) -> Iterator[str]:
    """Yield what a config says that no run of ours does."""
    model_type, window = config.get("model_type"), config.get("sliding_window")
    if model_type == "gpt_oss":
        if not attention_bias:
            yield "attention_bias false: linear layers of gpt_oss have biases, those of experts and routers, too"
        if config.get("swiglu_alpha", _QUICK_GELU) != _QUICK_GELU:
            yield f"swiglu_alpha {config['swiglu_alpha']}: gates have {_QUICK_GELU}"
        if window and not config.get("layer_types"):
            yield "layer_types: it is missing, and sliding_window is not for all layers"
    if attention_bias != mlp_bias:
        on, off = ("attention_bias", "mlp_bias") if attention_bias else ("mlp_bias", "attention_bias")
        yield f"{on} without {off}: linear layers have biases everywhere, in the QKV projection or nowhere"
    if why := "an encoder" if family.is_encoder else family.differs:
        yield f"model_type {model_type}: {why}"
    if family.has_latents:
        yield from _why_latents_differ(config)
        if not flags.get("yarn_correction_range_round_to_int", True):
            yield "truncate false of YaRN: latent attention rounds where stretching begins and ends"
    if model_type == "qwen3_moe" and config.get("use_sliding_window") and window:
        yield "use_sliding_window true of qwen3_moe: releases of transformers disagree which layers have one"
    if config.get("attention_dropout"):
        yield f"attention_dropout {config['attention_dropout']}: attention has none"
    if "geglu" in flags:
        key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
        if config.get(key, TANH_GELU) != TANH_GELU:
            yield f"{key} {config[key]}: a gated MLP of Gemma has {TANH_GELU}"
    elif config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act {config['hidden_act']}: a gated MLP has SiLU"


def _why_latents_differ(config: Entries) -> Iterator[str]:
    """Yield what latent attention has that pretrain_gpt.py does not."""
    epsilon = config.number("rms_norm_eps", _LATENT_EPSILON)
    if epsilon != _LATENT_EPSILON:
        yield f"rms_norm_eps {epsilon}: norms of latents have {_LATENT_EPSILON}, all norms have one here"
    if config.get("attention_bias"):
        yield "attention_bias true: projections of latents have no biases"
    if not config.get("rope_interleave", True):
        yield "rope_interleave false: neighbouring channels are pairs"
    together = sum(config.whole(key, LATENT_SIZES) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if config.get("qk_head_dim", together) != together:
        yield f"qk_head_dim {config['qk_head_dim']}: qk_nope_head_dim and qk_rope_head_dim are {together}"


def _of_gemma(config: Entries) -> dict[str, Any]:
    """Return the factors of a Gemma, which follow from widths."""
    hidden_size, width = config.whole("hidden_size", SIZES), _head_dim(config)
    scale = config.number("query_pre_attn_scalar", 256)
    if scale == 0:
        raise InvalidInputError(f"{config.where}: query_pre_attn_scalar is 0: scores are divided by its root")
    is_own = config["model_type"] != "gemma" and scale != width
    return {"embedding_multiplier": float(hidden_size) ** 0.5, "softmax_scale": float(scale) ** -0.5 if is_own else 0.0}


def _scale(config: Entries) -> dict[str, Any]:
    """Return the factor of scores of a Granite, 0 if it follows from the width of a head."""
    width, scale = _head_dim(config), float(config.number("attention_multiplier", 1.0))
    return {"softmax_scale": 0.0 if scale == width**-0.5 else scale}


def _unrotated(config: Entries) -> dict[str, Any]:
    """Return 1 for each layer of a SmolLM3 that does not rotate and 0 for others, () if all do."""
    num_layers = config.whole("num_hidden_layers", SIZES)
    rotated = config.get("no_rope_layers")  # which, despite its name, has 1 for those that do
    if rotated is None:
        every = config.interval("no_rope_layer_interval", 4)
        rotated = [int(layer % every != 0) for layer in range(1, num_layers + 1)]
    if not isinstance(rotated, list) or len(rotated) != num_layers or set(rotated) - {0, 1}:
        raise InvalidInputError(
            f"{config.where}: no_rope_layers is {rotated!r}: give 1 (rotates) or 0 for each of the {num_layers} layers"
        )
    return {"no_rope_freq": tuple(1 - one for one in rotated) if 0 in rotated else ()}


_OWN = {**dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _of_gemma), "granite": _scale, "smollm3": _unrotated}
"""model_type -> flags that follow from several of its entries."""
