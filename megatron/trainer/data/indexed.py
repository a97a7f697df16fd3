"""Megatron's .bin/.idx files as documents, checked against each other before megatron-core maps them."""

from __future__ import annotations

import logging
import os
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer, NullTokenizer

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\0\0"
# magic, version, code of the token type, number of sequences, number of document boundaries
HEADER = struct.Struct("<9sQBQQ")
BYTES_OF_TOKEN_TYPE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
NUM_PROBED_DOCUMENTS = 1024


def path_prefix(path: str) -> str:
    """Return `path` without .idx or .bin."""
    root, suffix = os.path.splitext(path)
    return root if suffix in (".idx", ".bin") else path


class IndexedDocuments:
    """One document per document of the index (it may hold several sequences), with the end of document.

    Up to 1024 evenly spaced documents are probed: when all end with the EOD id none gets another one, otherwise every
    document does (with a warning when only some had it).

    Args:
        path: the common prefix of the two files, or one of them.
        tokenizer: says which ids are legal and which one ends a document.

    Raises:
        DataError: files that are missing, truncated or contradict each other.
    """

    def __init__(self, path: str, tokenizer: ByteTokenizer | NullTokenizer) -> None:
        self._prefix = path_prefix(path)
        self._tokenizer = tokenizer
        self._dataset: Any = None
        self._bin_bytes = _size_bytes(self._prefix + ".bin", self._prefix + ".idx")
        self._first_sequences, self._num_tokens = _read_index(self._prefix, self._bin_bytes)
        self._appends_eod = not self._documents_end_with_eod()
        self.lengths = self._num_tokens + int(self._appends_eod)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataset": None}

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a document."""
        num_stored = int(self._num_tokens[document])
        tokens = self._stored(document, start, min(stop, num_stored))
        vocab_size = self._tokenizer.vocab_size
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
            raise DataError(
                f"{self.document_name(document)} holds token id {wrong}, the vocabulary has {vocab_size}: "
                "use the tokenizer that the data was made with (--tokenizer-type NullTokenizer --vocab-size N)",
                token=wrong,
                vocab_size=vocab_size,
            )
        return np.append(tokens, self._tokenizer.eod) if stop > num_stored else tokens

    def _stored(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens of the .bin file. The sequences of a document lie one after the other there."""
        if stop <= start:
            return np.empty(0, dtype=np.int64)
        if self._dataset is None:
            from megatron.core.datasets.indexed_dataset import IndexedDataset

            now_bytes = _size_bytes(self._prefix + ".bin", self._prefix + ".idx")
            if now_bytes != self._bin_bytes:
                raise DataError(
                    f"{self._prefix}.bin has {now_bytes} bytes but had {self._bin_bytes} when it was indexed: "
                    "the data must not change during a run; start again to index it anew",
                    indexed_bytes=self._bin_bytes,
                    found_bytes=now_bytes,
                )
            self._dataset = IndexedDataset(self._prefix)
        tokens = self._dataset.get(int(self._first_sequences[document]), offset=start, length=stop - start)
        return np.asarray(tokens, dtype=np.int64)

    def _documents_end_with_eod(self) -> bool:
        documents = np.flatnonzero(self._num_tokens)
        if not len(documents):
            return False
        spaced = np.linspace(0, len(documents) - 1, min(len(documents), NUM_PROBED_DOCUMENTS)).astype(np.int64)
        ends = 0
        for document in documents[spaced]:
            last = int(self._num_tokens[document]) - 1
            ends += int(self._stored(int(document), last, last + 1)[0] == self._tokenizer.eod)
        if 0 < ends < len(spaced):
            logger.warning(
                "%s: %d of %d probed documents end with the EOD id %d; it is appended to all of them",
                self._prefix,
                ends,
                len(spaced),
                self._tokenizer.eod,
            )
        return ends == len(spaced)

    def document_name(self, document: int) -> str:
        """Return the prefix and number of the document."""
        return f"{self._prefix}.bin document {document}"

    def describe(self) -> str:
        """Return the number of documents and whether EOD is appended."""
        eod = "EOD appended" if self._appends_eod else "EOD in the data"
        return f"{self._prefix}: {count(len(self.lengths), '.bin/.idx document')}, {eod}"


