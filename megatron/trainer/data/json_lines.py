"""JSONL files as documents: one object per line with a text field, found through an index made by one scan."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.file_table import FileTable
from megatron.trainer.data.index_cache import DocumentFiles
from megatron.trainer.data.json_text import LineError, encode, text_of_line
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.scan import JsonLinesRange, ScanError, scan_json_lines
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer
from megatron.trainer.data.workers import MAX_PROCESSES, map_in_processes, num_usable_cpus

logger = logging.getLogger(__name__)

RANGE_BYTES = 8 << 20
BYTES_PER_PROCESS = 32 << 20  # less is parsed in the time that a process takes to start


def json_request(json_key: str, tokenizer: ByteTokenizer) -> dict[str, str]:
    """Return what decides the lengths of JSONL files besides their contents."""
    return {"kind": "jsonl", "json_key": json_key, "tokenizer": repr(tokenizer)}


def index_json_lines(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    *,
    num_processes: int | None = None,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of JSONL files; the same for any number of processes.

    Columns beside those of the table: `lengths`, and `offsets_bytes` of the lines that are not blank, int64 [D];
    `file_documents`, which document is the first of each file, int64 [F + 1]; `blanks`, for each blank line which
    document comes next, and `file_blanks`, which blank line is the first of each file: they give line numbers.

    Args:
        num_processes: default: one for every 32 MiB, at most as many as there are CPUs.

    Raises:
        DataError: the first line that is no JSON object with a string under the text field.
    """
    sizes_bytes = table.sizes_bytes.tolist()
    paths = [files.root + name for name in files.names]
    for path, size_bytes in zip(paths, sizes_bytes, strict=True):
        if size_bytes < 0:
            raise DataError(f"{path} is not a regular file: JSONL must be read twice; copy it to a file", path=path)
    total_bytes = sum(sizes_bytes)
    if num_processes is None:
        num_processes = max(1, min(num_usable_cpus(), MAX_PROCESSES, total_bytes // BYTES_PER_PROCESS))
    owners = [file for file, size in enumerate(sizes_bytes) for _ in range(0, size, RANGE_BYTES)]
    tasks = [
        (path, start, min(start + RANGE_BYTES, size_bytes), size_bytes, request["json_key"])
        for path, size_bytes in zip(paths, sizes_bytes, strict=True)
        for start in range(0, size_bytes, RANGE_BYTES)
    ]
    started_s = time.perf_counter()
    ranges: list[JsonLinesRange] = []
    num_lines = [0] * len(paths)
    with (
        reading(files.root),  # the error names the file
        Progress(f"indexing {files.name}", total_bytes, "bytes", on_tick) as progress,
        closing(map_in_processes(scan_json_lines, tasks, num_processes)) as results,
    ):
        for file, (path, start, stop, *_), result in zip(owners, tasks, _as_data_errors(results), strict=True):
            if result.error is not None:
                line, what = result.error
                where = f"{path} line {num_lines[file] + line + 1}"
                raise DataError(f"{where}{what}", where=where)
            num_lines[file] += result.num_lines
            ranges.append(result)
            progress.advance(stop - start)
    seconds = time.perf_counter() - started_s
    logger.info(
        "%s: %.1f MB of JSONL parsed in %.2f s by %s (%.0f MB/s)",
        files.name,
        total_bytes / 1e6,
        seconds,
        count(num_processes, "process", "processes"),
        total_bytes / 1e6 / seconds,
    )
    num_documents = np.array([len(part.lengths) for part in ranges], dtype=np.int64)
    num_blank = np.array([len(part.blanks) for part in ranges], dtype=np.int64)
    first_documents = np.cumsum(num_documents) - num_documents
    return LengthIndex.build(
        request,
        {"blank lines": int(num_blank.sum())},
        table.columns()
        | {
            "lengths": _joined([part.lengths for part in ranges]),
            "offsets_bytes": _joined([part.offsets_bytes for part in ranges]),
            "file_documents": _firsts(owners, num_documents, len(paths)),
            "blanks": _joined([part.blanks for part in ranges]) + np.repeat(first_documents, num_blank),
            "file_blanks": _firsts(owners, num_blank, len(paths)),
        },
    )


def _as_data_errors(results: Iterable[JsonLinesRange]) -> Iterator[JsonLinesRange]:
    try:
        yield from results
    except ScanError as error:
        raise DataError(str(error)) from error


def _joined(parts: list[array[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.frombuffer(part, dtype=np.int64) for part in parts)])


def _firsts(owners: list[int], numbers: NDArray[np.int64], num_files: int) -> NDArray[np.int64]:
    """Return how many things come before each file, and in all: int64 [F + 1]."""
    firsts = np.zeros(num_files + 1, dtype=np.int64)
    np.add.at(firsts, np.array(owners, dtype=np.int64) + 1, numbers)
    return np.cumsum(firsts)


class JsonLines:
    """One document per line: the UTF-8 bytes of its text field and the end of document. Blank lines are counted.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `index_json_lines`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, tokenizer: ByteTokenizer) -> None:
        self._name = name
        self._paths = [root + file for file in FileTable.from_columns(index.columns).list_names()]
        self._json_key = index.request["json_key"]
        self._tokenizer = tokenizer
        self._num_blank = index.counts["blank lines"]
        self.lengths = index.columns["lengths"]
        self._offsets_bytes = index.columns["offsets_bytes"]
        self._file_documents = index.columns["file_documents"]
        self._blanks, self._file_blanks = index.columns["blanks"], index.columns["file_blanks"]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a line, reading only that line."""
        path, name = self._paths[self._file(document)], self.document_name(document)
        with reading(path), open(path, "rb") as file:
            file.seek(self._offsets_bytes[document])
            line = file.readline()
        try:
            text = encode(text_of_line(line, self._json_key))
        except LineError as error:
            raise DataError(f"{name}{error}", where=name) from error
        if len(text) + 1 != self.lengths[document]:
            raise DataError(
                f"{name} has {len(text)} bytes of text but had {self.lengths[document] - 1} when it was indexed: "
                "the data must not change during a run; start again to index it anew",
                path=path,
                indexed_bytes=int(self.lengths[document]) - 1,
                found_bytes=len(text),
            )
        tokens = self._tokenizer.encode(text[start:stop])
        return np.append(tokens, self._tokenizer.eod) if stop > len(text) else tokens

    def _file(self, document: int) -> int:
        return int(np.searchsorted(self._file_documents, document, side="right")) - 1

    def document_name(self, document: int) -> str:
        """Return the file and line number."""
        file = self._file(document)
        blanks = self._blanks[self._file_blanks[file] : self._file_blanks[file + 1]]
        num_blank = int(np.searchsorted(blanks, document, side="right"))
        return f"{self._paths[file]} line {document - int(self._file_documents[file]) + num_blank + 1}"

    def describe(self) -> str:
        """Return the number of lines and of blank ones."""
        words = f"{self._name}: {count(len(self.lengths), 'JSON line')}"
        return words + (f", {count(self._num_blank, 'blank line')} skipped" if self._num_blank else "")
