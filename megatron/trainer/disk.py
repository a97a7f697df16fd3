"""What a refused write means: the disk that is full, and how much room it has."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|unexpected pos \d+ vs \d+|file write failed|"
    r"iostream error"
)
# torch's writer of a file finds it shorter than what it wrote, and says where in its own sources that is.
_OF_TORCH = re.compile(r"\[enforce fail at \S+:\d+\] \. (unexpected pos \d+ vs \d+)")
_FULL_BELOW = 0.01
"""Part of a disk; with less free it is called full: the piece that did not fit may have been a large one."""


def is_refused_write(error: Exception) -> bool:
    """Return whether `error` says that there was no room for a file; torch raises RuntimeErrors for that."""
    return _NO_ROOM.search(str(error)) is not None


def explain_refused_write(said: str, folder: str | Path) -> str:
    """Return what was said when files below `folder` could not be written, headed by the room that its disk has.

    Returns what was said as one line when it is about something else.

    Args:
        said: by the file system or torch, of one rank or of several.
    """
    said = " ".join(said.split())
    if not _NO_ROOM.search(said):
        return said
    said = _OF_TORCH.sub(r"a file was cut short (\1)", said)
    try:
        usage = shutil.disk_usage(_existing(Path(folder)))
    except OSError:
        return said
    room = f"{_in_words(usage.free)} of {_in_words(usage.total)} are free"
    if usage.free < _FULL_BELOW * usage.total:
        return f"the disk of {folder} is full: {room}; {said}"
    return (
        f"on the disk of {folder} {room}: was it full for a moment, or is there a quota or a limit on the size of "
        f"files (ulimit -f)? {said}"
    )


def _existing(path: Path) -> Path:
    """Return the nearest folder that is there."""
    return next((folder for folder in (path, *path.parents) if os.path.exists(folder)), Path())


def _in_words(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
