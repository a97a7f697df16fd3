"""Lengths in parquet files, as data sets are downloaded and tokenized; pyarrow reads them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.lengths.file import TOKEN_IDS, TOKEN_MASK, LengthFile

PARQUET_MAGIC = b"PAR1"


def read_parquet(file: LengthFile) -> NDArray[np.int64]:
    """Return the lengths in a parquet file: a column of them, or the token ids of each sample.

    Raises:
        UnsupportedFeatureError: pyarrow is not installed.
        DataError: no such column, or something in it that is no length.
        OSError: it cannot be read.
    """
    parts, first = [np.empty(0, np.int64)], 1
    with open_parquet(file) as table:
        names = table.schema_arrow.names
        columns = [TOKEN_IDS] if TOKEN_IDS in names else [file.column("its schema", "column", names)]
        if columns == [TOKEN_IDS] and TOKEN_MASK in names:
            columns.append(TOKEN_MASK)
        for batch in table.iter_batches(columns=columns):
            found = _num_tokens(file, batch, first) if columns[0] == TOKEN_IDS else _lengths(file, batch, first)
            parts.append(found)
            first += batch.num_rows
    return np.concatenate(parts)


@contextmanager
def open_parquet(file: LengthFile) -> Iterator[Any]:
    """Yield `file` as pyarrow's ParquetFile; what pyarrow finds wrong with it becomes a DataError.

    Raises:
        UnsupportedFeatureError: pyarrow is not installed.
        OSError: it cannot be read.
    """
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"{file.name} needs pyarrow, which is not installed: pip install 'megatron-dynamic-cp[parquet]'"
        ) from error
    file.head(1)  # pyarrow's own error hides why a file cannot be opened
    try:
        yield parquet.ParquetFile(file.path if file.content is None else io.BytesIO(file.content))
    except arrow.ArrowException as error:
        raise file.no_lengths(".parquet", f"{' '.join(str(error).split())[:200]}: copy it again") from error


def _lengths(file: LengthFile, batch: Any, first: int) -> NDArray[np.int64]:
    (name,), (column,) = batch.schema.names, batch.columns
    if not str(column.type).startswith(("int", "uint", "null")):
        raise file.error(f"column {name} holds {column.type}, integers are needed: save whole tokens")
    if column.null_count:
        file.length(f"entry {first + int(np.asarray(column.is_null()).argmax())}", None)
    values = np.asarray(column)
    wrong = (values < 1) | (values > np.iinfo(np.int32).max)
    if wrong.any():
        entry = int(wrong.argmax())
        file.length(f"entry {first + entry}", int(values[entry]))
    return values.astype(np.int64)


def _num_tokens(file: LengthFile, batch: Any, first: int) -> NDArray[np.int64]:
    """Return how many token ids each sample has that its mask does not hide."""
    sizes = [
        _list_sizes(file, name, column, first) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    tokens = sizes[0]
    if len(sizes) > 1:
        if (sizes[0] != sizes[1]).any():
            entry = int((sizes[0] != sizes[1]).argmax())
            raise file.error(
                f"entry {first + entry} has {sizes[0][entry]} token ids and {sizes[1][entry]} numbers of {TOKEN_MASK}: "
                "give one for each"
            )
        seen = np.concatenate([[0], np.cumsum(np.asarray(batch.columns[1].flatten()) != 0)])
        ends = np.cumsum(tokens)
        tokens = seen[ends] - seen[ends - tokens]
    if (tokens < 1).any():
        entry = int((tokens < 1).argmax())
        file.length(f"entry {first + entry}, {TOKEN_IDS},", int(tokens[entry]))
    return tokens


def _list_sizes(file: LengthFile, name: str, column: Any, first: int) -> NDArray[np.int64]:
    if not str(column.type).startswith(("list<", "large_list<")):
        raise file.error(f"column {name} holds {column.type}, lists of token ids are needed: save them as lists")
    if column.null_count:
        entry = first + int(np.asarray(column.is_null()).argmax())
        raise file.error(f"entry {entry} is None, a list of token ids is needed: drop it")
    return np.asarray(column.value_lengths()).astype(np.int64)
