"""Tokenizes files of documents in several processes and writes their index in the order of the files.

    files -> pieces (whole lines of a file, or some text files) -> `tokenize_lines`, `tokenize_texts` -> IndexWriter

The index depends neither on the pieces nor on the number of processes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.files import FILES_PER_TASK, DocumentFiles, FileTable
from megatron.trainer.data.index_file import IndexWriter
from megatron.trainer.data.lines import LineError, LineReader, TextReader
from megatron.trainer.data.records import UNITS, blocks_of, shortened_file, split_lines, unit_of, whole_lines
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer, TextTokenizer
from megatron.trainer.data.workers import MAX_PROCESSES, Progress, map_in_processes, num_usable_cpus

logger = logging.getLogger(__name__)

SNIFFED_BYTES = 8192
MOST_KEYS = 32
UNREAD = "lines with the unread key "
"""Prefix of a key in the counts of an index."""
PIECE_BYTES = 1 << 20
BYTES_PER_PROCESS = 32 << 20  # a process takes as long to start as it takes to parse this much
# Smaller for tokenizing, which is fifty times as much work.
TOKENIZED_PIECE_BYTES = 256 << 10
TOKENIZED_BYTES_PER_PROCESS = 1 << 20
COLUMNS = (
    *("lengths", "blanks", "continued", "learned"),
    *("first_targets", "questions", "num_answers", "answers", "depths"),
)


class Lines(NamedTuple):
    """Whole lines of the file in row `file` of the table; they take `num_bytes` of it."""

    path: str
    file: int
    content: bytes
    num_bytes: int

    def __str__(self) -> str:
        return self.path


class Texts(NamedTuple):
    paths: Sequence[str]
    sizes_bytes: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes_bytes)

    def __str__(self) -> str:
        return self.paths[0]


class TokenizedLines(NamedTuple):
    """The documents of a piece of lines.

    Attributes:
        tokens: of all documents, concatenated.
        columns: COLUMNS -> int64:
            lengths: [n], tokens of each document; blank lines have no document.
            blanks: [b], the number of documents before each blank line.
            continued: [c], indexes of documents that are of the same line as the document before.
            learned: begin and end of each run of learned tokens, alternating.
            first_targets: [n], index in each document of its first learned token, not counting token 0.
            questions: [q], indexes of documents that are prompts with responses, or trees of turns.
            num_answers: [q], the number of responses, or of parts of the tree after the first.
            answers: [sum(num_answers)], tokens of each response, which are the last of their line.
            depths: [sum(num_answers)], 1 for a response; for a part of a tree, the number of branchings above it.
        num_targets: learned tokens of documents that are not learned whole: chats and lines with responses.
        unread: key that nothing reads -> number of lines with it; at most MOST_KEYS keys.
        error: (line from 0, message) for the first malformed line; later lines are not read.
    """

    tokens: NDArray[Any]
    columns: dict[str, NDArray[np.int64]]
    num_lines: int
    num_targets: int
    unread: dict[str, int]
    error: tuple[int, str] | None


def tokenize_lines(piece: Lines, reader: LineReader, dtype: str) -> TokenizedLines:
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
    tokens = [np.empty(0, dtype)]
    unread: dict[str, int] = {}
    num_tokens = num_targets = num_lines = 0
    error = None
    for line in split_lines(piece.content):
        try:
            documents = reader.read(line) if line.strip() else []
        except LineError as caught:
            error = (num_lines, str(caught))
            break
        num_lines += 1
        if documents:
            add_keys(unread, dict.fromkeys(documents[0].unread, 1))
        else:
            columns["blanks"].append(len(columns["lengths"]))
        for number, document in enumerate(documents):
            place, length, learned = len(columns["lengths"]), len(document.tokens), document.is_target
            columns["lengths"].append(length)
            if number:
                columns["continued"].append(place)
            if learned is None:
                columns["learned"] += [num_tokens, num_tokens + length]
                columns["first_targets"].append(1)
            else:
                edges = np.flatnonzero(np.diff(learned, prepend=False, append=False))
                columns["learned"] += (num_tokens + edges).tolist()
                columns["first_targets"].append(1 + int(learned[1:].argmax()))
                num_targets += int(learned[1:].sum())
            if document.answers:
                columns["questions"].append(place)
                columns["num_answers"].append(len(document.answers))
                columns["answers"] += document.answers
                columns["depths"] += document.depths or (1,) * len(document.answers)
            tokens.append(document.tokens.astype(dtype))
            num_tokens += length
    arrays = {name: np.array(column, np.int64) for name, column in columns.items()}
    return TokenizedLines(np.concatenate(tokens), arrays, num_lines, num_targets, unread, error)


def add_keys(unread: dict[str, int], found: dict[str, int]) -> None:
    """Add the numbers of lines with each key; at most MOST_KEYS keys are kept, because data may have names as keys."""
    for key, num_lines in found.items():
        if key in unread or len(unread) < MOST_KEYS:
            unread[key] = unread.get(key, 0) + num_lines


class TokenizedTexts(NamedTuple):
    """The documents of text files.

    Attributes:
        tokens: of all files, concatenated, each with its end of document.
        lengths: tokens of each file, -1 for a binary one.
        num_replaced: number of files that are not UTF-8, not counted by a byte tokenizer.
    """

    tokens: NDArray[Any]
    lengths: list[int]
    num_replaced: int


def tokenize_texts(piece: Texts, tokenizer: TextTokenizer, dtype: str) -> TokenizedTexts:
    """Return the documents of text files; OSError if one is unreadable, DataError if one is not as it was listed."""
    tokens, lengths, num_replaced = [np.empty(0, dtype)], [], 0
    are_bytes = isinstance(tokenizer, ByteTokenizer)
    for text, is_binary in texts_of(piece):
        if is_binary:
            lengths.append(-1)
            continue
        num_replaced += not (are_bytes or _is_utf8(text))
        found = np.frombuffer(text, np.uint8) if are_bytes else tokenizer.encode(text)
        tokens += [found.astype(dtype), np.array([tokenizer.eod], dtype)]
        lengths.append(len(found) + 1)
    return TokenizedTexts(np.concatenate(tokens), lengths, num_replaced)


def texts_of(piece: Texts) -> Iterator[tuple[bytes, bool]]:
    """Yield each file's content, and whether it is binary: has a NUL in 8 KiB; errors as in `tokenize_texts`."""
    for path, size_bytes in zip(piece.paths, piece.sizes_bytes, strict=True):
        with open(path, "rb") as file:
            text = file.read(SNIFFED_BYTES)
            is_binary = b"\0" in text
            text += b"" if is_binary else file.read()
        if not is_binary and len(text) != size_bytes:
            raise shortened_file(path, len(text), size_bytes)
        yield text, is_binary


