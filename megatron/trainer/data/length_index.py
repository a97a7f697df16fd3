"""The file of an index: arrays and their names, mapped into memory where they are used.

    at 0     MAGIC, of which the last byte is the version; then position, size and CRC-32 of the header (little endian)
    at 64    the columns, each at a multiple of 64 bytes
    at end   the header, JSON: request, counts, and name, dtype, length, position and CRC-32 of every column

Damage is noticed before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError

VERSION = 1
MAGIC = b"dcp-len" + bytes([VERSION])
ALIGNMENT_BYTES = 64
PRELUDE = struct.Struct("<8sQQI36x")  # 64 bytes
FORGOTTEN_AFTER_S = 3600.0


class IndexFileError(DataError):
    """An index file that cannot be used; the data can be indexed again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthIndex:
    """What indexing a data set found. Pickles as its contents.

    Attributes:
        request: what was asked for: the kind of data, the text field, the tokenizer.
        counts: what was left out.
        columns: 1-D arrays.
        header: all about them as in the file; two indexes with the same header are the same.
        path: the file that the columns are mapped from; None: they are in this process's memory only.
        signs: number, bytes and time of that file when it was loaded.
    """

    request: Mapping[str, str]
    counts: Mapping[str, int]
    columns: Mapping[str, NDArray[Any]]
    header: bytes
    path: str | None = None
    signs: tuple[int, int, int] | None = None

    @classmethod
    def build(
        cls, request: Mapping[str, str], counts: Mapping[str, int], columns: Mapping[str, NDArray[Any]]
    ) -> LengthIndex:
        """Return an index in memory."""
        described = []
        position = ALIGNMENT_BYTES
        for name, column in columns.items():
            crc32 = zlib.crc32(_padding(column.nbytes), zlib.crc32(_bytes_of(column)))
            described.append(
                {"name": name, "dtype": column.dtype.str, "length": len(column), "position": position, "crc32": crc32}
            )
            position += column.nbytes + len(_padding(column.nbytes))
        header = json.dumps({"request": request, "counts": counts, "columns": described}).encode()
        return cls(request=request, counts=counts, columns=columns, header=header)

    @classmethod
    def from_header(cls, header: bytes, columns: Mapping[str, NDArray[Any]]) -> LengthIndex:
        """Return the index with this header; `columns` must be the ones that it describes."""
        parsed = json.loads(header)
        return cls(request=parsed["request"], counts=parsed["counts"], columns=columns, header=header)

    @property
    def digest(self) -> str:
        """A hash (hex) of all of it."""
        return hashlib.sha256(self.header).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of the columns."""
        return sum(column.nbytes for column in self.columns.values())

    def check_unchanged(self) -> None:
        """Raise DataError when the file was written since it was loaded; to be asked before the columns are used.

        What was written shows in them at once, and reading behind a new end kills the process. A file that was replaced
        or removed stays as it was for those who have mapped it.
        """
        if self.path is None or self.signs is None:
            return
        with suppress(OSError):
            number, size_bytes, _ = found = _signs(os.stat(self.path))
            if number == self.signs[0] and found != self.signs:
                how = (
                    f"has {size_bytes} bytes and had {self.signs[1]}"
                    if size_bytes != self.signs[1]
                    else f"was written again (it has {size_bytes} bytes as before, and another time)"
                )
                raise DataError(
                    f"{self.path}, the length index of the data, {how} when this run began: nothing may write it "
                    "during a run; restart, and the data are indexed again"
                )

    def save(self, path: str) -> LengthIndex:
        """Write to `path` in one step, so that it always holds an old, a new or no index; return the mapped one.

        An equal index that is there already stays: another job may have mapped it, and the pages of a file that is
        replaced on NFS can vanish under it.

        Raises:
            OSError: it cannot be written; nothing of it stays.
            IndexFileError: it reads back otherwise than it was written.
        """
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError, IndexFileError):
            there = load_index(path)
            if there.digest == self.digest:
                return there
        _remove_forgotten(path)
        temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                self._write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        with suppress(OSError):  # not every file system knows it; the file itself is safe
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return load_index(path)

    def _write(self, file: Any) -> None:
        file.write(bytes(PRELUDE.size))
        for column in self.columns.values():
            file.write(_bytes_of(column))
            file.write(_padding(column.nbytes))
        prelude = PRELUDE.pack(MAGIC, file.tell(), len(self.header), zlib.crc32(self.header))
        file.write(self.header)
        file.seek(0)
        file.write(prelude)


def load_index(path: str) -> LengthIndex:
    """Return the index in `path`, mapped; reads all of it once, for its checksums.

    Raises:
        OSError: it cannot be read.
        IndexFileError: no index, one of another version, or one that is truncated or corrupt.
    """
    with open(path, "rb") as file:
        signs = _signs(os.fstat(file.fileno()))
        size_bytes = signs[1]
        prelude = file.read(PRELUDE.size).ljust(PRELUDE.size, b"\0")
        magic, position, header_bytes, crc32 = PRELUDE.unpack(prelude)
        if magic[:-1] != MAGIC[:-1]:
            raise IndexFileError(f"it is not a length index: it begins with {magic!r}, not {MAGIC!r}", path=path)
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
    columns = {}
    for column in json.loads(header)["columns"]:
        dtype = np.dtype(column["dtype"])
        if dtype.kind not in "iu":
            raise IndexFileError(f"column {column['name']} has type {dtype}, integers are needed", path=path)
        num_bytes = column["length"] * dtype.itemsize
        raw = mapped[column["position"] :][: num_bytes + len(_padding(num_bytes))]
        if zlib.crc32(raw) != column["crc32"]:
            raise IndexFileError(
                f"column {column['name']} has checksum {zlib.crc32(raw):#x}, not {column['crc32']:#x}", path=path
            )
        columns[column["name"]] = raw[:num_bytes].view(dtype)
    return replace(LengthIndex.from_header(header, columns), path=path, signs=signs)


def _signs(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _bytes_of(column: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(column).view(np.uint8)


def _padding(num_bytes: int) -> bytes:
    """Return what follows a column of `num_bytes`."""
    return bytes(-num_bytes % ALIGNMENT_BYTES)


def _remove_forgotten(path: str) -> None:
    """Remove what processes that were killed while they wrote `path` left behind."""
    folder, name = os.path.split(path)
    for entry in os.scandir(folder):
        with suppress(OSError):
            is_old = time.time() - entry.stat().st_mtime > FORGOTTEN_AFTER_S
            if entry.name.startswith(name) and entry.name.endswith(".tmp") and is_old:
                os.unlink(entry.path)
