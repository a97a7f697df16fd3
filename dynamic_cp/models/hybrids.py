"""The shape and the architecture of a hybrid from a Hugging Face config.json: some layers have linear attention.

Qwen3-Next and the text of Qwen3.5 have gated delta nets; Nemotron-H, Granite 4 and Bamba have Mamba-2, as patterns of
half layers. Defaults are those of `configuration_<model_type>.py` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture, architecture_of
from dynamic_cp.models.entries import (
    SIZES,
    in_one_number,
    is_tied,
    named,
    number,
    others,
    some_layers,
    sparse_layers,
    whole_number,
)
from dynamic_cp.models.rotation import rotation
from dynamic_cp.types import Experts, LinearAttention, ModelShape

_TEXTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""model_type of a language model with a vision tower around it -> of the language model, in its text_config."""
_QWENS = ("qwen3_next", *_TEXTS.values())
PARTLY_ROTATED = _QWENS
"""Families for which transformers reads partial_rotary_factor."""
_MAMBAS = ("nemotron_h", "granitemoehybrid", "bamba")
MODEL_TYPES = (*_QWENS, *_TEXTS, *_MAMBAS)

_GATED_DELTA = {
    "linear_num_value_heads": ("num_heads", 32),
    "linear_num_key_heads": ("num_groups", 16),
    "linear_key_head_dim": ("key_size", 128),
    "linear_value_head_dim": ("value_size", 128),
    "linear_conv_kernel_dim": ("kernel_size", 4),
}
"""Entry -> field of `LinearAttention`, and its default."""
_OF_NEMOTRON = {
    "mamba_num_heads": ("num_heads", 128),
    "n_groups": ("num_groups", 8),
    "ssm_state_size": ("key_size", 128),
    "mamba_head_dim": ("value_size", 64),
    "conv_kernel": ("kernel_size", 4),
}
_OF_OTHERS = {
    "mamba_n_heads": ("num_heads", 128),
    "mamba_n_groups": ("num_groups", 1),
    "mamba_d_state": ("key_size", 256),
    "mamba_d_head": ("value_size", 0),
    "mamba_d_conv": ("kernel_size", 4),
}
_SYMBOLS = {
    **dict.fromkeys(("linear_attention", "mamba"), "M"),
    **dict.fromkeys(("full_attention", "attention"), "*"),
    "mlp": "-",
    "moe": "E",
}
"""Entry of a list of layers -> symbol of a pattern."""
_PATTERN = "hybrid_override_pattern"
"""Entry of Nemotron-H that has these symbols itself."""
MODULES, MODULES_AGAIN = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""Modules that predict further tokens, which transformers leaves out: the entry that is read, and the one that
published configs of Qwen3.5 have for the modules in their files."""
_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Symbol -> entry, as transformers writes it."""
_KNOWN = frozenset(
    {
        *SIZES, *_GATED_DELTA, *_OF_NEMOTRON, *_OF_OTHERS, "model_type", "tie_word_embeddings", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step",
        "mlp_only_layers", "layer_types", "layers_block_type", "full_attention_interval", _PATTERN,
        "n_routed_experts", "n_shared_experts", "moe_shared_expert_intermediate_size", "routed_scaling_factor",
        "n_group", "topk_group", "num_local_experts", "shared_intermediate_size", "attn_layer_indices",
        "position_embedding_type", "layer_norm_epsilon", "mlp_hidden_act", "mamba_hidden_act", "expand", "mamba_expand",
        "use_conv_bias", "mamba_conv_bias", "use_bias", "mamba_proj_bias", MODULES,
        *("residual_in_fp32", "hidden_dropout", "sliding_window", "time_step_limit", "mamba_dt_limit"),
        *("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
        # How kernels compute, how weights begin, what is kept while text is generated, and the towers of other media.
        "chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep",
        "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "moe_shared_expert_overlap",
        "mamba_ssm_dtype", "output_gate_type",
        MODULES_AGAIN, "mtp_hybrid_override_pattern", "mtp_layers_block_type", "mamba_dt_min", "mamba_dt_max",
        "mamba_dt_init_floor", "attn_output_gate", "mlp_bias", "z_loss_coefficient",
    }
)  # fmt: skip
"""Entries that are read, refused, or change nothing that is trained."""


def is_config(data: Mapping[str, Any]) -> bool:
    """Return whether `data` is a config.json of one of `MODEL_TYPES`."""
    return data.get("model_type") in MODEL_TYPES


def model_shape(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the shape in `data`; arguments and errors as of `hugging_face.model_shape`."""
    data = _language_model(where, data)
    reader = _READERS[data["model_type"]](where, data)
    with named(where):
        return ModelShape(
            hidden_size=reader.size("hidden_size"),
            num_attention_heads=reader.size("num_attention_heads"),
            num_query_groups=reader.size("num_key_value_heads", reader.size("num_attention_heads")),
            vocab_size=reader.size("vocab_size"),
            share_embeddings_and_output_weights=is_tied(where, data),
            source=f"{where} (Hugging Face config, model_type {data['model_type']})",
            **reader.layers(),
        )


def architecture(where: str, data: Mapping[str, Any], known: frozenset[str]) -> Architecture:
    """Return what `data` says beyond its shape, as `hugging_face.architecture`; `known`: entries of all families that
    change nothing or are read here."""
    data = _language_model(where, data)
    model_type = data["model_type"]
    is_nemotron, is_qwen = model_type == "nemotron_h", model_type in _QWENS
    fields, why_not = _positions(where, data)
    routes, why_routed_otherwise = _routing(where, data)
    why_not += why_routed_otherwise + _why_trained_otherwise(data)
    refused, not_read = others(data, known_entries(model_type, known))
    epsilon = "layer_norm_epsilon" if is_nemotron else "rms_norm_eps"
    return architecture_of(
        {
            "normalization": "RMSNorm",
            "norm_epsilon": number(where, data, epsilon, _EPSILON[model_type]),
            "disable_bias_linear": True,
            "add_qkv_bias": False,
            "qk_layernorm": is_qwen,
            "apply_layernorm_1p": is_qwen,
            "squared_relu": is_nemotron,
            **fields,
            **routes,
            "max_position_embeddings": int(number(where, data, "max_position_embeddings", 0)),
            "init_method_std": number(where, data, "initializer_range", 0.02),
        },
        not_trained=(*why_not, *refused),
        not_read=not_read,
        not_imported=()
        if is_qwen or is_nemotron
        else (f"weights of model_type {model_type}: names of layers with linear attention are not known",),
    )


def known_entries(model_type: str, known: frozenset[str]) -> frozenset[str]:
    """Return `known`, entries of all families, and those of the hybrid `model_type` that are known here."""
    return known | _KNOWN | (_AGAIN_IN_NEMOTRON.keys() if model_type == "nemotron_h" else frozenset())


_EPSILON = {**dict.fromkeys(_QWENS, 1e-6), "nemotron_h": 1e-5, "granitemoehybrid": 1e-6, "bamba": 1e-5}
"""Default epsilon of norms."""


def _language_model(where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a language model, without the towers around it."""
    model_type = str(data["model_type"])
    if model_type not in _TEXTS:
        return dict(data)
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise InvalidInputError(
            f"{where}: text_config is {text!r}, model_type {model_type} has its language model in it", key="text_config"
        )
    return {"tie_word_embeddings": data.get("tie_word_embeddings", False), **text, "model_type": _TEXTS[model_type]}


class _Reader:
    """Layers of one family of configs; `entries`: what a list of its layers may have."""

    entries: Sequence[str] = ("linear_attention", "mamba", "full_attention", "attention")

    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        self.where, self.data = where, data

    def size(self, key: str, default: int | None = None) -> int:
        """Return an entry, or `default` if it is missing and there is one."""
        data = self.data if self.data.get(key) is not None or default is None else {key: default}
        return whole_number(self.where, data, key, SIZES)

    def layers(self) -> dict[str, Any]:
        """Return the fields of `ModelShape` that describe the layers."""
        raise NotImplementedError

    def linear_attention(self, kind: str, entries: Mapping[str, tuple[str, int]]) -> LinearAttention:
        """Return the linear attention of its layers from `entries`, with their defaults."""
        values = {field: self.size(key, default) for key, (field, default) in entries.items()}
        return LinearAttention(kind=kind, **values)  # type: ignore[arg-type]

    def listed(self, *keys: str) -> str | None:
        """Return the layers as symbols, from the entries that say them; None if none of `keys` does. Raise
        UnsupportedFeatureError for a layer that this family lacks, InvalidInputError for contradictions."""
        given = {key: self._symbols(key) for key in keys if self.data.get(key) is not None}
        num_layers = self.size("num_hidden_layers", 0)
        for key, symbols in given.items():
            if num_layers and len(symbols) != num_layers:
                raise InvalidInputError(
                    f"{self.where}: {key} has {len(symbols)} entries, num_hidden_layers is {num_layers}: give one for "
                    "each layer",
                    key=key,
                )
        if len(set(given.values())) > 1:
            raise InvalidInputError(
                f"{self.where}: {' and '.join(given)} say other layers: leave one of them out", key=next(iter(given))
            )
        return next(iter(given.values()), None)

    def _symbols(self, key: str) -> str:
        layers = self.data[key]
        if key == _PATTERN and isinstance(layers, str):
            return layers  # `ModelShape` looks at its symbols
        if not isinstance(layers, list) or (unknown := [one for one in layers if one not in self.entries]):
            wrong = f"has {unknown[0]!r}" if isinstance(layers, list) else f"is {layers!r}"
            raise UnsupportedFeatureError(f"{self.where}: {key} {wrong}, layers are {', '.join(self.entries)}", key=key)
        return "".join(_SYMBOLS[one] for one in layers)

    def head_dim(self, default: int) -> int:
        """Return the width of a head; default 0: hidden_size over the heads."""
        return self.size("head_dim", default or self.size("hidden_size") // max(1, self.size("num_attention_heads")))


class _Qwen(_Reader):
    """Qwen3-Next, and the text of Qwen3.5: gated delta nets in all but every fourth layer."""

    entries = ("linear_attention", "full_attention")

    def layers(self) -> dict[str, Any]:
        num_layers = self.size("num_hidden_layers")
        experts = self._experts(num_layers) if self.data["model_type"] != "qwen3_5_text" else None
        inner = None if experts is None else experts.ffn_hidden_size
        return {
            "num_layers": num_layers,
            "kv_channels": self.head_dim(256),
            "ffn_hidden_size": self.size("intermediate_size", inner),
            "gated_linear_unit": True,
            "attention_output_gate": True,
            "linear_attention": self.linear_attention("gated_delta_net", _GATED_DELTA),
            "linear_attention_freq": self._freq(),
            "mtp_num_layers": self.size(MODULES, 0),
            "experts": experts,
        }

    def _freq(self) -> int | tuple[int, ...]:
        layers = self.listed("layer_types")
        if layers is None:
            return self.size("full_attention_interval", 4)
        return in_one_number([symbol == "M" for symbol in layers])

    def _experts(self, num_layers: int) -> Experts | None:
        if not self.size("num_experts"):
            return None
        have_some = sparse_layers(self.where, self.data, num_layers)
        if not any(have_some):
            return None
        shared = self.size("shared_expert_intermediate_size", 0)
        return Experts(
            num_experts=self.size("num_experts"),
            topk=self.size("num_experts_per_tok"),
            ffn_hidden_size=self.size("moe_intermediate_size"),
            shared_ffn_hidden_size=shared,
            shared_gate=shared > 0,
            layer_freq=1 if all(have_some) else tuple(map(int, have_some)),
        )


class _Nemotron(_Reader):
    """Nemotron-H and 3: a symbol for each half of a layer."""

    entries = tuple(_SYMBOLS)

    def layers(self) -> dict[str, Any]:
        pattern = self.pattern()
        if self.data.get("moe_latent_size"):
            raise UnsupportedFeatureError(
                f"{self.where}: moe_latent_size is {self.data['moe_latent_size']}: experts of latents are not priced",
                key="moe_latent_size",
            )
        experts = None
        if "E" in pattern:
            experts = Experts(
                num_experts=self.size("n_routed_experts"),
                topk=self.size("num_experts_per_tok"),
                ffn_hidden_size=self.size("moe_intermediate_size"),
                shared_ffn_hidden_size=self.size("moe_shared_expert_intermediate_size", 0),
            )
        return {
            "num_layers": len(pattern),
            "kv_channels": self.head_dim(128),
            "ffn_hidden_size": self.size("intermediate_size"),
            "linear_attention": self.linear_attention("mamba2", _OF_NEMOTRON),
            "layer_pattern": pattern,
            "experts": experts,
        }

    def pattern(self) -> str:
        layers = self.listed("layers_block_type", "layer_types", _PATTERN)
        if layers is None:
            raise InvalidInputError(
                f"{self.where} lacks layers_block_type and hybrid_override_pattern: one of them says what layers are",
                key="layers_block_type",
            )
        return layers


class _MambaWithMlp(_Reader):
    """Granite 4 and Bamba: a mixer and an MLP, or experts, in each layer; a pattern has two halves for each."""

    def layers(self) -> dict[str, Any]:
        is_granite, num_layers = self.data["model_type"] == "granitemoehybrid", self.size("num_hidden_layers")
        layers = self.listed("layer_types", "layers_block_type")
        if layers is None:
            whole = [] if is_granite else some_layers(self.where, self.data, "attn_layer_indices")
            layers = "".join("*" if layer in whole else "M" for layer in range(num_layers))
        num_experts = self.size("num_local_experts", 0) if is_granite else 0
        width = self.size("shared_intermediate_size", 1024) if is_granite else self.size("intermediate_size")
        experts = None
        if num_experts:
            experts = Experts(
                num_experts=num_experts,
                topk=self.size("num_experts_per_tok"),
                ffn_hidden_size=self.size("intermediate_size"),
                shared_ffn_hidden_size=width,
            )
        return {
            "num_layers": 2 * num_layers,
            "kv_channels": self.head_dim(0),
            "ffn_hidden_size": width,
            "gated_linear_unit": True,
            "linear_attention": self._mamba(),
            "layer_pattern": "".join(symbol + ("E" if experts else "-") for symbol in layers),
            "experts": experts,
        }

    def _mamba(self) -> LinearAttention:
        heads = self.size("mamba_n_heads", 128)
        inner = self.size("mamba_expand", 2) * self.size("hidden_size") // max(1, heads)
        data = {**self.data, "mamba_d_head": inner} if self.data.get("mamba_d_head", "auto") == "auto" else self.data
        return _Reader(self.where, data).linear_attention("mamba2", _OF_OTHERS)


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], _Reader]] = {
    **dict.fromkeys(_QWENS, _Qwen),
    "nemotron_h": _Nemotron,
    "granitemoehybrid": _MambaWithMlp,
    "bamba": _MambaWithMlp,
}


