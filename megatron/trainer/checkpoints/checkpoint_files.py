"""Checkpoint folders on disk: a folder gets its name only when it is complete.

    save_dir/.in_use                                one job at a time saves here (`SaveLock`)
    save_dir/latest_checkpointed_iteration.txt      the number of the newest checkpoint, replaced atomically
    save_dir/iter_0000010/                          written as iter_0000010.partial, renamed at the end
        manifest.json                               the other files with their hashes, and the run's position

A crash leaves a .partial folder, which is never read and which the next save removes. When a checkpoint is saved again,
the old folder is renamed to .old until the new one is in place; after a crash in between, .old is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.api import CheckpointException

from dynamic_cp.errors import CheckpointError, DynamicCPError
from megatron.dynamic_cp.agreement.verify import job_store, run_on_rank_zero
from megatron.trainer.checkpoints import manifest
from megatron.trainer.checkpoints.manifest import FileRecord, Manifest

logger = logging.getLogger(__name__)

_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|unexpected pos \d+ vs \d+|file write failed|"
    r"iostream error"
)
# torch's file writer found the file shorter than what it wrote; the text begins with a place in torch's sources.
_OF_TORCH = re.compile(r"\[enforce fail at \S+:\d+\] \. (unexpected pos \d+ vs \d+)")
_FULL_BELOW = 0.01
"""Share of a disk. With less free space the disk is called full: the piece that did not fit may have been larger."""


def is_refused_write(error: Exception) -> bool:
    """Return whether `error` says that there was no room for a file. torch raises RuntimeErrors for that."""
    return _NO_ROOM.search(str(error)) is not None


def explain_refused_write(said: str, folder: str | Path) -> str:
    """Return `said`, the error of a write below `folder`, in one line; if there was no room, with the free space."""
    said = " ".join(said.split())
    if not _NO_ROOM.search(said):
        return said
    said = _OF_TORCH.sub(r"a file was cut short (\1)", said)
    try:
        usage = shutil.disk_usage(_existing(Path(folder)))
    except OSError:
        return said
    room = f"{bytes_in_words(usage.free)} of {bytes_in_words(usage.total)} are free"
    if usage.free < _FULL_BELOW * usage.total:
        return f"the disk of {folder} is full: {room}; {said}"
    return (
        f"on the disk of {folder} {room}: was it full for a moment, or is there a quota or a limit on the size of "
        f"files (ulimit -f)? {said}"
    )


@contextlib.contextmanager
def reporting(what: str, folder: str, verb: str, remedy: str) -> Iterator[None]:
    """Raise what torch and the file system refuse as a CheckpointError.

    megatron-core raises CheckpointException, which is no Exception, on all ranks, with its reasons on rank 0 only. An
    OSError, or torch's RuntimeError for a full disk, is one rank's own: it reports it, and the others end as if it had
    died.
    """
    flag = what.split()[0]
    try:
        yield
    except CheckpointException as error:
        causes = {rank: str(cause) for rank, (cause, _) in sorted(error.failures.items())}
        same = set(causes.values()) if len(causes) > 1 else set()
        own = same.pop() if len(same) == 1 else "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        reasons = run_on_rank_zero(lambda: explain_refused_write(own, folder))
        raise CheckpointError(f"{what} cannot be {verb} ({reasons}): {remedy} {flag}") from None
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_refused_write(error):
            raise
        reason = explain_refused_write(str(error), folder)
        raise CheckpointError(f"{what} cannot be {verb} ({reason}): {remedy} {flag}") from None


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if os.path.exists(folder)), Path())


def bytes_in_words(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Content of the tracker and name of the folder for converted weights, which were never trained here."""
_PARTIAL = ".partial"
_OLD = ".old"


def probe_writable(folder: str, flag: str = "--save", kind: type[DynamicCPError] = CheckpointError) -> None:
    """Check that `folder`, the value of `flag`, can be created and written; raise `kind`, a DynamicCPError, if not."""
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
    """Write the manifest with `run`, JSON values, rename `partial` to its final name and point the tracker at it. Files
    that are not in `written`, records of files hashed while they were written, are read and hashed."""
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
    """Return the folder that the tracker names, None without a tracker; CheckpointError if one of them is unusable."""
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
        if old.is_dir():  # a crash between the two renames of a repeated save
            return old
        raise CheckpointError(
            f"{tracker} names iteration {text}, but {folder} is missing: write an iteration that exists into it"
        )
    return folder


@contextlib.contextmanager
def _reporting(path: Path) -> Iterator[None]:
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


NAME = ".in_use"
WAIT_S = 120.0
_LOOK_UP_S = 0.2


class SaveLock:
    """Holds the lock of a writable folder on rank 0; CheckpointError on all ranks if another job has it. Collective."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / NAME
        self._file: IO[str] | None = None
        run_on_rank_zero(lambda: self._take(folder))

    def close(self) -> None:
        """Release the lock and remove its file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone would leave it to processes forked meanwhile
            self._file.close()
            self._file = None

    def _take(self, folder: str) -> None:
        wait_s = min(WAIT_S, job_store().timeout.total_seconds() / 2)  # the other ranks wait that long
        began_s = time.monotonic()
        waits = False
        while (holder := self._try()) is not None:
            if time.monotonic() - began_s > wait_s:
                raise CheckpointError(
                    f"--save {folder}: another job saves there ({holder}), and did not end within {wait_s:g} s: end "
                    "it, or choose another --save"
                )
            if not waits:
                logger.info("--save %s: another job saves there (%s): waiting %g s for its end", folder, holder, wait_s)
                waits = True
            time.sleep(_LOOK_UP_S)

    def _try(self) -> str | None:
        """Take the lock; return a description of the other job if one has it."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    file.truncate(0)
                    file.write(_describe_this_job())
                    file.flush()
                    self._file = file
                    return None
            holder: str | None = "it is just ending"  # the lock's file was removed after it was opened
        except (BlockingIOError, PermissionError):  # NFS may raise either
            file.seek(0)
            holder = file.read(200) or "it has not said who it is"
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): see to it that no other job saves there", self._path, error.strerror
            )
            holder = None
        file.close()
        return holder


def _describe_this_job() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    words = [*([f"SLURM job {job}"] if job else []), f"process {os.getpid()} on {os.uname().nodename}"]
    return ", ".join([*words, f"since {time.strftime('%Y-%m-%d %H:%M:%S')}"])
