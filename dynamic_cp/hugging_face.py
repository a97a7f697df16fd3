"""The shape of a model from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import ModelShape

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders with a gate and an up projection, whatever their hidden_act."""

_NOT_PRICED = {
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "kv_lora_rank": "multi-head latent attention",
}
"""Key of what the cost model has no formula for -> what it is."""

_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
}


def is_config(data: Mapping[str, Any]) -> bool:
    """Return whether `data` looks like a Hugging Face config.json rather than a file of this project."""
    return "model_type" in data or "num_hidden_layers" in data


def model_shape(where: str, data: Mapping[str, Any]) -> ModelShape:
    """Return the shape in `data`.

    Args:
        where: what to call the file in errors.
        data: the content of a config.json.

    Raises:
        UnsupportedFeatureError: a model_type whose layers are not known here, experts, latent attention, or a sliding
            window.
        InvalidInputError: a key that is missing or of the wrong type.

    Limits: biases and query/key norms are not counted.
    """
    model_type = data.get("model_type")
    _refuse_what_has_no_price(where, data)
    if model_type not in MODEL_TYPES:
        raise UnsupportedFeatureError(
            f"{where}: model_type is {model_type!r}, known are {', '.join(MODEL_TYPES)}: "
            "write the numbers into a file like the bundled models",
            key="model_type",
        )
    window = data.get("sliding_window") if data.get("use_sliding_window", True) else None
    if window is not None:
        raise UnsupportedFeatureError(
            f"{where}: sliding_window is {window!r}, only attention over whole sequences is priced: set it to null",
            key="sliding_window",
        )
    values = dict(data)
    if model_type == "llama" and values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if model_type != "qwen3" and values.get("head_dim") is None:
        values["head_dim"] = _divided(where, values)
    sizes: dict[str, Any] = {name: _integer(where, values, key) for key, name in _SIZES.items()}
    tied = values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise InvalidInputError(
            f"{where}: tie_word_embeddings is {tied!r}, it must be true or false", key="tie_word_embeddings"
        )
    return ModelShape(
        **sizes,
        gated_linear_unit=True,
        share_embeddings_and_output_weights=tied,
        source=f"{where} (Hugging Face config, model_type {model_type})",
    )


def _refuse_what_has_no_price(where: str, data: Mapping[str, Any]) -> None:
    parts = [data, *(part for part in data.values() if isinstance(part, Mapping))]  # text_config, ffn_config
    found: dict[str, str] = {}
    for part in parts:
        for key, what in _NOT_PRICED.items():
            value = part.get(key)
            if isinstance(value, int) and value > 1:
                found.setdefault(what, f"{what} ({key} {value})")
    if found:
        raise UnsupportedFeatureError(
            f"{where}: model_type {data.get('model_type')!r} has {' and '.join(found.values())}, which cannot be "
            f"priced yet: give a dense model ({', '.join(MODEL_TYPES)})",
            key=next(iter(found)),
        )


def _integer(where: str, values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if value is None:
        raise InvalidInputError(f"{where} lacks {key}: it needs {', '.join(_SIZES)}", key=key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a whole number", key=key)
    return value


def _divided(where: str, values: Mapping[str, Any]) -> int:
    """Return the width of a head where the file does not state it."""
    hidden_size, heads = _integer(where, values, "hidden_size"), _integer(where, values, "num_attention_heads")
    if heads < 1 or hidden_size % heads:
        raise InvalidInputError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}: give head_dim",
            key="head_dim",
        )
    return hidden_size // heads
