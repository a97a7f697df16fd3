"""Lengths in files of each format: arrays of NumPy, the index of a Megatron data set, text (numbers between white
space, CSV, JSON lines), and parquet files of downloaded or tokenized data sets, which pyarrow reads."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.lengths.file import LengthFile, csv_rows, is_name, is_plain, open_parquet
from dynamic_cp.lengths.megatron_index import read_megatron_index

logger = logging.getLogger(__name__)

COLUMNS = ("seqlen", "seq_len", "sequence_length", "length", "num_tokens", "n_tokens", "token_count")
TOKEN_IDS, TOKEN_MASK = "input_ids", "attention_mask"
"""Keys under which transformers keeps the tokens of a sample, and 0 for those that are padding."""
MAX_LENGTH = 2**31 - 1
"""The int32 `cu_seqlens` of the attention kernels count no further."""
IndexUnit = Literal["document", "sequence"]
NUMPY_MAGIC = b"\x93NUMPY"
_HEADER_BYTES = 1 << 17
"""More bytes than the header of an array has."""
_TOKENIZE = "text must be tokenized first, as `dynamic-cp lengths --tokenizer DIR` does"


def length_of(file: LengthFile, where: str, value: object) -> int:
    """Return `value`, found at `where`, as a length; DataError if it is none."""
    length: Any = value
    if isinstance(value, str):
        try:
            length = int(value) if is_plain(value) else None
        except ValueError:
            length = None
    if isinstance(length, bool) or not isinstance(length, int):
        raise file.error(f"{where} is {shortened(value)}, an integer is needed: write tokens as a whole number")
    if length < 1:
        raise file.error(f"{where} is {shortened(length)}, a length is at least 1 token: drop it")
    if length > MAX_LENGTH:
        raise file.error(f"{where} is {shortened(value)}, a length is at most {MAX_LENGTH} tokens: split or drop it")
    return length


def _column(file: LengthFile, where: str, kind: str, names: Sequence[str]) -> str:
    """Return the one of `names` that is known to hold lengths; DataError if none or several are."""
    known = [name for name in names if name in COLUMNS]
    if len(known) == 1:
        return known[0]
    if known:
        raise file.error(f"{where} has the {kind}s {' and '.join(known)}: keep the one in tokens")
    raise file.error(
        f"{where}: none of its {len(names)} {kind}s ({shortened(', '.join(names))}) is named "
        f"{', '.join((*COLUMNS, TOKEN_IDS))}: rename the one that counts tokens; {_TOKENIZE}"
    )


def shortened(value: object) -> str:
    """Return `value` as text for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists nested as deep
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def read_npy(file: LengthFile) -> NDArray[np.int64]:
    """Return the lengths in a 1-D array of integers."""
    try:
        # Not numpy.load: that would also open .npz and pickles. Mapped, a huge file is read once and only here.
        array: NDArray[Any] = (
            np.lib.format.open_memmap(file.path, mode="r")
            if file.content is None
            else np.lib.format.read_array(io.BytesIO(file.content), allow_pickle=False)
        )
    except OSError:
        raise
    except Exception as error:  # the header is Python source: numpy lets errors of its parser and sizes through
        raise file.no_lengths(".npy", _why_no_array(file)) from error
    if array.dtype.kind not in "iu":
        remedy = "save whole tokens with .astype(numpy.int64)"
        held = "text" if array.dtype.kind in "US" else str(array.dtype)
        if array.dtype.kind == "f" and np.isnan(array).any():
            number = int(np.isnan(array.ravel()).argmax()) + 1
            remedy = f"drop entry {number}, which is nan, and {remedy}"
        raise file.no_lengths(".npy", f"it holds {held}, integers are needed: {remedy}")
    if array.ndim != 1:
        why = f"its shape is {array.shape}, one dimension is needed: save array.ravel()"
        raise file.no_lengths(".npy", why)
    return _checked(file, array)


def _checked(file: LengthFile, values: NDArray[Any], first: int = 1, where: str = "") -> NDArray[np.int64]:
    """Return `values`, of the entries from number `first` on; DataError for the first one that is no length."""
    wrong = (values < 1) | (values > MAX_LENGTH)
    if wrong.any():
        entry = int(wrong.argmax())
        length_of(file, f"entry {first + entry}{where}", int(values[entry]))
    return values.astype(np.int64)


