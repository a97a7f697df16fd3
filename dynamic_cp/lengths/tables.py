"""Lengths in texts: numbers between white space, CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.lengths.file import COLUMNS, TOKEN_IDS, TOKEN_MASK, LengthFile, shortened

_Entries = Iterable[tuple[str, object]]
"""(where in the file, value); the value still has to be shown to be a length."""


def read_txt(file: LengthFile) -> NDArray[np.int64]:
    """Return the integers between white space."""
    words = file.text(".txt", file.read()).split()
    return _as_array(file, ((f"entry {number}", word) for number, word in enumerate(words, start=1)))


def read_csv(file: LengthFile) -> NDArray[np.int64]:
    """Return the column with one of the names in COLUMNS, or the only column there is."""
    return _as_array(file, _csv_entries(file))


def read_jsonl(file: LengthFile) -> NDArray[np.int64]:
    """Return per line an integer, an entry with one of the names in COLUMNS, or the number of token ids."""
    return _as_array(file, _json_entries(file))


def is_number(text: str) -> bool:
    """Return whether `text` is one number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _as_array(file: LengthFile, entries: _Entries) -> NDArray[np.int64]:
    return np.fromiter((file.length(where, value) for where, value in entries), dtype=np.int64)


def csv_rows(file: LengthFile) -> list[tuple[int, list[str]]]:
    """Return the line and the cells of each row that is not blank.

    Raises:
        DataError: it is no CSV, or a row has another number of cells than the first: 1,000 is two.
    """
    try:
        lines = csv.reader(io.StringIO(file.text(".csv", file.read()), newline=""))
        rows = [(lines.line_num, [cell.strip() for cell in row]) for row in lines if any(map(str.strip, row))]
    except csv.Error as error:
        raise file.no_lengths(".csv", f"{error}: save it as plain CSV") from error
    for line, row in rows:
        if len(row) != len(rows[0][1]):
            raise file.error(
                f"line {line} has {len(row)} cells, line {rows[0][0]} has {len(rows[0][1])}: fill or drop the row, and "
                "write numbers without separators, 1000 for 1,000"
            )
    return rows


def is_name(cell: str) -> bool:
    """Return whether the first cell of a CSV file names its column; what begins as a number is data, even wrong."""
    return cell[:1] not in "+-.0123456789" and not is_number(cell)


def _csv_entries(file: LengthFile) -> _Entries:
    rows = [row for _, row in csv_rows(file)]
    if not rows:
        return
    header = [cell.lower() for cell in rows[0]]
    has_names = bool(set(header) & set(COLUMNS))
    column = header.index(file.column("its header", "column", header)) if has_names or len(header) > 1 else 0
    has_header = has_names or is_name(header[0])  # a single column may have any name
    for number, row in enumerate(rows[has_header:], start=1):
        yield f"entry {number}", row[column]


def _json_entries(file: LengthFile) -> _Entries:
    for number, line in enumerate(file.lines(), start=1):
        text = file.text(".jsonl", line, number)
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = "nested too deep" if isinstance(error, RecursionError) else error
            raise file.error(f"line {number} is not JSON ({why}): give one integer or object per line") from error
        if not isinstance(value, dict):
            yield f"line {number}", value
        elif TOKEN_IDS in value:
            where = f"line {number}, key {TOKEN_IDS!r},"
            yield where, _num_tokens(file, where, value)
        else:
            key = file.column(f"line {number}", "key", list(value))
            yield f"line {number}, key {key!r},", value[key]


def _num_tokens(file: LengthFile, where: str, sample: Mapping[str, Any]) -> int:
    """Return how many token ids a sample has that its mask does not hide."""
    ids, mask = sample[TOKEN_IDS], sample.get(TOKEN_MASK)
    if not isinstance(ids, list):
        raise file.error(f"{where} is {shortened(ids)}, a list of token ids is needed")
    if mask is None:
        return len(ids)
    if not isinstance(mask, list) or len(mask) != len(ids):
        number = len(mask) if isinstance(mask, list) else 0
        raise file.error(f"{where} has {len(ids)} token ids and {number} numbers of {TOKEN_MASK}: give one for each")
    return sum(map(bool, mask))
