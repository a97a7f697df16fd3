"""Checkpoint folders on disk: a folder gets its name only when it is whole, and is verified before it is read.

    save_dir/latest_checkpointed_iteration.txt      the number of the newest checkpoint, replaced atomically
    save_dir/iter_0000010/                          written as iter_0000010.partial, renamed at the end
        manifest.json                               all others with their hashes, and the run's position

A crash leaves a .partial folder, which nothing reads and the next save removes. A checkpoint that is saved once more is
renamed to .old until the new one is in place; after a crash in between it is read from there. Called on one rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dynamic_cp.errors import CheckpointError, DynamicCPError
from megatron.trainer.checkpoints import manifest
from megatron.trainer.checkpoints.disk import explain_refused_write
from megatron.trainer.checkpoints.manifest import FileRecord, Manifest

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the tracker holds, and the folder's name, where weights were converted and not trained."""
_PARTIAL = ".partial"
_OLD = ".old"


def probe_writable(folder: str, flag: str = "--save", kind: type[DynamicCPError] = CheckpointError) -> None:
    """Create `folder`, the value of `flag`, and a file in it, and remove the file.

    Raises:
        DynamicCPError: of class `kind`: it cannot be written.
    """
    probe = Path(folder) / f".write_probe_{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"0")
        probe.unlink()
    except OSError as error:
        raise kind(
            f"{flag} {folder} cannot be written ({error.strerror}): choose another folder or change its permissions",
            folder=folder,
        ) from None


def begin(save_dir: str, iteration: int) -> Path:
    """Return a new empty folder for checkpoint `iteration`, after cleaning up what a crash left behind."""
    partial = Path(save_dir) / (_name(iteration) + _PARTIAL)
    with _reporting(partial):
        for old in partial.parent.glob(f"iter_*{_OLD}"):
            final = old.with_suffix("")
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)
        for leftover in partial.parent.glob(f"iter_*{_PARTIAL}"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    return partial


def commit(
    partial: Path, iteration: int, run: Mapping[str, Any], written: Mapping[str, FileRecord] | None = None
) -> Path:
    """Write the manifest of `partial`, give the folder its name and point the tracker at it.

    Args:
        run: JSON values to find again in the manifest.
        written: records of files that were hashed as they were written.
    """
    final = partial.with_name(_name(iteration))
    with _reporting(final):
        files = manifest.record_files(partial, written or {})
        _write_synced(partial / manifest.NAME, manifest.encode(Manifest(iteration=iteration, run=run, files=files)))
        old = final.with_name(final.name + _OLD)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        sync_folder(final.parent)
        tracker = final.parent / TRACKER
        _write_synced(tracker.with_suffix(_PARTIAL), f"{iteration}\n".encode())
        tracker.with_suffix(_PARTIAL).replace(tracker)
        sync_folder(final.parent)
        if old.exists():
            shutil.rmtree(old)
    return final


def latest(load_dir: str) -> Path | None:
    """Return the folder that the tracker of `load_dir` names; None when there is no tracker.

    Raises:
        CheckpointError: the tracker is unreadable or names a folder that is not there.
    """
    tracker = Path(load_dir) / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{tracker} cannot be read: {error}; write the iteration to resume from into it"
        ) from None
    if text == RELEASE:
        return Path(load_dir) / text
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, not an iteration: write the one to resume from into it")
    folder = Path(load_dir) / _name(int(text))
    if not folder.is_dir():
        old = folder.with_name(folder.name + _OLD)
        if old.is_dir():  # a crash between the two renames of a checkpoint that was being saved once more
            return old
        raise CheckpointError(
            f"{tracker} names iteration {text}, but {folder} is missing: write an iteration that exists into it"
        )
    return folder


@contextlib.contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be written ({explain_refused_write(str(error), path)}): free space or choose "
            "another --save"
        ) from None


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
