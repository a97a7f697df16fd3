"""Text files as documents. With ByteTokenizer one byte is one token, so the size that the file system keeps is the
length; with another tokenizer all files are read and tokenized once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.file_table import FILES_PER_TASK, FileTable, FileWatch
from megatron.trainer.data.index_cache import DocumentFiles
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.scan import ScanError, sniff_text_files
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.token_scan import measure_text_files
from megatron.trainer.data.tokenizer import ByteTokenizer, TextTokenizer
from megatron.trainer.data.workers import MAX_PROCESSES, map_in_processes, map_in_threads, num_usable_cpus

TOKENIZED_TASK_BYTES = 256 << 10
TOKENIZED_BYTES_PER_PROCESS = 1 << 20
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


def list_files(folder: str, pattern: str) -> list[str]:
    """Return the paths of the files below `folder` that match `pattern`, sorted.

    Hidden folders and SKIPPED_FOLDERS are not entered, links to folders neither.

    Args:
        pattern: relative to `folder`; `**` stands for any number of folders, and as in a shell a wildcard does not
            match a leading dot.
    """

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave out a folder that it may not list

    wanted = pattern.split("/")
    anywhere = wanted[:-1] == ["**"] and wanted[-1] != "**"  # the usual form: only the last part of a path decides
    if anywhere:
        wanted = wanted[1:]
    found = []
    with reading(folder):
        for parent, folders, files in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
            relative = os.path.relpath(parent, folder)
            parts = [] if anywhere or relative == os.curdir else relative.split(os.sep)
            found += [os.path.join(parent, name) for name in files if _matches([*parts, name], wanted)]
    return sorted(found)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def text_request(tokenizer: TextTokenizer) -> dict[str, str]:
    """Return what decides the lengths of text files besides their sizes."""
    return {"kind": "text", "tokenizer": repr(tokenizer)}


def index_text_files(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    *,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of text files: their sizes, and which of them are text.

    Files with a NUL in their first 8 KiB are binary and left out, and so is what is not a regular file; both are
    counted. Nothing but those 8 KiB is read.

    Columns beside those of the table: `lengths` and `files`, the row in the table, int64 [D].

    Raises:
        DataError: a file that cannot be opened.
    """
    regular = np.flatnonzero(table.sizes_bytes >= 0)
    paths = [files.root + files.names[file] for file in regular.tolist()]
    tasks = [(paths[first : first + FILES_PER_TASK],) for first in range(0, len(paths), FILES_PER_TASK)]
    flags = bytearray()
    with reading(files.root), Progress(f"indexing {files.name}", len(paths), "files", on_tick) as progress:
        for part in map_in_threads(sniff_text_files, tasks):
            flags += part
            progress.advance(len(part))
    kept = regular[np.frombuffer(flags, dtype=np.uint8) == 0]
    counts = {"binary files": len(regular) - len(kept), "special files": len(table) - len(regular)}
    return LengthIndex.build(
        request, counts, table.columns() | {"lengths": table.sizes_bytes[kept] + 1, "files": kept.astype(np.int64)}
    )


def index_tokenized_files(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    tokenizer: TextTokenizer,
    *,
    num_processes: int | None = None,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of text files whose lengths are tokens: all of them are read.

    Columns and what is left out: see `index_text_files`. Files that are not UTF-8 are counted.

    Args:
        num_processes: default: one for every 1 MiB, at most as many as there are CPUs.

    Raises:
        DataError: a file that cannot be read, or a tokenizer that cannot be loaded.
    """
    regular = np.flatnonzero(table.sizes_bytes >= 0)
    sizes_bytes = table.sizes_bytes[regular]
    paths = [files.root + files.names[file] for file in regular.tolist()]
    if num_processes is None:
        enough = int(sizes_bytes.sum()) // TOKENIZED_BYTES_PER_PROCESS
        num_processes = max(1, min(num_usable_cpus(), MAX_PROCESSES, enough))
    tasks = [(part, tokenizer) for part in chunks_of_files(paths, sizes_bytes)]
    lengths: list[int] = []
    num_replaced = 0
    with (
        reading(files.root),
        Progress(f"tokenizing {files.name}", len(paths), "files", on_tick) as progress,
        closing(map_in_processes(measure_text_files, tasks, num_processes, packages=True)) as results,
    ):
        try:
            for part in results:
                lengths += part.lengths
                num_replaced += part.num_replaced
                progress.advance(len(part.lengths))
        except ScanError as error:
            raise DataError(str(error)) from error
    found = np.array(lengths, dtype=np.int64)
    kept = regular[found >= 0]
    counts = {
        "binary files": len(regular) - len(kept),
        "special files": len(table) - len(regular),
        "files not UTF-8": num_replaced,
    }
    return LengthIndex.build(request, counts, table.columns() | {"lengths": found[found >= 0], "files": kept})


def chunks_of_files(paths: Sequence[str], sizes_bytes: NDArray[np.int64]) -> Iterator[list[str]]:
    """Yield the paths in pieces of about TOKENIZED_TASK_BYTES, which do not depend on the number of processes."""
    piece: list[str] = []
    piece_bytes = 0
    for path, size_bytes in zip(paths, sizes_bytes.tolist(), strict=True):
        piece.append(path)
        piece_bytes += size_bytes
        if piece_bytes >= TOKENIZED_TASK_BYTES or len(piece) >= FILES_PER_TASK:
            yield piece
            piece, piece_bytes = [], 0
    if piece:
        yield piece


class TextFiles:
    """One document per text file: its tokens and the end of document.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `index_text_files` or `index_tokenized_files`.

    Raises:
        DataError: a file that has changed since it was indexed; see `FileWatch`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, tokenizer: TextTokenizer) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._index = index
        table = FileTable.from_columns(index.columns)
        names = table.list_names()
        self._files = index.columns["files"]
        self._paths = [root + names[file] for file in self._files.tolist()]
        self._watch = FileWatch(table, self._files, self._paths)
        self._left_out = {
            "binary file": index.counts["binary files"],
            "special file": index.counts["special files"],
        }
        self._num_replaced = index.counts.get("files not UTF-8", 0)
        self.lengths = index.columns["lengths"]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a file; with ByteTokenizer only those bytes are read."""
        self._index.check_unchanged()
        path, num_tokens = self._paths[document], int(self.lengths[document]) - 1
        by_bytes = isinstance(self._tokenizer, ByteTokenizer)
        with reading(path), open(path, "rb", buffering=0) as file:
            self._watch.check(int(self._files[document]), path, os.fstat(file.fileno()))
            if by_bytes:
                file.seek(start)
                text = file.read(min(stop, num_tokens) - start)
            else:
                text = file.readall()
        tokens = self._tokenizer.encode(text)
        if not by_bytes:
            if len(tokens) != num_tokens:
                raise DataError(
                    f"{path} has {len(tokens)} tokens but had {num_tokens} when it was indexed: the data must not "
                    "change during a run; restart to index it again",
                    path=path,
                    indexed_tokens=num_tokens,
                    found_tokens=len(tokens),
                )
            tokens = tokens[start:stop]
        return np.append(tokens, self._tokenizer.eod) if stop > num_tokens else tokens

    def document_name(self, document: int) -> str:
        """Return the path of the file."""
        path: str = self._paths[document]
        return path

    def describe(self) -> str:
        """Return the number of text files and of those left out."""
        words = f"{self._name}: {count(len(self._paths), 'text file')}"
        for what, number in self._left_out.items():
            words += f", {count(number, what)} left out" if number else ""
        if self._num_replaced:
            words += f", {self._num_replaced} not UTF-8 and read with replacement characters"
        return words
