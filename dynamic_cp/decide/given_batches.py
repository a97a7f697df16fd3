"""The global batches that a file of lengths marks: by blank lines, or by a column.

Rollouts of a post-training run come step by step, and no two steps are alike: several of them give an interval.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.decide.length_files import is_pipe, name_of, read_length_array
from dynamic_cp.decide.length_formats import shortened
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.lengths.file import LengthFile, csv_rows, open_parquet

BATCH_COLUMNS = ("batch", "global_batch", "step", "rollout")
"""Names of a column, or key, that says to which global batch a sample belongs."""


def read_batches(path: str | Path) -> tuple[NDArray[np.int64], ...]:
    """Return the lengths of each global batch in a file, in the order of their first samples; one, if nothing is
    marked.

    Args:
        path: as for `read_length_array`. In a `.txt`, blank lines stand between batches; in the other texts and in
            `.parquet`, samples with the same value of a column in BATCH_COLUMNS are one batch. What comes out of a pipe
            is one batch.

    Raises:
        DynamicCPError: as `read_length_array`, or two such columns.
    """
    lengths = read_length_array(path)
    marks = None if is_pipe(path) else _marks(LengthFile(path=Path(path), name=name_of(path), content=None))
    if marks is None:
        return (lengths,)
    members: dict[object, list[int]] = {}
    for index, mark in enumerate(marks):
        members.setdefault(mark, []).append(index)
    return tuple(lengths[indices] for indices in members.values())


def _marks(file: LengthFile) -> Sequence[object] | None:
    """Return for each sample what marks its batch; None where the file marks none."""
    kind = file.path.suffix.lower()
    if kind == ".txt":
        blocks = re.split(r"\n[^\S\n]*\n", file.text(kind, file.read()))
        return [number for number, block in enumerate(blocks) for _ in block.split()]
    if kind == ".csv":
        rows = [row for _, row in csv_rows(file)]
        header = [cell.lower() for cell in rows[0]]
        column = _batch_column(file, header) if len(header) > 1 else None
        return None if column is None else [row[column] for row in rows[1:]]
    if kind == ".jsonl":
        values = [json.loads(line) for line in file.lines() if line.strip()]
        return _marks_of_objects(file, values)
    if kind == ".parquet":
        with open_parquet(file) as table:
            names = table.schema_arrow.names
            column = _batch_column(file, names)
            return None if column is None else table.read(columns=[names[column]]).column(0).to_pylist()
    return None


def _marks_of_objects(file: LengthFile, values: Sequence[object]) -> Sequence[object] | None:
    """Return the marks of lines of JSON: all of them have one, or none."""
    keys = [_key(file, value) for value in values]
    if not any(keys):
        return None
    if not all(keys):
        raise file.error(
            f"{sum(map(bool, keys))} of {len(keys)} lines say their batch ({next(filter(None, keys))}): say it in all "
            "lines, or in none"
        )
    return [shortened(value[key]) for value, key in zip(values, keys, strict=True) if isinstance(value, dict) and key]


def _key(file: LengthFile, value: object) -> str | None:
    names = list(value) if isinstance(value, dict) else []
    column = _batch_column(file, names)
    return None if column is None else names[column]


def _batch_column(file: LengthFile, names: Iterable[str]) -> int | None:
    """Return which of `names` marks batches; None: none does."""
    found = [(index, name) for index, name in enumerate(names) if name in BATCH_COLUMNS]
    if len(found) > 1:
        raise InvalidInputError(
            f"{file.name} has the columns {' and '.join(name for _, name in found)}, and 1 may mark batches: keep one"
        )
    return found[0][0] if found else None