def _why_no_array(file: LengthFile) -> str:
    """Return what is wrong with a file that NumPy does not read, and what to do."""
    head, num_bytes = file.head(_HEADER_BYTES)
    save, again = "save whole tokens with numpy.save", "copy or save it again"
    if not head:
        return f"it is empty: {save}"
    if head.startswith(b"PK"):
        return "it is an archive (.npz): save one array with numpy.save"
    if head[: len(NUMPY_MAGIC)] != NUMPY_MAGIC[: len(head)]:
        return f"it does not begin as an array of NumPy: {save}"
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        is_short = "EOF" in str(error)
        what = f"it is cut off after {num_bytes} bytes" if is_short else f"its header is damaged ({error})"
        return f"{' '.join(what.split())}: {again}"
    except Exception as error:  # see above
        return f"its header is damaged ({type(error).__name__}): {again}"
    if dtype.hasobject:
        return "it holds Python objects, integers are needed: save whole tokens with .astype(numpy.int64)"
    promised = stream.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    return f"it is cut off after {num_bytes} bytes, its header promises {promised}: {again}"


def read_idx(file: LengthFile, unit: IndexUnit = "document") -> NDArray[np.int64]:
    """Return the lengths of the documents, or sequences, of an index; empty ones are left out with a warning."""
    if file.content is not None:
        raise file.error("an index of a Megatron data set cannot be read from a pipe: give its path")
    index = read_megatron_index(file.path)
    tokens = index.document_tokens if unit == "document" else index.sequence_tokens
    lengths: NDArray[np.int64] = tokens[tokens > 0].astype(np.int64)
    if len(lengths) < len(tokens):
        logger.warning(
            "%s: %d of %d %ss hold no tokens, left out", file.name, len(tokens) - len(lengths), len(tokens), unit
        )
    if lengths.size and int(lengths.max()) > MAX_LENGTH:
        entry = int((tokens > MAX_LENGTH).argmax())
        length_of(file, f"{unit} {entry}", int(tokens[entry]))
    return lengths


_Entries = Iterable[tuple[str, object]]
"""(where in the file, value); the value is not yet known to be a length."""


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


def _as_array(file: LengthFile, entries: _Entries) -> NDArray[np.int64]:
    return np.fromiter((length_of(file, where, value) for where, value in entries), dtype=np.int64)


def _csv_entries(file: LengthFile) -> _Entries:
    rows = [row for _, row in csv_rows(file)]
    if not rows:
        return
    header = [cell.lower() for cell in rows[0]]
    has_names = bool(set(header) & set(COLUMNS))
    column = header.index(_column(file, "its header", "column", header)) if has_names or len(header) > 1 else 0
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
            key = _column(file, f"line {number}", "key", list(value))
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


PARQUET_MAGIC = b"PAR1"


def read_parquet(file: LengthFile) -> NDArray[np.int64]:
    """Return the lengths in a parquet file: a column of them, or the token ids of each sample. Raises
    UnsupportedFeatureError: pyarrow is not installed. Raises DataError: no such column, or something in it that is no
    length. Raises OSError: it cannot be read."""
    parts, first = [np.empty(0, np.int64)], 1
    with open_parquet(file) as table:
        names = table.schema_arrow.names
        columns = [TOKEN_IDS] if TOKEN_IDS in names else [_column(file, "its schema", "column", names)]
        if columns == [TOKEN_IDS] and TOKEN_MASK in names:
            columns.append(TOKEN_MASK)
        for batch in table.iter_batches(columns=columns):
            found = _num_token_ids(file, batch, first) if columns[0] == TOKEN_IDS else _lengths(file, batch, first)
            parts.append(found)
            first += batch.num_rows
    return np.concatenate(parts)


def _lengths(file: LengthFile, batch: Any, first: int) -> NDArray[np.int64]:
    (name,), (column,) = batch.schema.names, batch.columns
    if not str(column.type).startswith(("int", "uint", "null")):
        raise file.error(f"column {name} holds {column.type}, integers are needed: save whole tokens")
    if column.null_count:
        length_of(file, f"entry {first + int(np.asarray(column.is_null()).argmax())}", None)
    return _checked(file, np.asarray(column), first)


def _num_token_ids(file: LengthFile, batch: Any, first: int) -> NDArray[np.int64]:
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
    return _checked(file, tokens, first, f", {TOKEN_IDS},")


def _list_sizes(file: LengthFile, name: str, column: Any, first: int) -> NDArray[np.int64]:
    if not str(column.type).startswith(("list<", "large_list<")):
        raise file.error(f"column {name} holds {column.type}, lists of token ids are needed: save them as lists")
    if column.null_count:
        entry = first + int(np.asarray(column.is_null()).argmax())
        raise file.error(f"entry {entry} is None, a list of token ids is needed: drop it")
    return np.asarray(column.value_lengths()).astype(np.int64)
