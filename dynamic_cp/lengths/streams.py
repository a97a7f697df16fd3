"""Reads pipes: stdin, named pipes, `<(command)`. They can be read only once, and may never end."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

from dynamic_cp.errors import DataError

STDIN = "-"
FIRST_BYTE_S = 3.0
"""How long a pipe may be without anybody who writes to it: `gen > pipe &` needs a moment to start."""
_MAX_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
_LOOK_AGAIN_S = 0.02


def name_of(path: str | Path) -> str:
    """Return what to call `path` in messages."""
    return "stdin" if str(path) == STDIN else str(path)


def is_standard_input(path: str | Path) -> bool:
    """Return whether `path` is stdin or another open file descriptor, whose name says nothing of its content."""
    return str(path) == STDIN or str(path).startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))


def is_pipe(path: str | Path) -> bool:
    """Return whether `path` can be read once only."""
    return str(path) == STDIN or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def piped_bytes(path: str | Path) -> bytes | None:
    """Return all that comes out of a pipe or a device; None for a file, which has an end and can be read again.

    Args:
        path: '-' is stdin.

    Raises:
        DataError: nobody writes to it, it is a terminal, closed, or without an end in sight.
        OSError: it cannot be opened.
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise DataError("cannot read stdin: it is closed: pipe something into it, or name a file")
        if sys.stdin.isatty():
            raise DataError("stdin is a terminal: pipe something into it, or name a file")
        return _all(sys.stdin.fileno(), "stdin")
    if not is_pipe(path):
        return None
    mode = os.stat(path).st_mode
    # Opening a pipe would wait until somebody opens its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if os.isatty(descriptor):
            raise DataError(f"{path} is a terminal: pipe something into it, or name a file", path=path)
        first = _first(descriptor, path) if stat.S_ISFIFO(mode) else b""
        os.set_blocking(descriptor, True)
        return first + _all(descriptor, str(path))
    finally:
        os.close(descriptor)


def _first(descriptor: int, path: str | Path) -> bytes:
    """Return the first bytes of a pipe, none if somebody is about to write."""
    deadline_s = time.monotonic() + FIRST_BYTE_S
    while time.monotonic() < deadline_s:
        try:
            found = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""  # somebody has the other end open
        if found:
            return found
        time.sleep(_LOOK_AGAIN_S)  # nobody has it open, or it was closed without a word
    raise DataError(
        f"{path} is a pipe, and nobody writes to {path} for {FIRST_BYTE_S:g} s: start the writer first, or name a file",
        path=path,
    )


def _all(descriptor: int, name: str) -> bytes:
    parts, num_bytes = [], 0
    while part := os.read(descriptor, _CHUNK_BYTES):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_BYTES:
            what = "a device" if stat.S_ISCHR(os.fstat(descriptor).st_mode) else "a pipe"
            raise DataError(f"{name} is {what}, and no end of it is in sight: give a file", name=name)
    return b"".join(parts)
