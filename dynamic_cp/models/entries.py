"""Numbers of a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynamic_cp.errors import InvalidInputError

SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
}
"""Entry -> field of `ModelShape`."""


def number(where: str, values: Mapping[str, Any], key: str, default: float) -> float:
    """Return an entry of a config, `default` where it is missing.

    Raises:
        InvalidInputError: it is no number >= 0.
    """
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a number >= 0", key=key)
    return value


def whole_number(where: str, values: Mapping[str, Any], key: str, needed: Iterable[str]) -> int:
    """Return an entry of a config.

    Args:
        needed: the keys that must be there, for the message.

    Raises:
        InvalidInputError: it is missing or no whole number.
    """
    value = values.get(key)
    if value is None:
        raise InvalidInputError(f"{where} lacks {key}: it needs {', '.join(needed)}", key=key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a whole number", key=key)
    return value
