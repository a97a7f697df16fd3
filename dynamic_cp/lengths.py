"""Reads lists of sequence lengths."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dynamic_cp.errors import DataError

_COLUMNS = ("seqlen", "length", "num_tokens")


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """Return the lengths (tokens, each >= 1) in `path`, in file order.

    Args:
        path: `.npy`: a 1-D array of integers; `.txt`: integers between white space; `.csv`: a column named seqlen,
            length or num_tokens, or a single column with or without a name.

    Raises:
        DataError: the file is unreadable, empty, of another kind, or holds something that is no length.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], Sequence[int | str]]] = {
        ".npy": _read_npy,
        ".txt": _read_txt,
        ".csv": _read_csv,
    }
    if path.suffix not in readers:
        raise DataError(f"{path} ends in {path.suffix!r}: give a {', '.join(readers)} file of lengths", path=path)
    try:
        entries = readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}: check the path", path=path) from error
    except (ValueError, EOFError, csv.Error) as error:
        raise DataError(f"{path} is no {path.suffix} file of lengths: {error}", path=path) from error
    if not entries:
        raise DataError(f"{path} holds 0 lengths, at least 1 is needed: give a file with lengths", path=path)
    lengths = []
    for number, entry in enumerate(entries, start=1):
        try:
            length = int(entry)
        except ValueError:
            raise DataError(f"{path}: entry {number} is {entry!r}, an integer is needed", path=path) from None
        if length < 1:
            raise DataError(f"{path}: entry {number} is {length}, a length is at least 1 token: drop it", path=path)
        lengths.append(length)
    return tuple(lengths)


def _read_npy(path: Path) -> list[int]:
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError("a 1-D array of integers is needed")
    return [int(value) for value in array]


def _read_txt(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split()


def _read_csv(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    if not rows:
        return []
    header = [cell.strip().lower() for cell in rows[0]]
    named = [index for index, cell in enumerate(header) if cell in _COLUMNS]
    if not named and len(header) > 1:
        raise ValueError(f"none of its {len(header)} columns is named {', '.join(_COLUMNS)}")
    column = named[0] if named else 0
    if any(len(row) <= column for row in rows):
        raise ValueError(f"a row has fewer than {column + 1} columns")
    # A single column may have any name; a number in the first row is data.
    has_header = bool(named) or not header[0].lstrip("-").isdigit()
    return [row[column].strip() for row in rows[has_header:]]
