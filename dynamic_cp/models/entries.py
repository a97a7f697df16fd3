"""Entries of a config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import MOST_LAYERS

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
_ENTRY_OF = {name: key for key, name in SIZES.items()} | {"window_tokens": "sliding_window"}
LOOKED_THROUGH = (5, 23)
"""Release of transformers whose configurations and models were read for the entries that are known here."""
READ_BY_TRANSFORMERS = {
    **dict.fromkeys(
        (
            "resid_pdrop", "embd_pdrop", "attn_logit_softcapping", "final_logit_softcapping", "moe_latent_size",
            "use_bidirectional_attention", "original_max_position_embeddings", "per_layer_config", "num_mtp_layers",
            "is_encoder_decoder",
        ),
        False,
    ),
    "is_causal": True,
}  # fmt: skip
"""Entries that models of our families read in transformers, though our layers have no such thing -> the value that
changes nothing. A test searches the source of transformers for others."""


def others(data: Mapping[str, Any], known: AbstractSet[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return why entries of a config that are not `known` are not trained, and those that transformers does not read,
    which change nothing: published files have entries of whatever program wrote them. A release later than
    LOOKED_THROUGH may read more, so entries of its files are refused."""
    found = {
        key: value
        for key, value in data.items()
        if key not in known and value is not None and bool(value) != READ_BY_TRANSFORMERS.get(key, False)
    }
    release = re.match(r"(\d+)\.(\d+)", str(data.get("transformers_version")))
    is_later = release is not None and tuple(map(int, release.groups())) > LOOKED_THROUGH
    which = f" (written by transformers {data.get('transformers_version')})" if is_later else ""
    refused = [key for key in found if is_later or key in READ_BY_TRANSFORMERS]
    not_read = tuple(key for key in found if key not in refused)
    return [f"{key} {found[key]!r}: not known here{which}" for key in refused], not_read


@contextmanager
def named(where: str, entry_of: Mapping[str, str] = _ENTRY_OF) -> Iterator[None]:
    """Make errors of a value name the file, and the entries (`entry_of`: field -> entry) in place of its fields."""
    try:
        yield
    except InvalidInputError as error:
        if str(error).startswith(where):
            raise
        text = re.sub("[a-z_]+", lambda word: entry_of.get(word[0], word[0]), str(error))
        raise InvalidInputError(f"{where}: {text}", **error.details) from error


def number(where: str, values: Mapping[str, Any], key: str, default: float) -> float:
    """Return an entry of a config, `default` if it is missing; raise InvalidInputError if it is no number >= 0."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a number >= 0", key=key)
    return value


def whole_number(where: str, values: Mapping[str, Any], key: str, needed: Iterable[str]) -> int:
    """Return an entry of a config; raise InvalidInputError if it is missing (`needed` are the keys that must be there),
    no whole number >= 0, or more layers than can be listed."""
    value = values.get(key)
    if value is None:
        raise InvalidInputError(f"{where} lacks {key}: it needs {', '.join(needed)}", key=key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a whole number", key=key)
    if value < 0:
        raise InvalidInputError(f"{where}: {key} is {value}, it must be at least 0", key=key)
    if key.startswith("num_") and key.endswith("_layers") and value > MOST_LAYERS:
        raise InvalidInputError(f"{where}: {key} is {value}, the largest allowed value is {MOST_LAYERS}", key=key)
    return value


def interval(where: str, values: Mapping[str, Any], key: str, default: int) -> int:
    """Return N of an entry for every N-th layer, `default` if it is missing; InvalidInputError if it is no integer >=
    1."""
    every = default if values.get(key) is None else whole_number(where, values, key, ())
    if every < 1:
        raise InvalidInputError(f"{where}: {key} is {every}, it must be at least 1", key=key)
    return every


def some_layers(where: str, values: Mapping[str, Any], key: str) -> list[Any]:
    """Return an entry that lists layers, [] if it is missing; raise InvalidInputError if it is no list."""
    layers = values.get(key) or []
    if not isinstance(layers, list):
        raise InvalidInputError(f"{where}: {key} is {layers!r}, it must be a list of layers", key=key)
    return layers


def sparse_layers(where: str, values: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers of a Qwen have experts; InvalidInputError if decoder_sparse_step or mlp_only_layers is
    wrong."""
    every, dense = interval(where, values, "decoder_sparse_step", 1), some_layers(where, values, "mlp_only_layers")
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)]


def in_one_number(which: Sequence[bool]) -> int | tuple[int, ...]:
    """Return N if all layers but every N-th are in `which`, else 1 for each that is and 0 for others."""
    every = which.index(False) + 1 if False in which else 0
    is_regular = every > 0 and all(one == (layer % every != 0) for layer, one in enumerate(which, 1))
    return every if is_regular else tuple(map(int, which))


def is_tied(where: str, values: Mapping[str, Any]) -> bool:
    """Return whether the output layer shares the embedding's weights; InvalidInputError if the entry is no bool."""
    tied = values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise InvalidInputError(
            f"{where}: tie_word_embeddings is {tied!r}, it must be true or false", key="tie_word_embeddings"
        )
    return tied
