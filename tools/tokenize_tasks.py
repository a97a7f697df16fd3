"""Tasks of preprocess_data.py: a range of a JSONL file, or a chunk of text files, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.json_text import LineError, encode, object_of_line
from megatron.trainer.data.scan import scan_lines
from megatron.trainer.data.token_scan import texts_of, tokenizing
from megatron.trainer.data.tokenizer import TextTokenizer


class Tokenized(NamedTuple):
    """What a task found, for each key: the tokens of its documents one after the other, and how many each has.

    Attributes:
        error: the first bad line, counted from 0 in this range, and what is wrong with it.
    """

    tokens: list[NDArray[np.int64]]
    lengths: list[NDArray[np.int64]]
    num_lines: int
    num_bytes: int
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


def tokenize_lines(path: str, start: int, stop: int, size_bytes: int, task: Task) -> Tokenized:
    """Return the documents of the JSONL lines that start at bytes start .. stop - 1; see `scan.scan_lines`."""
    found: list[list[NDArray[Any]]] = [[] for _ in task.keys]

    def take(line: bytes) -> tuple[list[tuple[int]], tuple[str, ...]]:
        value = object_of_line(line, f'{{"{task.keys[0]}": "..."}}')
        documents = []
        for key in task.keys:
            text = value.get(key)
            if not isinstance(text, str):
                said = f"is a {type(text).__name__}, not a string" if key in value else "is missing"
                raise LineError(f": field {key!r} {said} (it has {', '.join(map(repr, value))}): see --json-keys")
            documents.append(task.tokens(encode(text)))
        for column, document in zip(found, documents, strict=True):
            column.append(document)
        return [(0,)], ()

    with tokenizing():
        scanned = scan_lines(path, start, stop, size_bytes, take)
    return _joined(found, task, scanned.num_lines, stop - start, 0, scanned.error)


def tokenize_files(paths: Sequence[str], task: Task) -> Tokenized:
    """Return one document for each text file; files with a NUL in their first 8 KiB are left out."""
    found: list[NDArray[Any]] = []
    num_bytes = num_binary = 0
    for text, is_binary in texts_of(paths):
        num_bytes += len(text)
        if is_binary:
            num_binary += 1
            continue
        with tokenizing():
            found.append(task.tokens(text))
    return _joined([found], task, len(paths), num_bytes, num_binary, None)


def _joined(
    found: list[list[NDArray[Any]]],
    task: Task,
    num_lines: int,
    num_bytes: int,
    num_binary: int,
    error: tuple[int, str] | None,
) -> Tokenized:
    """Return the documents without the empty ones."""
    kept = [[document for document in column if len(document)] for column in found]
    return Tokenized(
        tokens=[np.concatenate([np.empty(0, task.dtype), *column]) for column in kept],
        lengths=[np.array([len(document) for document in column], dtype=np.int64) for column in kept],
        num_lines=num_lines,
        num_bytes=num_bytes,
        num_empty=sum(map(len, found)) - sum(map(len, kept)),
        num_binary=num_binary,
        error=error,
    )