def _size_bytes(path: str, other: str) -> int:
    if not os.path.exists(path):
        raise DataError(f"{path} is missing: {other} needs it beside itself; give the common prefix", path=path)
    with reading(path):
        return os.path.getsize(path)


def _read_index(prefix: str, bin_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first sequence and the number of tokens of each document, int64 [documents].

    Layout: header, int32 tokens per sequence, int64 byte offset per sequence, int64 number of sequences before each
    document boundary (from 0 to all), and for multimodal data int8 mode per sequence.
    """
    path = prefix + ".idx"
    remedy = "copy both files again or make them anew with preprocess_data.py"
    idx_bytes = _size_bytes(path, prefix + ".bin")
    with reading(path), open(path, "rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise DataError(
            f"{path} starts with {header[: len(MAGIC)]!r}, a Megatron index with {MAGIC!r}: give another path"
        )
    if len(header) < HEADER.size:
        raise DataError(
            f"{path} is truncated: {idx_bytes} bytes, its header alone has {HEADER.size}; {remedy}",
            expected_bytes=HEADER.size,
            found_bytes=idx_bytes,
        )
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{path} has version {version}, only 1 is known: {remedy}", version=version)
    if code not in BYTES_OF_TOKEN_TYPE:
        raise DataError(
            f"{path} has token type {code}, integers are {', '.join(map(str, BYTES_OF_TOKEN_TYPE))}: {remedy}"
        )
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if idx_bytes < expected_bytes:
        raise DataError(
            f"{path} is truncated: {idx_bytes} bytes, {count(num_sequences, 'sequence')} and "
            f"{num_boundaries} document boundaries need {expected_bytes}; {remedy}",
            expected_bytes=expected_bytes,
            found_bytes=idx_bytes,
        )
    if idx_bytes not in (expected_bytes, expected_bytes + num_sequences):
        raise DataError(
            f"{path} has {idx_bytes} bytes, its header says {expected_bytes}: {remedy}",
            expected_bytes=expected_bytes,
            found_bytes=idx_bytes,
        )
    with reading(path):
        content = np.memmap(path, dtype=np.uint8, mode="r")
    sizes_end = HEADER.size + 4 * num_sequences
    offsets_end = sizes_end + 8 * num_sequences
    num_tokens = content[HEADER.size : sizes_end].view(np.int32)
    offsets_bytes = content[sizes_end:offsets_end].view(np.int64)
    boundaries = np.array(content[offsets_end:expected_bytes]).view(np.int64)

    if not num_boundaries or boundaries[0] != 0 or boundaries[-1] != num_sequences or (np.diff(boundaries) < 0).any():
        raise DataError(
            f"{path}: its {num_boundaries} document boundaries do not rise from 0 to its {num_sequences} sequences; "
            f"{remedy}"
        )
    token_bytes = BYTES_OF_TOKEN_TYPE[code]
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_tokens, dtype=np.int64)])
    if num_sequences and ((num_tokens < 0).any() or not np.array_equal(offsets_bytes, ends[:-1] * token_bytes)):
        raise DataError(f"{path}: its {num_sequences} sequences do not lie one after the other in the .bin: {remedy}")
    needed_bytes = int(ends[-1]) * token_bytes
    if bin_bytes < needed_bytes:
        raise DataError(
            f"{prefix}.bin is truncated: {bin_bytes} bytes, its index says {needed_bytes}; {remedy}",
            expected_bytes=needed_bytes,
            found_bytes=bin_bytes,
        )
    return boundaries[:-1], np.diff(ends[boundaries])
