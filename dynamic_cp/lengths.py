"""Reads lists of sequence lengths from the files people have: arrays, tables, text and Megatron's own index."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.megatron_index import read_megatron_index

logger = logging.getLogger(__name__)

COLUMNS = ("seqlen", "seq_len", "sequence_length", "length", "num_tokens", "n_tokens", "token_count")
MAX_LENGTH = 2**31 - 1
"""The int32 `cu_seqlens` of the attention kernels count no further."""

IndexUnit = Literal["document", "sequence"]

_Entries = Iterable[tuple[str, object]]
"""(where in the file, value); the value still has to be shown to be a length."""


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """Return `read_length_array(path)` as a tuple of Python integers."""
    return tuple(read_length_array(path).tolist())


def read_length_array(path: str | Path, *, index_unit: IndexUnit = "document") -> NDArray[np.int64]:
    """Return the lengths (tokens, 1 .. 2**31 - 1) in `path`, int64 [samples], in file order.

    Args:
        path: `.npy`: a 1-D array of integers. `.txt`: integers between white space. `.csv`: a column with one of the
            names in `COLUMNS`, or a single column with or without a name. `.jsonl`: per line an integer, or an object
            with one of these names as a key. `.idx`: the index of a Megatron data set; lengths as stored, with an
            end-of-document token only where the data holds one. Documents without tokens are left out with a warning.
        index_unit: what a sample of an `.idx` is: a document, or each of the sequences it was stored as.

    Raises:
        DataError: the file is unreadable, empty, of another kind, or holds something that is no length.
        InvalidInputError: `index_unit` is neither.
    """
    path = Path(path)
    if index_unit not in ("document", "sequence"):
        raise InvalidInputError(f"index_unit is {index_unit!r}: use 'document' or 'sequence'", index_unit=index_unit)
    readers: dict[str, Callable[[Path], NDArray[np.int64]]] = {
        ".npy": _read_npy,
        ".txt": lambda path: _to_array(path, _read_txt(path)),
        ".csv": lambda path: _to_array(path, _read_csv(path)),
        ".jsonl": lambda path: _to_array(path, _read_jsonl(path)),
        ".idx": lambda path: _read_idx(path, index_unit),
    }
    kind = path.suffix.lower()
    if kind not in readers:
        raise DataError(f"{path} ends in {path.suffix!r}: give a {', '.join(readers)} file of lengths", path=path)
    try:
        lengths = readers[kind](path)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}: check the path", path=path) from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path} is no {kind} file of lengths: {error}", path=path) from error
    if not lengths.size:
        raise DataError(f"{path} holds 0 lengths, at least 1 is needed: give a file with lengths", path=path)
    return lengths


def _to_array(path: Path, entries: _Entries) -> NDArray[np.int64]:
    return np.fromiter((_length(path, where, value) for where, value in entries), dtype=np.int64)


def _length(path: Path, where: str, value: object) -> int:
    length: Any = value
    if isinstance(value, str):
        try:
            length = int(value)
        except ValueError:
            length = None
    if isinstance(length, bool) or not isinstance(length, int):
        raise DataError(
            f"{path}: {where} is {_shortened(value)}, an integer is needed: write tokens as a whole number", path=path
        )
    if length < 1:
        raise DataError(f"{path}: {where} is {_shortened(length)}, a length is at least 1 token: drop it", path=path)
    if length > MAX_LENGTH:
        raise DataError(
            f"{path}: {where} is {_shortened(value)}, a length is at most {MAX_LENGTH} tokens: split or drop it",
            path=path,
        )
    return length


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists nested as deep
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _read_npy(path: Path) -> NDArray[np.int64]:
    try:
        # Not numpy.load: that would also open .npz and pickles. Mapped, a huge file is read once and only here.
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError):
        raise
    except Exception as error:  # the header is Python source: numpy lets errors of its parser and sizes through
        raise ValueError(f"its header is damaged ({error})") from error
    if array.dtype.kind not in "iu":
        remedy = "save whole tokens with .astype(numpy.int64)"
        if array.dtype.kind == "f" and np.isnan(array).any():
            number = int(np.isnan(array.ravel()).argmax()) + 1
            remedy = f"drop entry {number}, which is nan, and {remedy}"
        raise ValueError(f"it holds {array.dtype}, integers are needed: {remedy}")
    if array.ndim != 1:
        raise ValueError(f"its shape is {array.shape}, one dimension is needed: save array.ravel()")
    wrong = (array < 1) | (array > MAX_LENGTH)
    if wrong.any():
        entry = int(wrong.argmax())
        _length(path, f"entry {entry + 1}", int(array[entry]))
    return array.astype(np.int64)


def _read_idx(path: Path, unit: IndexUnit) -> NDArray[np.int64]:
    index = read_megatron_index(path)
    tokens = index.document_tokens if unit == "document" else index.sequence_tokens
    lengths: NDArray[np.int64] = tokens[tokens > 0].astype(np.int64)
    if len(lengths) < len(tokens):
        logger.warning("%s: %d of %d %ss hold no tokens, left out", path, len(tokens) - len(lengths), len(tokens), unit)
    if lengths.size and int(lengths.max()) > MAX_LENGTH:
        entry = int((tokens > MAX_LENGTH).argmax())
        _length(path, f"{unit} {entry}", int(tokens[entry]))
    return lengths


def _read_txt(path: Path) -> _Entries:
    words = path.read_text(encoding="utf-8-sig").split()
    return ((f"entry {number}", word) for number, word in enumerate(words, start=1))


def _read_jsonl(path: Path) -> _Entries:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}: line {number} is not JSON ({error}): give one integer or object per line", path=path
                ) from error
            if isinstance(value, dict):
                key = _column(path, f"line {number}", "key", list(value))
                yield f"line {number}, key {key!r},", value[key]
            else:
                yield f"line {number}", value


def _read_csv(path: Path) -> _Entries:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    if not rows:
        return
    header = [cell.strip().lower() for cell in rows[0]]
    has_names = bool(set(header) & set(COLUMNS))
    column = header.index(_column(path, "its header", "column", header)) if has_names or len(header) > 1 else 0
    # A single column may have any name; a number in the first row is data, even a wrong one.
    has_header = has_names or not _is_number(header[0])
    for number, row in enumerate(rows[has_header:], start=1):
        if len(row) <= column:
            raise DataError(
                f"{path}: entry {number} has {len(row)} columns, fewer than {column + 1} columns: fill or drop the row",
                path=path,
            )
        yield f"entry {number}", row[column].strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _column(path: Path, where: str, kind: str, names: Sequence[str]) -> str:
    """Return the one of `names` that is known to hold lengths."""
    known = [name for name in names if name in COLUMNS]
    if len(known) == 1:
        return known[0]
    if known:
        raise DataError(f"{path}: {where} has the {kind}s {' and '.join(known)}: keep the one in tokens", path=path)
    raise DataError(
        f"{path}: {where}: none of its {len(names)} {kind}s ({_shortened(', '.join(names))}) is named "
        f"{', '.join(COLUMNS)}: rename the one that counts tokens (text must be tokenized first)",
        path=path,
    )