def _positions(where: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags that say how a model rotates, and what of it is not trained."""
    model_type = data["model_type"]
    if model_type == "nemotron_h" or (
        model_type == "granitemoehybrid" and data.get("position_embedding_type") != "rope"
    ):
        return {"position_embedding_type": "none"}, []
    share = {**dict.fromkeys(_QWENS, 0.25), "bamba": 0.5}.get(model_type, 1.0)
    return rotation(where, {"partial_rotary_factor": share, **data})


def _routing(where: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags that say how tokens are routed, and what of it is not trained."""
    if data["model_type"] == "qwen3_next":
        return {"moe_router_pre_softmax": not data.get("norm_topk_prob", True)}, []
    if data["model_type"] != "nemotron_h" or "E" not in _Nemotron(where, data).pattern():
        return {}, []
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(number(where, data, "routed_scaling_factor", 1.0)),
    }
    topk, groups, best = (number(where, data, key, 1) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    why_not = []
    if not (data.get("norm_topk_prob", True) and topk > 1):
        why_not.append(
            f"norm_topk_prob {data.get('norm_topk_prob', True)} with num_experts_per_tok {topk:g}: scores of several "
            "experts have sum 1"
        )
    if 1 <= best < groups:
        fields |= {"moe_router_num_groups": int(groups), "moe_router_group_topk": int(best)}
        if topk // best != 2:
            why_not.append(f"topk_group {best:g} with num_experts_per_tok {topk:g}: groups go by their best 2 experts")
    return fields, why_not


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
_FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")


def _why_trained_otherwise(data: Mapping[str, Any]) -> list[str]:
    is_nemotron = data["model_type"] == "nemotron_h"
    reasons = [
        f"{key} {data[key]!r}: it is {same[0]}"
        for key, same in (_SAME_OF_NEMOTRON if is_nemotron else _SAME).items()
        if data.get(key, same[0]) not in same
    ]
    if is_nemotron:
        reasons += [
            f"{key} {data[key]!r}: {read} is {value}"
            for key, (read, default) in _AGAIN_IN_NEMOTRON.items()
            if data.get(key) not in (None, value := default if data.get(read) is None else data[read])
        ]
    off = _OFF if data["model_type"] in _QWENS else (*_OFF, MODULES)
    reasons += [f"{key} {data[key]!r}: layers of hybrids have none" for key in off if data.get(key)]
    limits = data.get("time_step_limit") or data.get("mamba_dt_limit")
    if isinstance(limits, Sequence) and any(isinstance(one, int | float) and 0 < one < float("inf") for one in limits):
        reasons.append(f"time_step_limit {list(limits)}: steps of Mamba-2 have no limits")
    if data["model_type"] in ("granitemoehybrid", "bamba"):
        reasons.append(f"model_type {data['model_type']}: its layers were never compared with those of transformers")
        reasons += [f"{key} {data[key]}: no factors" for key in _FACTORS if data.get(key, 1.0) != 1.0]
    return reasons


def written(shape: ModelShape, architecture: Architecture) -> dict[str, Any]:
    """Return the entries of a config.json that is read as this hybrid: of Nemotron-H if layers are halves, else of a
    Qwen. What that family does not have is read otherwise."""
    linear, experts = shape.linear_attention, shape.experts
    assert linear is not None
    if shape.layer_pattern:
        values = {key: getattr(linear, field) for key, (field, _) in _OF_NEMOTRON.items()}
        values |= {
            "model_type": "nemotron_h",
            "layers_block_type": [_NAMES.get(symbol, symbol) for symbol in shape.layer_pattern],
            "layer_norm_epsilon": architecture["norm_epsilon"],
            "mlp_hidden_act": "relu2",
            "time_step_min": _NO_STEP,
        }
        return values if experts is None else values | _experts_of_nemotron(experts, architecture)
    values = {key: getattr(linear, field) for key, (field, _) in _GATED_DELTA.items()}
    values |= {
        "model_type": "qwen3_5_text" if experts is None else "qwen3_next",
        "layer_types": ["linear_attention" if one else "full_attention" for one in shape.linear_layers],
        "rms_norm_eps": architecture["norm_epsilon"],
        "partial_rotary_factor": architecture["rotary_percent"],
        "hidden_act": "silu",
        **modules(shape.mtp_num_layers),
    }
    if experts is not None:
        have_some = experts.moe_layers(shape.num_layers)
        values |= {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.topk,
            "moe_intermediate_size": experts.ffn_hidden_size,
            "shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, has_some in enumerate(have_some) if not has_some],
            "norm_topk_prob": not architecture["moe_router_pre_softmax"],
        }
    return values


def modules(num_layers: int) -> dict[str, int]:
    """Return the entries for so many modules that predict further tokens; {} without them, as published."""
    return {MODULES: num_layers, MODULES_AGAIN: num_layers} if num_layers else {}


_NO_STEP = 1e-9
"""time_step_min: transformers bounds the steps of Mamba-2 by it, though it is about initial weights; we do not."""


def _experts_of_nemotron(experts: Experts, architecture: Architecture) -> dict[str, Any]:
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.topk,
        "moe_intermediate_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": architecture["moe_router_topk_scaling_factor"],
        "n_group": architecture["moe_router_num_groups"] or 1,
        "topk_group": architecture["moe_router_group_topk"] or 1,
    }
