"""Writes a file completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from dynamic_cp.errors import InvalidInputError


def write_whole(path: str | Path, content: bytes) -> None:
    """Write `content` to `path`; on failure what was there before is untouched.

    Raises:
        InvalidInputError: the place cannot be written.
    """
    partial = Path(f"{path}.partial-{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}: choose a writable place") from error
