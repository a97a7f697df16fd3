"""Writes a file completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dynamic_cp.errors import InvalidInputError


def write_whole(path: str | Path, content: bytes) -> None:
    """Write `content` to `path`; on failure what was there before is untouched. A device or pipe is written to.

    Raises:
        InvalidInputError: the place cannot be written.
    """
    path = Path(path)
    partial = path if is_device(path) else partial_of(path)
    try:
        if partial.is_fifo():
            _write_pipe(path, content)
        else:
            partial.write_bytes(content)
        if partial != path:
            partial.replace(path)
    except OSError as error:
        if partial != path:
            partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def is_device(path: str | Path) -> bool:
    """Return whether `path` is there and no file, such as /dev/null: nothing may take its place."""
    return Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir()


def partial_of(path: str | Path) -> Path:
    """Return the file that becomes `path` once it is whole."""
    return Path(f"{path}.partial-{os.getpid()}")


def unwritable(path: str | Path, error: Exception) -> InvalidInputError:
    """Return what to raise for a place that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    return InvalidInputError(f"cannot write {path}: {reason}: choose a writable place")


def _write_pipe(path: Path, content: bytes) -> None:
    """Write to a named pipe; one that nobody reads is refused: opening it would block forever."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise InvalidInputError(
            f"cannot write {path}: it is a pipe that nobody reads: start its reader first"
        ) from error
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(content)
