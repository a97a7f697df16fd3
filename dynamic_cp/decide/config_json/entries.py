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


class Entries(dict[str, Any]):
    """The entries of a config.json. `where` names the file in errors; `why_not` collects what was read and
    pretrain_gpt.py does not have, each with its value."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.where = where
        self.why_not: list[str] = []

    def number(self, key: str, default: float) -> float:
        """Return an entry, `default` if it is missing; raise InvalidInputError if it is no number >= 0."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise InvalidInputError(f"{self.where}: {key} is {value!r}, it must be a number >= 0")
        return value

    def whole(self, key: str, needed: Iterable[str] = (), default: int | None = None) -> int:
        """Return an entry, or `default` if it is missing and there is one. Raise InvalidInputError if it is missing
        (`needed` are the keys that must be there), no whole number >= 0, or more layers than can be listed."""
        where, value = self.where, default if self.get(key) is None else self[key]
        if value is None:
            raise InvalidInputError(f"{where} lacks {key}: it needs {', '.join(needed)}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInputError(f"{where}: {key} is {value!r}, it must be a whole number")
        if value < 0:
            raise InvalidInputError(f"{where}: {key} is {value}, it must be at least 0")
        if key.startswith("num_") and key.endswith("_layers") and value > MOST_LAYERS:
            raise InvalidInputError(f"{where}: {key} is {value}, the largest allowed value is {MOST_LAYERS}")
        return value

    def interval(self, key: str, default: int) -> int:
        """Return N of an entry for every N-th layer, `default` if it is missing; raise InvalidInputError if N < 1."""
        every = self.whole(key, default=default)
        if every < 1:
            raise InvalidInputError(f"{self.where}: {key} is {every}, it must be at least 1")
        return every

    def some_layers(self, key: str) -> list[Any]:
        """Return an entry that lists layers, [] if it is missing; raise InvalidInputError if it is no list."""
        layers = self.get(key) or []
        if not isinstance(layers, list):
            raise InvalidInputError(f"{self.where}: {key} is {layers!r}, it must be a list of layers")
        return layers

    def check_length(self, key: str, layers: Sequence[Any], num_layers: int) -> None:
        """Raise InvalidInputError if an entry describes another number of layers."""
        if len(layers) != num_layers:
            raise InvalidInputError(
                f"{self.where}: {key} has {len(layers)} entries, num_hidden_layers is {num_layers}: give one for "
                "each layer"
            )

    def is_tied(self) -> bool:
        """Return whether the output layer shares the embedding's weights; InvalidInputError if the entry is no bool."""
        tied = self.get(key := "tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise InvalidInputError(f"{self.where}: {key} is {tied!r}, it must be true or false")
        return tied

    def others(self, known: AbstractSet[str]) -> tuple[str, ...]:
        """Return the entries that are not `known` and that transformers does not read, which change nothing: published
        files have entries of whatever program wrote them. `why_not` gets those that transformers reads. A release later
        than LOOKED_THROUGH may read more, so it gets all entries of its files."""
        found = {
            key: value
            for key, value in self.items()
            if key not in known and value is not None and bool(value) != READ_BY_TRANSFORMERS.get(key, False)
        }
        version = self.get("transformers_version")
        release = re.match(r"(\d+)\.(\d+)", str(version))
        is_later = release is not None and tuple(map(int, release.groups())) > LOOKED_THROUGH
        which = f" (written by transformers {version})" if is_later else ""
        refused = [key for key in found if is_later or key in READ_BY_TRANSFORMERS]
        self.why_not += [f"{key} {found[key]!r}: not known here{which}" for key in refused]
        return tuple(key for key in found if key not in refused)


def in_one_number(which: Sequence[bool]) -> int | tuple[int, ...]:
    """Return N if all layers but every N-th are in `which`, else 1 for each that is and 0 for others."""
    every = which.index(False) + 1 if False in which else 0
    is_regular = every > 0 and all(one == (layer % every != 0) for layer, one in enumerate(which, 1))
    return every if is_regular else tuple(map(int, which))
