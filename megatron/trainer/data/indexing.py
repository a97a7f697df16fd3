"""Scans of text files and of JSONL: how long each document is and where it lies, whatever the number of processes."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data import questions
from megatron.trainer.data.file_table import FILES_PER_TASK, FileTable
from megatron.trainer.data.index_cache import DocumentFiles
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.line_reader import LineReader
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.scan import (
    COLUMNS,
    UNREAD,
    JsonLinesRange,
    ScanError,
    add_keys,
    scan_json_lines,
    sniff_text_files,
)
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.token_scan import TextMeasures, measure_text_files, scan_read_lines
from megatron.trainer.data.tokenizer import ByteTokenizer, TextTokenizer
from megatron.trainer.data.unpacked import line_name
from megatron.trainer.data.workers import MAX_PROCESSES, map_in_processes, map_in_threads, num_usable_cpus

logger = logging.getLogger(__name__)


class _OfLines(Protocol):
    """What a task found in a range of lines; the first malformed one, counted from 0, and what is wrong with it."""

    @property
    def num_lines(self) -> int: ...
    @property
    def error(self) -> tuple[int, str] | None: ...


Result = TypeVar("Result")
Scanned = TypeVar("Scanned", bound=_OfLines)

RANGE_BYTES = 8 << 20
BYTES_PER_PROCESS = 32 << 20  # less is parsed in the time that a process takes to start
# The same for tokenizing, which is fifty times as much work.
TOKENIZED_RANGE_BYTES = 256 << 10
TOKENIZED_BYTES_PER_PROCESS = 1 << 20


def index_text_files(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    tokenizer: TextTokenizer,
    *,
    num_processes: int | None = None,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of text files: how many tokens they have, and which of them are text.

    With ByteTokenizer nothing but 8 KiB of each is read, otherwise all of it is tokenized. Files with a NUL in these
    8 KiB are binary and left out, and so is what is not a regular file; they are counted, and those not UTF-8, too.

    Columns beside those of the table: `lengths` and `files`, the row in the table, int64 [D].

    Args:
        num_processes: that tokenize; default: one for every 1 MiB, at most as many as there are CPUs.

    Raises:
        DataError: a file that cannot be read, or a tokenizer that cannot be loaded.
    """
    regular = np.flatnonzero(table.sizes_bytes >= 0)
    sizes_bytes = table.sizes_bytes[regular]
    paths = [files.root + files.names[file] for file in regular.tolist()]
    counts_bytes = isinstance(tokenizer, ByteTokenizer)
    if counts_bytes:
        pieces = range(0, len(paths), FILES_PER_TASK)
        tasks = [
            (paths[first : first + FILES_PER_TASK], sizes_bytes[first : first + FILES_PER_TASK]) for first in pieces
        ]
        results = map_in_threads(_measure_bytes, tasks)
    else:
        num_processes = num_processes or _num_processes(int(sizes_bytes.sum()), TOKENIZED_BYTES_PER_PROCESS)
        chunks = [(chunk, tokenizer) for chunk in chunks_of_files(paths, sizes_bytes)]
        results = map_in_processes(measure_text_files, chunks, num_processes, packages=True)
    lengths: list[int] = []
    num_replaced = 0
    what = "indexing" if counts_bytes else "tokenizing"
    with (
        reading(files.root),  # the error names the file
        Progress(f"{what} {files.name}", len(paths), "files", on_tick) as progress,
        closing(results),
    ):
        for part in as_data_errors(results):
            lengths += part.lengths
            num_replaced += part.num_replaced
            progress.advance(len(part.lengths))
    measured = np.array(lengths, dtype=np.int64)
    is_text = measured >= 0
    counts = {
        "binary files": len(regular) - int(is_text.sum()),
        "special files": len(table) - len(regular),
        "files not UTF-8": num_replaced,
    }
    columns = {"lengths": measured[is_text], "files": regular[is_text].astype(np.int64)}
    return LengthIndex.build(request, counts, table.columns() | columns)


