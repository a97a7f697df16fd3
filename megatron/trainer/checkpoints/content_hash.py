"""Hashes of whole files: made while a file is written, compared before it is read.

XXH3 with 64 bits, at 10 GB/s and more per core: a disk takes longer. It finds damage, not forgery.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

ALGORITHM = "xxh3_64"
FileRecord = Mapping[str, Any]
"""{"bytes": size, ALGORITHM: hash} of a file."""
NUM_THREADS = 4
"""Files that a rank hashes at the same time: the ranks of a node share its cores and its disk."""
_CHUNK_BYTES = 4 << 20
_BESIDE_FROM_BYTES = 1 << 20
"""Smaller writes are hashed where they are made: handing them to a thread takes longer."""


class HashedFile(io.BufferedWriter):
    """A new file that is hashed as it is written, from beginning to end; large writes in a thread beside the disk.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(io.FileIO(path, "wb"), _CHUNK_BYTES)
        self._hash = xxhash.xxh3_64()
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """Write and hash `data`, bytes or a view of bytes."""
        self._num_bytes += len(data)
        if len(data) < _BESIDE_FROM_BYTES:
            self._hash.update(data)
            return super().write(data)
        hashed: Future[None] = self._thread.submit(self._hash.update, data)
        try:
            return super().write(data)
        finally:
            hashed.result()

    def fileno(self) -> int:
        """Return the descriptor, which is synced next: what is still buffered goes before."""
        self.flush()
        return super().fileno()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        super().close()
        self._thread.shutdown()

    def record(self) -> FileRecord:
        """Return size and hash of what was written."""
        return {"bytes": self._num_bytes, ALGORITHM: self._hash.hexdigest()}


def hash_file(path: Path) -> str:
    """Return the hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def hash_files(paths: Iterable[Path]) -> list[str]:
    """Return the hashes of files, in their order; several are read at a time.

    Raises:
        OSError: one cannot be read.
    """
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(hash_file, paths))
