"""Output files: refused before the work if they cannot be written; complete or absent after it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dynamic_cp import __version__
from dynamic_cp.errors import InvalidInputError


def write_whole(path: str | Path, content: bytes) -> None:
    """Write `content` to `path`, a file, device or pipe; what was there stays where that raises InvalidInputError."""
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


STDOUT = "-"


def check_suffix(path: str, what: str, suffixes: Sequence[str]) -> None:
    """Refuse an --output whose name says that it is something else than, say, "a report"."""
    if not path.lower().endswith(tuple(suffixes)):
        has = repr(Path(path).suffix) if Path(path).suffix else "nothing"
        raise InvalidInputError(f"--output {path} ends in {has}, {what} is {' or '.join(suffixes)}: rename it")


def check_writable(path: str | None, *, only_files: bool = False) -> None:
    """Refuse a path that cannot be written to; nothing is left there. None is nothing to write.

    Args:
        only_files: refuse stdout ('-') and devices, too.
    """
    if path is None:
        return
    if not path:
        raise InvalidInputError("cannot write to a file without a name: give one")
    if path == STDOUT or is_device(path):
        if only_files:
            raise InvalidInputError(f"cannot write {path}: it is not a file: give the name of one")
        return
    if Path(path).is_dir():
        raise InvalidInputError(f"cannot write {path}: it is a folder: give the name of a file in it")
    partial = partial_of(path)
    try:
        partial.touch()
        partial.unlink()
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


def check_apart(**paths: str | None) -> None:
    """Refuse options (without their dashes) whose paths are one place: the second would replace or follow the first."""
    options: dict[str, str] = {}
    for option, path in paths.items():
        if path is None or (path != STDOUT and is_device(path)):
            continue
        place = path if path == STDOUT else os.path.realpath(path)
        if place in options:
            raise InvalidInputError(f"--{options[place]} and --{option} are both {path}: give each its own place")
        options[place] = option


def write_text(path: str, text: str) -> None:
    """Write `text` to `path` whole or not at all; '-' is stdout; InvalidInputError: it cannot be written."""
    if path == STDOUT:
        click.echo(text, nl=False)
    else:
        write_whole(path, text.encode())


def write_json(path: str, data: Any) -> None:
    """Write `data` as indented JSON, numbers in full; '-' is stdout. Beside a schema_version goes the version."""
    if isinstance(data, dict) and "schema_version" in data:
        data = {"schema_version": data["schema_version"], "version": __version__, **data}
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