def _measure_bytes(paths: Sequence[str], sizes_bytes: NDArray[np.int64]) -> TextMeasures:
    is_binary = np.frombuffer(sniff_text_files(paths), dtype=np.uint8) != 0
    return TextMeasures(np.where(is_binary, -1, sizes_bytes + 1).tolist())


def _num_processes(num_bytes: int, bytes_per_process: int) -> int:
    return max(1, min(num_usable_cpus(), MAX_PROCESSES, num_bytes // bytes_per_process))


def chunks_of_files(paths: Sequence[str], sizes_bytes: NDArray[np.int64]) -> Iterator[list[str]]:
    """Yield the paths in pieces of about TOKENIZED_RANGE_BYTES, which do not depend on the number of processes."""
    piece: list[str] = []
    piece_bytes = 0
    for path, size_bytes in zip(paths, sizes_bytes.tolist(), strict=True):
        piece.append(path)
        piece_bytes += size_bytes
        if piece_bytes >= TOKENIZED_RANGE_BYTES or len(piece) >= FILES_PER_TASK:
            yield piece
            piece, piece_bytes = [], 0
    if piece:
        yield piece


def ranges_of_files(
    paths: Sequence[str], sizes_bytes: NDArray[np.int64], range_bytes: int
) -> list[tuple[str, int, int, int]]:
    """Return path, first byte, last byte + 1 and size of the file of each range.

    Raises:
        DataError: a file that is not a regular one.
    """
    for path, size_bytes in zip(paths, sizes_bytes.tolist(), strict=True):
        if size_bytes < 0:
            raise DataError(f"{path} is not a regular file: JSONL must be read twice; copy it to a file")
    return [
        (path, start, min(start + range_bytes, size_bytes), size_bytes)
        for path, size_bytes in zip(paths, sizes_bytes.tolist(), strict=True)
        for start in range(0, size_bytes, range_bytes)
    ]


def index_json_lines(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    *,
    reader: LineReader | None = None,
    num_processes: int | None = None,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of JSONL files.

    Columns beside those of the table: `lengths`, and `offsets_bytes` of their lines, int64 [D]; `file_documents`, which
    document is the first of each file, int64 [F + 1]; `blanks`, for each blank line which document comes next, and
    `file_blanks`, which blank line is the first of each file: they give line numbers. Of chats also `first_targets`,
    int64 [D], and `continued`, the documents that are of the line of the document before, where there are any; where
    lines have prompts with responses also the columns of `questions`.

    Args:
        reader: tokenizes the lines; None: their texts have as many tokens as bytes.
        num_processes: default: one for every 32 MiB, when they are tokenized for every 1 MiB, at most as many as there
            are CPUs.

    Raises:
        DataError: the first line that is not a JSON object with a string under the text field.
    """
    paths = [files.root + name for name in files.names]
    ranges = ranges_of_files(paths, table.sizes_bytes, RANGE_BYTES if reader is None else TOKENIZED_RANGE_BYTES)
    total_bytes = sum(stop - start for _, start, stop, _ in ranges)
    per_process = BYTES_PER_PROCESS if reader is None else TOKENIZED_BYTES_PER_PROCESS
    num_processes = num_processes or _num_processes(total_bytes, per_process)
    started_s = time.perf_counter()
    with (
        reading(files.root),
        Progress(f"indexing {files.name}", total_bytes, "bytes", on_tick) as progress,
        closing(_scanned(ranges, request["json_key"] if reader is None else reader, num_processes)) as results,
    ):
        scans = list(checked_lines(files, ranges, results, progress))
    seconds = time.perf_counter() - started_s
    logger.info(
        "%s: %.1f MB of JSONL parsed in %.2f s by %s (%.0f MB/s)",
        files.name,
        total_bytes / 1e6,
        seconds,
        count(num_processes, "process", "processes"),
        total_bytes / 1e6 / seconds,
    )
    places = {path: number for number, path in enumerate(paths)}
    return _joined_index(request, table, [places[path] for path, *_ in ranges], scans)


def _scanned(
    ranges: Sequence[tuple[str, int, int, int]], reader: str | LineReader, num_processes: int
) -> Generator[JsonLinesRange, None, None]:
    """Return the lines of each range; `reader` is the text field where tokens are bytes."""
    tasks = [(*piece, reader) for piece in ranges]
    if isinstance(reader, str):
        return map_in_processes(scan_json_lines, tasks, num_processes)
    return map_in_processes(scan_read_lines, tasks, num_processes, packages=True)


def as_data_errors(results: Iterable[Result]) -> Iterator[Result]:
    """Yield the results of tasks; a ScanError of theirs is a DataError here."""
    try:
        yield from results
    except ScanError as error:
        raise DataError(str(error)) from error


def checked_lines(
    files: DocumentFiles, ranges: Sequence[tuple[str, int, int, int]], results: Iterable[Scanned], progress: Progress
) -> Iterator[Scanned]:
    """Yield what was found in each range.

    Raises:
        DataError: the first malformed line, by its number in its file; or a file that changed meanwhile.
    """
    num_lines: dict[str, int] = {}
    for (path, start, stop, _), result in zip(ranges, as_data_errors(results), strict=True):
        lines_before = num_lines.get(path, 0)
        if result.error is not None:
            line, what = result.error
            where = line_name(files.root, path.removeprefix(files.root), lines_before + line + 1)
            raise DataError(f"{where}{what}")
        num_lines[path] = lines_before + result.num_lines
        yield result
        progress.advance(stop - start)


def _joined_index(
    request: Mapping[str, str], table: FileTable, owners: Sequence[int], scans: Sequence[JsonLinesRange]
) -> LengthIndex:
    """Return the index of all ranges.

    Args:
        owners: the file of each range.
    """
    joined = {name: _joined([scan.columns[name] for scan in scans]) for name in COLUMNS}
    num_documents = _numbers(scans, "lengths")
    first_documents = np.cumsum(num_documents) - num_documents
    for name in ("blanks", "continued", "questions"):  # numbers of documents
        joined[name] += np.repeat(first_documents, _numbers(scans, name))
    unread: dict[str, int] = {}
    for scan in scans:
        add_keys(unread, scan.unread)
    counts = {"blank lines": len(joined["blanks"])} | {UNREAD + key: unread[key] for key in unread}
    columns = {
        "lengths": joined["lengths"],
        "offsets_bytes": joined["offsets_bytes"],
        "file_documents": _firsts(owners, num_documents, len(table)),
        "blanks": joined["blanks"],
        "file_blanks": _firsts(owners, _numbers(scans, "blanks"), len(table)),
    }
    if request["kind"] == "chat":
        counts["tokens of assistants"] = sum(scan.num_targets for scan in scans)
        columns["first_targets"] = joined["first_targets"]
        if len(joined["continued"]):
            columns["continued"] = joined["continued"]
    columns |= questions.columns(joined, of_chats=request["kind"] == "chat")
    return LengthIndex.build(request, counts, table.columns() | columns)


def _joined(parts: list[array[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.frombuffer(part, dtype=np.int64) for part in parts)])


def _numbers(scans: Sequence[JsonLinesRange], name: str) -> NDArray[np.int64]:
    """Return how many entries of a column each range has."""
    return np.array([len(scan.columns[name]) for scan in scans], dtype=np.int64)


def _firsts(owners: Sequence[int], numbers: NDArray[np.int64], num_files: int) -> NDArray[np.int64]:
    """Return how many things come before each file, and in all: int64 [F + 1]."""
    firsts = np.zeros(num_files + 1, dtype=np.int64)
    np.add.at(firsts, np.array(owners, dtype=np.int64) + 1, numbers)
    return np.cumsum(firsts)
