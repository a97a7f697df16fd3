"""Text files as documents: one byte is one token, so the size that the file system keeps is the length."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.file_table import FILES_PER_TASK, FileTable
from megatron.trainer.data.index_cache import DocumentFiles
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.scan import sniff_text_files
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer
from megatron.trainer.data.workers import map_in_threads

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


def text_request(tokenizer: ByteTokenizer) -> dict[str, str]:
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


class TextFiles:
    """One document per text file: its bytes and the end of document.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `index_text_files`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, tokenizer: ByteTokenizer) -> None:
        self._name = name
        self._tokenizer = tokenizer
        names = FileTable.from_columns(index.columns).list_names()
        self._paths = [root + names[file] for file in index.columns["files"].tolist()]
        self._num_binary, self._num_special = index.counts["binary files"], index.counts["special files"]
        self.lengths = index.columns["lengths"]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a file, reading only those bytes."""
        path, size_bytes = self._paths[document], int(self.lengths[document]) - 1
        with reading(path), open(path, "rb", buffering=0) as file:
            now_bytes = os.fstat(file.fileno()).st_size
            file.seek(start)
            text = file.read(min(stop, size_bytes) - start)
        if now_bytes != size_bytes:
            raise DataError(
                f"{path} has {now_bytes} bytes but had {size_bytes} when it was indexed: "
                "the data must not change during a run; start again to index it anew",
                path=path,
                indexed_bytes=size_bytes,
                found_bytes=now_bytes,
            )
        tokens = self._tokenizer.encode(text)
        return np.append(tokens, self._tokenizer.eod) if stop > size_bytes else tokens

    def document_name(self, document: int) -> str:
        """Return the path of the file."""
        return self._paths[document]

    def describe(self) -> str:
        """Return the number of text files and of those left out."""
        words = f"{self._name}: {count(len(self._paths), 'text file')}"
        if self._num_binary:
            words += f", {count(self._num_binary, 'binary file')} left out"
        if self._num_special:
            words += f", {count(self._num_special, 'special file')} left out"
        return words
