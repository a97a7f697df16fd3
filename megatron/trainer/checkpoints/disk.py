"""What a refused write means: the disk that is full, and how much room it has; the same error on every rank."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.agreement.verify import run_on_rank_zero

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
    """Return the error of a failed write below `folder`, headed by the space left on its disk.

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
    room = f"{bytes_in_words(usage.free)} of {bytes_in_words(usage.total)} are free"
    if usage.free < _FULL_BELOW * usage.total:
        return f"the disk of {folder} is full: {room}; {said}"
    return (
        f"on the disk of {folder} {room}: was it full for a moment, or is there a quota or a limit on the size of "
        f"files (ulimit -f)? {said}"
    )


@contextlib.contextmanager
def reporting(what: str, folder: str, verb: str, remedy: str) -> Iterator[None]:
    """Turn what torch and the file system refuse into a CheckpointError, the same on every rank.

    A CheckpointException is no Exception. It is raised on all ranks, with its reasons on rank 0 only. An OSError, or
    torch's RuntimeError for a full disk, that gets here is one rank's own: that rank says it, the others end as if it
    had died.
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
    """Return the nearest folder that is there."""
    return next((folder for folder in (path, *path.parents) if os.path.exists(folder)), Path())


def bytes_in_words(num_bytes: int) -> str:
    """Return a number of bytes in the unit that makes it short, such as 1.2 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
