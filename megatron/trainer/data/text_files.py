"""Text files as documents: one byte is one token, so the size that the file system keeps is the length."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
SNIFFED_BYTES = 8192


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
    found = []
    with reading(folder):
        for parent, folders, files in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
            relative = os.path.relpath(parent, folder)
            parts = [] if relative == os.curdir else relative.split(os.sep)
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


class TextFiles:
    """One document per file: its bytes and the end of document.

    Files with a NUL in their first 8 KiB are binary and left out, and so is what is not a regular file; both are
    counted. Indexing asks the file system for the size and reads those 8 KiB, nothing else.

    Args:
        name: what to call all of them in messages.
        paths: in document order.

    Raises:
        DataError: a file that cannot be opened.
    """

    def __init__(self, name: str, paths: Sequence[str], tokenizer: ByteTokenizer) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._paths: list[str] = []
        self._num_binary = 0
        self._num_special = 0
        sizes_bytes = []
        for path in paths:
            with reading(path):
                status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    self._num_special += 1
                    continue
                with open(path, "rb", buffering=0) as file:
                    if b"\0" in file.read(SNIFFED_BYTES):
                        self._num_binary += 1
                        continue
            self._paths.append(path)
            sizes_bytes.append(status.st_size)
        self.lengths = np.array(sizes_bytes, dtype=np.int64) + 1

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
