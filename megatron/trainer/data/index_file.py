"""The file of an index: the tokens of a data set, and arrays that locate the documents, mapped into memory.

    at 0     MAGIC, whose last byte is the version; then position, size and CRC-32 of the header (little endian)
    at 64    the columns, each at a multiple of 64 bytes, the tokens first
    at end   the header, JSON: request, counts, and name, dtype, length, position and CRC-32 of every column

Damage is noticed before anything is used. That of tokens, which a start does not read through, only shows in the size.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError

VERSION = 2
MAGIC = b"dcp-len" + bytes([VERSION])
ALIGNMENT_BYTES = 64
PRELUDE = struct.Struct("<8sQQI36x")  # 64 bytes
FORGOTTEN_AFTER_S = 3600.0
_KEPT_S = {"tmp": FORGOTTEN_AFTER_S, "old": 30 * 24 * 3600.0}
"""Suffix -> seconds after which a file is removed: one left half written, and one put aside for jobs that map it."""
SYNCED_BYTES = 256 << 20
TOKENS = "tokens"


class IndexFileError(DataError):
    """An index file that cannot be used; the data can be indexed again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataIndex:
    """The result of indexing a data set.

    Attributes:
        request: the kind of data, the text field, the tokenizer.
        counts: of what was left out.
        columns: 1-D arrays, mapped from `path`.
        digest: a hash (hex) of everything.
        mapped: uint8, the whole file.
        signs: inode, bytes and time of that file when it was loaded.
    """

    request: Mapping[str, str]
    counts: Mapping[str, int]
    columns: Mapping[str, NDArray[Any]]
    digest: str
    path: str
    mapped: NDArray[np.uint8]
    signs: tuple[int, int, int]

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.digest)

    @property
    def size_bytes(self) -> int:
        return self.signs[1]

    def check_unchanged(self) -> None:
        """Raise DataError if the file was written since it was loaded; call it before the columns are used.

        Writes show in mapped columns at once, and reading past a new end kills the process. If the file was replaced or
        removed, those who mapped it keep the old content.
        """
        with suppress(OSError):
            number, size_bytes, _ = found = _signs(os.stat(self.path))
            if number == self.signs[0] and found != self.signs:
                how = (
                    f"has {size_bytes} bytes and had {self.signs[1]}"
                    if size_bytes != self.signs[1]
                    else f"was written again (it has {size_bytes} bytes as before, and another time)"
                )
                raise DataError(
                    f"{self.path}, the index of the data, {how} when this run began: nothing may write it "
                    "during a run; restart, and the data are indexed again"
                )


def _reopened(path: str, digest: str) -> DataIndex:
    index = load_index(path)
    if index.digest != digest:
        raise DataError(f"{path}, the index of the data, is another one than when this run began: restart")
    return index


@contextmanager
def written_whole(path: str) -> Iterator[Any]:
    """Yield a file for an index that is renamed to `path` after the block, so that nobody sees half of it.

    If `path` has an equal index already, that stays: another job may have mapped it, and on NFS the pages of a removed
    file vanish. For the same reason a different index is renamed and kept for a while. OSError if the file cannot be
    written (nothing remains), IndexFileError if it reads back differently.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    _remove_forgotten(path)
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"  # hosts in containers may share names and process ids
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        digest = load_index(temporary).digest
        with suppress(OSError, IndexFileError):
            if load_index(path).digest == digest:
                return
            aside = f"{path}.{secrets.token_hex(8)}.old"
            os.rename(path, aside)
            os.utime(aside)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    with suppress(OSError):  # not every file system supports it; the file itself is safe
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_through(file: Any, raw: NDArray[np.uint8]) -> None:
    """Write more of a large file and sync it now and then, because one fsync at the end would take too long."""
    before = file.tell()
    file.write(raw)
    if before // SYNCED_BYTES != file.tell() // SYNCED_BYTES:
        file.flush()
        os.fsync(file.fileno())


class IndexWriter:
    """Writes an index to a file of `written_whole`: tokens as they come, then the rest."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._tokens = np.dtype(np.uint16).str, 0, 0
        file.write(bytes(PRELUDE.size))

    def append(self, tokens: NDArray[Any]) -> None:
        raw = _bytes_of(tokens)
        write_through(self._file, raw)
        _, length, crc32 = self._tokens
        self._tokens = tokens.dtype.str, length + len(tokens), zlib.crc32(raw, crc32)

    def finish(
        self, request: Mapping[str, str], counts: Mapping[str, int], columns: Mapping[str, NDArray[Any]]
    ) -> None:
        dtype, length, crc32 = self._tokens
        described = [self._describe(TOKENS, dtype, length, crc32, ALIGNMENT_BYTES)]
        self._pad()
        for name, column in columns.items():
            raw, position = _bytes_of(column), self._file.tell()
            self._file.write(raw)
            described.append(self._describe(name, column.dtype.str, len(column), zlib.crc32(raw), position))
            self._pad()
        header = json.dumps({"request": request, "counts": counts, "columns": described}).encode()
        prelude = PRELUDE.pack(MAGIC, self._file.tell(), len(header), zlib.crc32(header))
        self._file.write(header)
        self._file.seek(0)
        self._file.write(prelude)

    def _describe(self, name: str, dtype: str, length: int, crc32: int, position: int) -> dict[str, Any]:
        padding = _padding(length * np.dtype(dtype).itemsize)
        return {
            "name": name,
            "dtype": dtype,
            "length": length,
            "position": position,
            "crc32": zlib.crc32(padding, crc32),
        }

    def _pad(self) -> None:
        self._file.write(_padding(self._file.tell()))


