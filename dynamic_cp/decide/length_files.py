"""Reads lists of sequence lengths from files, and from pipes (stdin, named pipes, `<(command)`), which can be read only
once and may never end."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.decide.length_formats import (
    NUMPY_MAGIC,
    PARQUET_MAGIC,
    IndexUnit,
    read_csv,
    read_idx,
    read_jsonl,
    read_npy,
    read_parquet,
    read_txt,
)
from dynamic_cp.errors import DataError, DynamicCPError, InvalidInputError
from dynamic_cp.lengths.file import LengthFile, is_number
from dynamic_cp.lengths.megatron_index import MAGIC as INDEX_MAGIC

STDIN = "-"
FIRST_BYTE_S = 3.0
"""How long a pipe may be without a writer: `gen > pipe &` needs a moment to start."""
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
    """Return all that comes out of a pipe or a device; None for a file, which has an end and can be read again. `path`:
    '-' is stdin. Raises DataError: nobody writes to it, it is a terminal, closed, or without an end in sight. Raises
    OSError: it cannot be opened."""
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
            raise DataError(f"{path} is a terminal: pipe something into it, or name a file")
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
        f"{path} is a pipe, and nobody writes to {path} for {FIRST_BYTE_S:g} s: start the writer first, or name a file"
    )


def _all(descriptor: int, name: str) -> bytes:
    parts, num_bytes = [], 0
    while part := os.read(descriptor, _CHUNK_BYTES):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_BYTES:
            what = "a device" if stat.S_ISCHR(os.fstat(descriptor).st_mode) else "a pipe"
            raise DataError(f"{name} is {what}, and no end of it is in sight: give a file")
    return b"".join(parts)


READERS: dict[str, Callable[[LengthFile], NDArray[np.int64]]] = {
    ".npy": read_npy,
    ".txt": read_txt,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".idx": read_idx,
}
"""Suffix -> reader of such a file."""


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """Return `read_length_array(path)` as a tuple of Python integers."""
    return tuple(read_length_array(path).tolist())


def read_length_array(path: str | Path, *, index_unit: IndexUnit = "document") -> NDArray[np.int64]:
    """Return the lengths (tokens, 1 .. 2**31 - 1) in `path`, int64 [samples], in file order.

    Args:
        path: `.npy`: a 1-D array of integers. `.txt`: integers between white space. `.csv`: a column with one of the
            names in `COLUMNS`, or a single column with or without a name. `.jsonl`: per line an integer, or an object
            with one of these names as a key, or with `input_ids`, of which those count that `attention_mask` does not
            hide. `.parquet`: a column of these names, or `input_ids` (needs pyarrow). `.idx`: the index of a Megatron
            data set; an end-of-document token counts only if it is stored, and documents without tokens are left out
            with a warning. The content of a pipe (`-` is stdin) is recognized.
        index_unit: what a sample of an `.idx` is: a document, or each of the sequences it was stored as.

    Raises:
        DataError: the file is unreadable, empty, of another kind, or holds something that is no length.
        InvalidInputError: `index_unit` is neither.
        UnsupportedFeatureError: a parquet file, and pyarrow is not installed.
    """
    if index_unit not in ("document", "sequence"):
        raise InvalidInputError(f"index_unit is {index_unit!r}: use 'document' or 'sequence'")
    name = name_of(path)
    try:
        file = LengthFile(path=Path(path), name=name, content=piped_bytes(path))
        kind = _kind_of(file)
        lengths = read_idx(file, index_unit) if kind == ".idx" else READERS[kind](file)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}: check the path") from error
    except ValueError as error:
        if isinstance(error, DynamicCPError):
            raise
        raise DataError(f"cannot read {name}: {error}: check the path") from error  # a NUL in its name
    if not lengths.size:
        raise DataError(f"{name} holds 0 lengths, at least 1 is needed: give a file with lengths")
    return lengths


def _kind_of(file: LengthFile) -> str:
    """Return the kind of a file: by its suffix, or of a pipe by its content."""
    kind = file.path.suffix.lower()
    if kind in READERS:
        return kind
    if file.content is None and not is_standard_input(file.path):
        file.path.stat()  # that it is not there is the first thing to say
        if file.path.is_dir():
            raise DataError(f"{file.name} is a folder: give a file of lengths in it")
        if kind in (".gz", ".bz2", ".xz", ".zst", ".zip"):
            raise DataError(f"{file.name} is compressed: unpack it first")
        ends = f"ends in {kind!r}" if kind else "has no ending that says what it is"
        raise DataError(f"{file.name} {ends}: give a {', '.join(READERS)} file of lengths")
    content = file.read()
    for kind, magic in ((".npy", NUMPY_MAGIC), (".idx", INDEX_MAGIC), (".parquet", PARQUET_MAGIC)):
        if content.startswith(magic):
            return kind
    first, _, rest = content.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    if first.startswith((b"{", b"[")):
        return ".jsonl"
    has_words = not all(is_number(word) for word in first.decode(errors="replace").split())
    return ".csv" if b"," in first or (has_words and rest.strip()) else ".txt"
