"""The manifest of a checkpoint folder: sizes and hashes of its files, where the run was, and the manifest's own hash.

    {"schema_version": 2, "iteration": 10, "run": {...}, "files": {name: {"bytes": n, "xxh3_64": hash}, ...},
     "xxh3_64": hash of all bytes before this line}

A flipped bit in any file, this one included, is an error that names the file. Files are hashed by XXH3 with 64 bits
while they are written and before they are read, at 10 GB/s and more per core: a disk is slower. It finds damage, not
forgery.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dynamic_cp.errors import CheckpointError

ALGORITHM = "xxh3_64"
FileRecord = Mapping[str, Any]
"""{"bytes": size, ALGORITHM: hash} of a file."""
NUM_THREADS = 4
"""Files that a rank hashes at the same time; few, because the ranks of a node share its cores and disk."""
_CHUNK_BYTES = 4 << 20
_BESIDE_FROM_BYTES = 1 << 20
"""Smaller writes are hashed in place: a thread's hand-over takes longer."""


class HashedFile(io.BufferedWriter):
    """A new file that is hashed while it is written; large writes are hashed in a thread, in parallel with the disk."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(io.FileIO(path, "wb"), _CHUNK_BYTES)
        self._hash = xxhash.xxh3_64()
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
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
        """Return the descriptor after flushing, because megatron-core syncs it next."""
        self.flush()
        return super().fileno()

    def close(self) -> None:
        super().close()
        self._thread.shutdown()

    def record(self) -> FileRecord:
        return {"bytes": self._num_bytes, ALGORITHM: self._hash.hexdigest()}


def hash_file(path: Path) -> str:
    """Return the hash of a file; OSError if it cannot be read."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def hash_files(paths: Iterable[Path]) -> list[str]:
    """Return the hashes of files, in their order; OSError if one cannot be read."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(hash_file, paths))


NAME = "manifest.json"
SCHEMA_VERSION = 2
REMEDY = "resume from an older checkpoint by writing its iteration into latest_checkpointed_iteration.txt"
_OWN_HASH = f',\n "{ALGORITHM}": "'.encode()
_END = b'"\n}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint folder: `files` by path, and `run`, JSON values that a load needs."""

    iteration: int
    run: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    schema_version: int = SCHEMA_VERSION


def record_files(folder: Path, written: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Return the records of all files of `folder`; those without a record in `written` are hashed. OSError if one
    cannot be read, CheckpointError if one is missing or has another size than was written."""
    records: dict[str, FileRecord] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name, num_bytes = str(path.relative_to(folder)), path.stat().st_size
        records[name] = written[name] if name in written else {"bytes": num_bytes, ALGORITHM: hash_file(path)}
        if records[name]["bytes"] != num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes right after {records[name]['bytes']} were written: is the disk full or "
                "failing? Choose another --save"
            )
    if missing := sorted(set(written) - set(records)):
        raise CheckpointError(
            f"{folder / missing[0]} was written and is not there: do all ranks see the same folder? --save must be on "
            "storage that all nodes share"
        )
    return records


def encode(manifest: Manifest) -> bytes:
    content = {
        "schema_version": manifest.schema_version,
        "iteration": manifest.iteration,
        "run": manifest.run,
        "files": manifest.files,
    }
    body = json.dumps(content, indent=1).removesuffix("\n}").encode()
    return body + _OWN_HASH + xxhash.xxh3_64(body).hexdigest().encode() + _END


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; CheckpointError if it is missing, damaged, or of an unknown version."""
    path = folder / NAME
    try:
        text = path.read_bytes()
        content = json.loads(text)
        version = content["schema_version"]
        manifest = Manifest(
            iteration=content["iteration"], run=content["run"], files=content["files"], schema_version=version
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint, {NAME}: {type(error).__name__} {error}; {REMEDY}"
        ) from None
    body, _, own_hash = text.rpartition(_OWN_HASH)
    if own_hash != xxhash.xxh3_64(body).hexdigest().encode() + _END:
        raise _damaged(path)
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{folder} has schema version {version}, this program reads {SCHEMA_VERSION}: "
            "use the version of the program that wrote it"
        )
    return manifest


def verify_files(folder: Path, manifest: Manifest, *, share: int = 0, num_shares: int = 1) -> int:
    """Compare the files of this rank's share, one of `num_shares`, with the manifest; return the number of bytes read.
    CheckpointError, which names the file, if one is missing or differs in size or content."""
    largest_first = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    records = {folder / name: manifest.files[name] for name in largest_first[share::num_shares]}
    for path, record in records.items():
        if not path.is_file():
            raise CheckpointError(f"checkpoint file {path} is missing: {REMEDY}")
        num_bytes = path.stat().st_size
        if num_bytes != record["bytes"]:
            raise CheckpointError(
                f"checkpoint file {path} has {num_bytes} bytes, {record['bytes']} were written: {REMEDY}"
            )
    try:
        for path, found in zip(records, hash_files(records), strict=True):
            if found != records[path][ALGORITHM]:
                raise _damaged(path)
    except OSError as error:
        raise CheckpointError(f"checkpoint file {error.filename} cannot be read: {error.strerror}; {REMEDY}") from None
    return sum(record["bytes"] for record in records.values())


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"checkpoint file {path} has another content than was written: {REMEDY}")