def load_index(path: str) -> DataIndex:
    """Return the index in `path`, mapped; everything but the tokens is read once for its checksums. OSError if it
    cannot be read, IndexFileError if it is no index, of another version, truncated or corrupt."""
    with open(path, "rb") as file:
        signs = _signs(os.fstat(file.fileno()))
        size_bytes = signs[1]
        prelude = file.read(PRELUDE.size).ljust(PRELUDE.size, b"\0")
        magic, position, header_bytes, crc32 = PRELUDE.unpack(prelude)
        if magic[:-1] != MAGIC[:-1]:
            raise IndexFileError(f"it is no index: it begins with {magic!r}, not {MAGIC!r}", path=path)
        if magic != MAGIC:
            raise IndexFileError(f"it has version {magic[-1]}, this program reads {VERSION}", path=path)
        if prelude != PRELUDE.pack(magic, position, header_bytes, crc32):
            raise IndexFileError(f"its first {PRELUDE.size} bytes hold {prelude!r}", path=path)
        if size_bytes != position + header_bytes:
            raise IndexFileError(f"it has {size_bytes} bytes and should have {position + header_bytes}", path=path)
        file.seek(position)
        header = file.read(header_bytes)
        if zlib.crc32(header) != crc32:
            raise IndexFileError(f"its header has checksum {zlib.crc32(header):#x}, not {crc32:#x}", path=path)
        mapped = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    parsed = json.loads(header)
    columns = {column["name"]: _column(path, mapped, **column) for column in parsed["columns"]}
    return DataIndex(
        request=parsed["request"],
        counts=parsed["counts"],
        columns=columns,
        digest=hashlib.sha256(header).hexdigest(),
        path=path,
        mapped=mapped,
        signs=signs,
    )


def _column(
    path: str, mapped: NDArray[np.uint8], *, name: str, dtype: str, length: int, position: int, crc32: int
) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in "iu":
        raise IndexFileError(f"column {name} has type {kind}, integers are needed", path=path)
    num_bytes = length * kind.itemsize
    raw = mapped[position:][: num_bytes + len(_padding(num_bytes))]
    if name != TOKENS and zlib.crc32(raw) != crc32:
        raise IndexFileError(f"column {name} has checksum {zlib.crc32(raw):#x}, not {crc32:#x}", path=path)
    return raw[:num_bytes].view(kind)


def _signs(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _bytes_of(column: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(column).view(np.uint8)


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % ALIGNMENT_BYTES)


def _remove_forgotten(path: str) -> None:
    """Remove files that killed processes left while they wrote `path`, and what was put aside long ago."""
    folder, name = os.path.split(path)
    for entry in os.scandir(folder):
        ending = entry.name.rpartition(".")[2]
        with suppress(OSError):
            if entry.name.startswith(name) and time.time() - entry.stat().st_mtime > _KEPT_S.get(ending, math.inf):
                os.unlink(entry.path)
