"""Tasks of preprocess_data.py: lines of a file of records, or some text files, as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.lines import LineError, encode, object_of_line
from megatron.trainer.data.records import split_lines
from megatron.trainer.data.tokenizer import TextTokenizer
from megatron.trainer.data.tokenizing import Lines, Texts, texts_of


class Tokenized(NamedTuple):
    """What a task found, for each key: the tokens of its documents one after the other, and how many each has.

    Attributes:
        error: the first bad line, counted from 0, and what is wrong with it.
    """

    tokens: list[NDArray[np.int64]]
    lengths: list[NDArray[np.int64]]
    num_lines: int
    num_empty: int
    num_binary: int
    error: tuple[int, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How to read documents.

    Attributes:
        keys: text fields of a JSONL line; ("text",) for text files.
        append_eod: an end of document after every document that is not empty.
        dtype: of the tokens on their way to the writer.
    """

    tokenizer: TextTokenizer
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str

    def tokens(self, text: bytes) -> NDArray[Any]:
        """Return the tokens of a document."""
        ids = self.tokenizer.encode(text)
        if self.append_eod and len(ids):
            ids = np.append(ids, self.tokenizer.eod)
        return ids.astype(self.dtype)


def tokenize_lines(piece: Lines, task: Task) -> Tokenized:
    """Return the documents of lines."""
    found: list[list[NDArray[Any]]] = [[] for _ in task.keys]
    num_lines, error = 0, None
    for line in split_lines(piece.content):
        try:
            documents = _documents(line, task) if line.strip() else []
        except LineError as caught:
            error = (num_lines, str(caught))
            break
        num_lines += 1
        for column, document in zip(found, documents, strict=bool(documents)):
            column.append(document)
    return _joined(found, task, num_lines, 0, error)


def _documents(line: bytes, task: Task) -> list[NDArray[Any]]:
    """Return the tokens of each field of a line; LineError where it has none."""
    value = object_of_line(line, f'{{"{task.keys[0]}": "..."}}')
    documents = []
    for key in task.keys:
        text = value.get(key)
        if not isinstance(text, str):
            said = f"is a {type(text).__name__}, not a string" if key in value else "is missing"
            raise LineError(f": field {key!r} {said} (it has {', '.join(map(repr, value))}): see --json-keys")
        documents.append(task.tokens(encode(text)))
    return documents


def tokenize_files(piece: Texts, task: Task) -> Tokenized:
    """Return one document for each text file; files with a NUL in their first 8 KiB are left out."""
    found = [None if is_binary else task.tokens(text) for text, is_binary in texts_of(piece)]
    texts = [tokens for tokens in found if tokens is not None]
    return _joined([texts], task, len(found), len(found) - len(texts), None)


def _joined(
    found: list[list[NDArray[Any]]],
    task: Task,
    num_lines: int,
    num_binary: int,
    error: tuple[int, str] | None,
) -> Tokenized:
    """Return the documents without the empty ones."""
    kept = [[document for document in column if len(document)] for column in found]
    return Tokenized(
        tokens=[np.concatenate([np.empty(0, task.dtype), *column]) for column in kept],
        lengths=[np.array([len(document) for document in column], dtype=np.int64) for column in kept],
        num_lines=num_lines,
        num_empty=sum(map(len, found)) - sum(map(len, kept)),
        num_binary=num_binary,
        error=error,
    )