def _is_utf8(text: bytes) -> bool:
    try:
        str(text, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def lines_of_files(files: DocumentFiles, table: FileTable, units: Sequence[str], piece_bytes: int) -> Iterator[Lines]:
    """Yield all files' lines in pieces of about `piece_bytes`; DataError if one is not regular, damaged or shorter."""
    for file, (name, unit, size_bytes) in enumerate(zip(files.names, units, table.sizes_bytes.tolist(), strict=True)):
        path = files.root + name
        if size_bytes < 0:
            raise DataError(f"{path} is not a regular file: a change of it would leave no sign; copy it to a file")
        for content, num_bytes in whole_lines(blocks_of(path, unit, size_bytes, piece_bytes)):
            yield Lines(path, file, content, num_bytes)


def units_of(files: DocumentFiles, table: FileTable) -> list[str]:
    """Return what messages call a record of each file, such as "line"."""
    is_regular = (table.sizes_bytes >= 0).tolist()
    return [unit_of(files.root + name) if is_regular[file] else "line" for file, name in enumerate(files.names)]


def texts_of_files(files: DocumentFiles, table: FileTable, piece_bytes: int) -> Iterator[Texts]:
    """Yield the regular files in pieces of about `piece_bytes`."""
    paths: list[str] = []
    sizes_bytes: list[int] = []
    num_bytes = 0
    for file in np.flatnonzero(table.sizes_bytes >= 0).tolist():
        paths.append(files.root + files.names[file])
        sizes_bytes.append(int(table.sizes_bytes[file]))
        num_bytes += sizes_bytes[-1]
        if num_bytes >= piece_bytes or len(paths) >= FILES_PER_TASK:
            yield Texts(paths, sizes_bytes)
            paths, sizes_bytes, num_bytes = [], [], 0
    if paths:
        yield Texts(paths, sizes_bytes)


def mapped(
    function: Callable[..., Any],
    pieces: Iterable[Lines | Texts],
    arguments: tuple[Any, ...],
    num_processes: int,
    root: str,
) -> Generator[tuple[Any, Any], None, None]:
    """Yield (piece, function(piece, *arguments)); an OSError becomes a DataError. Close it after an error."""
    waiting: deque[Lines | Texts] = deque()

    def tasks() -> Iterator[tuple[Any, ...]]:
        for piece in pieces:
            waiting.append(piece)
            yield (piece, *arguments)

    with reading(root), closing(map_in_processes(function, tasks(), num_processes)) as results:
        for found in results:
            yield waiting.popleft(), found


def checked_lines(units: Sequence[str], results: Iterable[tuple[Lines, Any]]) -> Iterator[tuple[Lines, Any]]:
    """Yield the results of pieces, such as `TokenizedLines`; DataError at the first malformed line, with its number."""
    num_lines = [0] * len(units)
    for piece, found in results:
        if found.error is not None:
            line, what = found.error
            raise DataError(f"{piece.path} {units[piece.file]} {num_lines[piece.file] + line + 1}{what}")
        num_lines[piece.file] += found.num_lines
        yield piece, found


def write_index(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    reader: LineReader,
    tokenizer: TextTokenizer,
    writer: IndexWriter,
    *,
    num_processes: int | None = None,
    on_tick: Callable[[], None] | None = None,
) -> None:
    """Write the index of all files; `documents.StoredDocuments` describes its columns.

    Binary text files (a NUL in the first 8 KiB) and files that are not regular are left out.

    Args:
        num_processes: default: one per 32 MiB, or per 1 MiB if they are tokenized, at most one per CPU.

    Raises DataError: a malformed line, a file that cannot be read, or a tokenizer that cannot be loaded. Raises
    OSError: the index cannot be written."""
    total_bytes = int(table.sizes_bytes.clip(min=0).sum())
    counts_bytes = isinstance(tokenizer, ByteTokenizer) and isinstance(reader, TextReader)
    per_process = BYTES_PER_PROCESS if counts_bytes else TOKENIZED_BYTES_PER_PROCESS
    piece_bytes = PIECE_BYTES if counts_bytes else TOKENIZED_PIECE_BYTES
    num_processes = num_processes or max(1, min(num_usable_cpus(), MAX_PROCESSES, total_bytes // per_process))
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32).str
    with Progress(f"tokenizing {files.name}", total_bytes, "bytes", on_tick) as progress:
        if files.kind == "text":
            texts = texts_of_files(files, table, piece_bytes)
            with closing(mapped(tokenize_texts, texts, (tokenizer, dtype), num_processes, files.root)) as found:
                counts, columns = _write_texts(table, found, writer, progress)
        else:
            units = units_of(files, table)
            lines = lines_of_files(files, table, units, piece_bytes)
            with closing(mapped(tokenize_lines, lines, (reader, dtype), num_processes, files.root)) as found:
                counts, columns = _write_lines(units, checked_lines(units, found), writer, progress)
    by = count(num_processes, "process", "processes")
    logger.info("%s: %.1f MB tokenized by %s", files.name, total_bytes / 1e6, by)
    columns["first_tokens"] = np.cumsum(columns["lengths"]) - columns["lengths"]
    writer.finish(request, counts, table.columns() | columns)


def _write_texts(
    table: FileTable, results: Iterable[tuple[Texts, TokenizedTexts]], writer: IndexWriter, progress: Progress
) -> tuple[dict[str, int], dict[str, NDArray[np.int64]]]:
    measured: list[int] = []
    num_replaced = 0
    for piece, found in results:
        writer.append(found.tokens)
        measured += found.lengths
        num_replaced += found.num_replaced
        progress.advance(piece.num_bytes)
    lengths = np.full(len(table), -1, np.int64)
    lengths[table.sizes_bytes >= 0] = measured
    is_text = lengths >= 0
    counts = {
        "binary files": len(measured) - int(is_text.sum()),
        "special files": len(table) - len(measured),
        "files not UTF-8": num_replaced,
    }
    return counts, {"lengths": lengths[is_text], "file_documents": np.cumsum(np.concatenate([[False], is_text]))}


def _write_lines(
    units: Sequence[str], results: Iterable[tuple[Lines, TokenizedLines]], writer: IndexWriter, progress: Progress
) -> tuple[dict[str, int], dict[str, NDArray[np.int64]]]:
    parts: dict[str, list[NDArray[np.int64]]] = {name: [np.empty(0, np.int64)] for name in COLUMNS}
    num_documents, num_blanks = np.zeros((2, len(units)), np.int64)  # of each file
    unread: dict[str, int] = {}
    num_targets = num_tokens = 0
    for piece, found in results:
        writer.append(found.tokens)
        firsts = {"learned": num_tokens} | dict.fromkeys(("blanks", "continued", "questions"), num_documents.sum())
        for name, column in found.columns.items():
            parts[name].append(column + firsts.get(name, 0))
        num_tokens += len(found.tokens)
        num_documents[piece.file] += len(found.columns["lengths"])
        num_blanks[piece.file] += len(found.columns["blanks"])
        num_targets += found.num_targets
        add_keys(unread, found.unread)
        progress.advance(piece.num_bytes)
    columns = {name: np.concatenate(parts[name]) for name in COLUMNS} | {
        "file_documents": np.cumsum([0, *num_documents]),
        "file_blanks": np.cumsum([0, *num_blanks]),
        "file_units": np.array([UNITS.index(unit) for unit in units], np.int64),
    }
    if not num_targets:  # everything is learned
        del columns["learned"], columns["first_targets"]
    counts = {"blank lines": int(num_blanks.sum()), "learned tokens": num_targets}
    return counts | {UNREAD + key: unread[key] for key in unread}, columns
