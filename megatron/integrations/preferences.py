"""Preference pairs as tokens, for a loop of your own that compares two answers, such as DPO.

    path -> records (`records`) -> two chats, or two texts -> a prompt with two responses -> PreferencePair

Records have a chosen and a rejected answer (texts, a message, or lists of messages), after one of the prompts that
`chat_records.PREFERENCES` lists or each with its prompt before it, as in TRL. If all of a record is text, no template
writes it, and its answers end with the end of document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import SharedQuestion
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, sample_of
from megatron.trainer.data.chat import ChatReader, parse_preference
from megatron.trainer.data.chat_reader import build_chat_reader
from megatron.trainer.data.chat_records import ASKED, without_nulls
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.files import find_files
from megatron.trainer.data.lines import (
    CHOSEN,
    PROMPT,
    REJECTED,
    Document,
    LineError,
    Question,
    TextReader,
    object_of_line,
    unread_keys,
)
from megatron.trainer.data.records import lines_of, unit_of
from megatron.trainer.data.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class PreferencePair(NamedTuple):
    """Two answers to one prompt.

    Attributes:
        chosen, rejected: int64, tokens of the prompt and the answer, with the token that ends it.
        prompt_length: how many of either are the prompt's.
        chosen_is_target, rejected_is_target: bool, which tokens the assistant wrote; none of the prompt.
    """

    chosen: NDArray[np.int64]
    rejected: NDArray[np.int64]
    prompt_length: int
    chosen_is_target: NDArray[np.bool_]
    rejected_is_target: NDArray[np.bool_]

    def sample(self) -> tuple[SampleTokens, SharedQuestion]:
        """Return both answers behind their prompt as one sample, and its mask; only targets have a loss."""
        behind = slice(self.prompt_length, None)
        mask = SharedQuestion(self.prompt_length - 1, (len(self.chosen[behind]), len(self.rejected[behind])))
        document = np.append(self.chosen, self.rejected[behind])
        return sample_of(document, np.append(self.chosen_is_target, self.rejected_is_target[behind]), mask), mask


def preference_pairs(
    path: str, tokenizer: TextTokenizer, *, chat_template: str | None = None
) -> Iterator[PreferencePair]:
    """Yield the pairs of `path` in the order of its records.

    Args:
        path: JSONL, JSON arrays or parquet, also in gzip files; a folder or a glob of them.
        tokenizer: `ByteTokenizer()`, or `HuggingFaceTokenizer.load(folder)`.
        chat_template: of chats, a name or a file; None: the tokenizer's own.

    Raises:
        DataError: data that are missing or malformed, or a record that is no preference.
        InvalidInputError: data that are no records, or no template for chats.
        UnsupportedFeatureError: a parquet file, and pyarrow is not installed.
    """
    config = DataConfig(seq_length=1, data_path=(path,))
    files = find_files(path, config, tokenizer)
    if files is None or files.kind != "jsonl":
        raise InvalidInputError(f"{path} has no records: preference pairs are read from JSONL, JSON arrays and parquet")
    reader, named = _PairReader(tokenizer, chat_template), set[str]()
    for name in files.names:
        file = files.root + name
        unit = unit_of(file)
        for number, line in enumerate(lines_of(file), 1):
            if not line.strip():
                continue
            where = f"{file} {unit} {number}"
            try:
                document = reader.read(line)
            except LineError as error:
                raise DataError(f"{where}{error}") from error
            for key in document.unread:
                if key not in named:
                    logger.warning("%s has the key %r, which has no effect; this is said once", where, key)
                    named.add(key)
            yield _pair(document)


class _PairReader:
    def __init__(self, tokenizer: TextTokenizer, chat_template: str | None) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._texts = TextReader(tokenizer=tokenizer, json_key="")

    @cached_property
    def _chats(self) -> ChatReader:
        """The reader of chats, made only if there is one, because texts need no template."""
        config = DataConfig(
            seq_length=1, data_path=("",), overlong="error", sft=True, chat_template=self._chat_template
        )
        reader = build_chat_reader(config, self._tokenizer)
        assert reader is not None
        return reader

    def read(self, line: bytes) -> Document:
        value = without_nulls(object_of_line(line, f'{{"{PROMPT}": ..., "{CHOSEN}": ..., "{REJECTED}": ...}}'))
        texts = _texts(value)
        if texts is not None:
            return self._texts.question(texts)._replace(unread=unread_keys(value, PROMPT, CHOSEN, REJECTED))
        chats = parse_preference(value)
        return self._chats.shared(chats)._replace(unread=chats.unread)


def _texts(value: dict[str, Any]) -> Question | None:
    """Return a preference of texts alone; None for a chat, or for no preference. Without a prompt, the prompt is what
    both answers begin with, up to a space before they differ."""
    prompt, chosen, rejected = (value.get(field) for field in (PROMPT, CHOSEN, REJECTED))
    in_chat = {"conversations", "instruction", "system", *ASKED * (prompt is None)} & set(value)
    if not (isinstance(chosen, str) and isinstance(rejected, str)) or in_chat or not isinstance(prompt, str | None):
        return None
    if chosen == rejected:
        raise LineError(f": {CHOSEN!r} and {REJECTED!r} are the same: repair or remove the line")
    if prompt is not None:
        return Question(prompt, (chosen, rejected))
    pairs = enumerate(zip(chosen, rejected, strict=False))
    stop = next((place for place, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    stop -= chosen[:stop].endswith(" ")
    return Question(chosen[:stop], (chosen[stop:], rejected[stop:])) if stop else None


def _pair(document: Document) -> PreferencePair:
    num_chosen, num_rejected = document.answers
    end = len(document.tokens) - num_rejected
    prompt_length = end - num_chosen
    assert document.is_target is not None
    chosen, rejected = (
        np.concatenate([np.arange(prompt_length), places])
        for places in (np.arange(prompt_length, end), np.arange(end, end + num_rejected))
    )
    return PreferencePair(
        document.tokens[chosen],
        document.tokens[rejected],
        prompt_length,
        document.is_target[chosen],
        document.is_target[rejected],
    )
