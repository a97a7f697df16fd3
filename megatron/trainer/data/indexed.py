"""Megatron's .bin/.idx files as documents, checked against each other before megatron-core maps them."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.lengths.megatron_index import MegatronIndex, read_megatron_index
from megatron.trainer.data.source import Source, count, reading
from megatron.trainer.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_PROBED_DOCUMENTS = 1024
LOOKED_AT_EVERY_S = 1.0


def path_prefix(path: str) -> str:
    root, suffix = os.path.splitext(path)
    return root if suffix in (".idx", ".bin") else path


class IndexedDocuments(Source):
    """One document per document of the index (it may hold several sequences), with the end of document.

    A document that does not end with the EOD id gets one. Up to 1024 evenly spaced documents are probed. If only some
    of them end with EOD, the ends of all are read, with a warning. `path` is the prefix of the two files, or one of
    them. DataError if these are missing, truncated or contradict each other.
    """

    def __init__(self, path: str, tokenizer: Tokenizer) -> None:
        self._prefix = path_prefix(path)
        self._tokenizer = tokenizer
        self._dataset: Any = None
        self._files = {self._prefix + suffix: _signs(self._prefix, suffix) for suffix in (".bin", ".idx")}
        self._look_again_s = -math.inf
        index = _read_index(self._prefix, self._files[self._prefix + ".bin"].size_bytes)
        self._first_sequences, self._num_tokens = index.first_sequences, index.document_tokens
        self._appends_eod = self._find_documents_without_eod()
        self.lengths = self._num_tokens + self._appends_eod

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dataset": None}

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a document; DataError if an id is not in the vocabulary."""
        num_stored = int(self._num_tokens[document])
        tokens = self._stored(document, start, min(stop, num_stored))
        vocab_size = self._tokenizer.vocab_size
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            wrong = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
            raise DataError(
                f"{self.document_name(document)} holds token id {wrong}, the vocabulary has {vocab_size}: "
                "use the tokenizer that the data was made with (--tokenizer-type NullTokenizer --vocab-size N)"
            )
        return np.append(tokens, self._tokenizer.eod) if stop > num_stored else tokens

    def _stored(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens of the .bin file, where the sequences of a document are contiguous."""
        if stop <= start:
            return np.empty(0, dtype=np.int64)
        tokens = self._open().get(int(self._first_sequences[document]), offset=start, length=stop - start)
        return np.asarray(tokens, dtype=np.int64)

    def _open(self) -> Any:
        """Return megatron-core's IndexedDataset, after checking that the files have not changed."""
        self._check_unchanged()
        if self._dataset is None:
            from megatron.core.datasets.indexed_dataset import IndexedDataset

            with reading(self._prefix + ".bin"), open(self._prefix + ".bin", "rb"):  # it fails in __del__, too
                self._dataset = IndexedDataset(self._prefix)
        return self._dataset

    def _check_unchanged(self) -> None:
        """Raise DataError if a file has changed since the start; look when it is opened, then at most once a second.
        The files are mapped: writes show at once, and reading past the end of a shortened file kills the process."""
        now_s = time.monotonic()
        if self._dataset is not None and now_s < self._look_again_s:
            return
        self._look_again_s = now_s + LOOKED_AT_EVERY_S
        for suffix in (".bin", ".idx"):
            path = self._prefix + suffix
            found = _signs(self._prefix, suffix)
            if found != self._files[path]:
                raise _changed(path, self._files[path].size_bytes, found.size_bytes)

    def _find_documents_without_eod(self) -> NDArray[np.bool_]:
        """Return for each document whether it gets an EOD. If the probed ones agree, all follow them."""
        documents = np.flatnonzero(self._num_tokens)
        spaced = np.linspace(0, len(documents) - 1, min(len(documents), NUM_PROBED_DOCUMENTS)).astype(np.int64)
        num_ends = int(self._end_with_eod(documents[spaced]).sum())
        if num_ends in (0, len(spaced)):
            return np.full(len(self._num_tokens), not num_ends)
        lacks_eod = np.ones(len(self._num_tokens), dtype=bool)
        lacks_eod[documents] = ~self._end_with_eod(documents)
        logger.warning(
            "%s: %d of %d probed documents end with the EOD id %d, so all were looked at: %d of %d do, it is appended "
            "to the others",
            self._prefix,
            num_ends,
            len(spaced),
            self._tokenizer.eod,
            int((~lacks_eod).sum()),
            len(lacks_eod),
        )
        return lacks_eod

    def _end_with_eod(self, documents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the last token of each of these documents, which are not empty, is the EOD id."""
        if not len(documents):
            return np.zeros(0, dtype=bool)
        last_places = np.cumsum(self._num_tokens)[documents] - 1
        tokens = np.memmap(self._prefix + ".bin", dtype=self._open().index.dtype, mode="r")
        return np.asarray(tokens[last_places] == self._tokenizer.eod)

    def document_name(self, document: int) -> str:
        return f"{self._prefix}.bin document {document}"

    def describe(self) -> str:
        num_appended = int(self._appends_eod.sum())
        where = f"appended to {num_appended} of them" if 0 < num_appended < len(self.lengths) else "appended"
        eod = f"EOD {where if num_appended else 'in the data'} (id {self._tokenizer.eod})"
        return f"{self._prefix}: {count(len(self.lengths), '.bin/.idx document')}, {eod}"


def _changed(path: str, bytes_before: int, bytes_now: int) -> DataError:
    """Return the error for a changed file; with equal sizes, its time shows the change."""
    how = (
        f"has {bytes_now} bytes but had {bytes_before} when it was indexed"
        if bytes_now != bytes_before
        else f"was written again after it was indexed (it has {bytes_now} bytes as before, and another time)"
    )
    return DataError(f"{path} {how}: the data must not change during a run; restart to index it again")


class _Signs(NamedTuple):
    size_bytes: int
    mtime_ns: int


def _signs(prefix: str, suffix: str) -> _Signs:
    path, other = prefix + suffix, prefix + {".bin": ".idx", ".idx": ".bin"}[suffix]
    if not os.path.exists(path):
        raise DataError(f"{path} is missing: {other} needs it beside itself; give the common prefix")
    with reading(path):
        status = os.stat(path)
    return _Signs(status.st_size, status.st_mtime_ns)


def _read_index(prefix: str, bin_bytes: int) -> MegatronIndex:
    """Return the content of the .idx; DataError if the .bin is too short for it."""
    index = read_megatron_index(prefix + ".idx")
    if bin_bytes < index.bin_bytes:
        raise DataError(
            f"{prefix}.bin is truncated: {bin_bytes} bytes, its index says {index.bin_bytes}; "
            "copy both files again or make them again with preprocess_data.py"
        )
    return index
