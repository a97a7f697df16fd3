"""Files of records (JSONL, gzip, JSON arrays, parquet) as pieces of whole lines, one record a line."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynamic_cp.errors import DataError
from dynamic_cp.lengths.file import LengthFile, open_parquet
from megatron.trainer.data.source import reading

SUFFIXES = (".jsonl.gz", ".json.gz", ".parquet")
UNITS = ("line", "entry", "row")
"""What messages call a record."""
BLOCK_BYTES = 1 << 20
ROWS = 1024

Blocks = Iterator[tuple[bytes, int]]
"""Bytes of lines, and the number of further bytes of the file that gave them."""


def unit_of(path: str) -> str:
    """Return what a record of a file is called, of UNITS; DataError if the file cannot be read or is damaged."""
    if path.endswith(".parquet"):
        return "row"
    if path.endswith(".jsonl"):
        return "line"
    with _opened(path) as file:
        begins = file.read(BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    return "entry" if begins == b"[" else "line"


def lines_of(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, with blank ones; errors as in `blocks_of`."""
    for lines, _ in whole_lines(blocks_of(path, unit_of(path), os.path.getsize(path))):
        yield from split_lines(lines)


def split_lines(lines: bytes) -> list[bytes]:
    parts = lines.split(b"\n")
    return parts if parts[-1] else parts[:-1]


def whole_lines(blocks: Blocks) -> Blocks:
    """Yield the same bytes in pieces that end with a line."""
    parts: list[bytes] = []
    num_bytes = 0
    for block, more_bytes in blocks:
        before, newline, rest = block.rpartition(b"\n")
        num_bytes += more_bytes
        if newline:
            yield b"".join([*parts, before, newline]), num_bytes
            parts, num_bytes = [], 0
        parts.append(rest)
    if any(parts) or num_bytes:
        yield b"".join(parts), num_bytes


def blocks_of(path: str, unit: str, size_bytes: int, block_bytes: int = BLOCK_BYTES) -> Blocks:
    """Yield the lines of a file in blocks, which may end inside a line.

    Args:
        unit: from `unit_of`.
        size_bytes: of the file when it was listed; what was appended later is not read.
        block_bytes: approximate size of a block.

    Raises DataError: a file that cannot be read, is damaged, or has become shorter. Raises UnsupportedFeatureError: a
    parquet file without pyarrow."""
    if unit == "row":
        return _rows(path)
    if unit == "entry":
        return _entries(path)
    return _unzipped(path, block_bytes) if path.endswith(".gz") else _read(path, size_bytes, block_bytes)


def shortened_file(path: str, found_bytes: int, listed_bytes: int) -> DataError:
    """Return the error for a file that has become shorter since it was listed."""
    return DataError(
        f"{path} has {found_bytes} bytes but had {listed_bytes} when it was listed: the data must not change while "
        "they are indexed; start again when they are complete"
    )


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Yield an open file, unzipped; DataError if it cannot be read or is damaged."""
    with reading(path):
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                yield file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is no whole gzip file ({error}): copy it again") from error


def _read(path: str, size_bytes: int, block_bytes: int) -> Blocks:
    left = size_bytes
    with _opened(path) as file:
        while left:
            if not (block := file.read(min(block_bytes, left))):
                raise shortened_file(path, size_bytes - left, size_bytes)
            left -= len(block)
            yield block, len(block)


def _unzipped(path: str, block_bytes: int) -> Blocks:
    done = 0
    with _opened(path) as file:
        while block := file.read(block_bytes):
            position = file.fileobj.tell()
            yield block, position - done
            done = position


def _entries(path: str) -> Blocks:
    with _opened(path) as file:
        content = file.read()
    lines, num_bytes = _lines_of_array(path, content), os.path.getsize(path)
    for first in range(0, len(lines), ROWS):
        some = lines[first : first + ROWS]
        yield "".join(f"{line}\n" for line in some).encode(), num_bytes * len(some) // len(lines)


def _lines_of_array(path: str, content: bytes) -> list[str]:
    """Return the entries of a JSON array, unparsed, each as one line."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}): save it as UTF-8") from error
    blank, decoder, lines = re.compile(r"[ \t\n\r]*"), json.JSONDecoder(), []

    def skip(place: int) -> int:
        found = blank.match(text, place)
        assert found is not None
        return found.end()

    def wrong(place: int, why: object) -> DataError:
        where = f"{path} line {text.count(chr(10), 0, place) + 1}, entry {len(lines) + 1}"
        return DataError(f"{where} is not JSON ({why}): repair the file")

    place = skip(skip(0) + 1)
    while text[place : place + 1] != "]" or lines:
        try:
            _, stop = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise wrong(place, getattr(error, "msg", error)) from error
        lines.append(re.sub(r"[\n\r]", " ", text[place:stop]))
        place = skip(stop)
        if text[place : place + 1] == "]":
            break
        if text[place : place + 1] != ",":
            raise wrong(place, "a comma or ] is missing behind the entry before")
        place = skip(place + 1)
    if skip(place + 1) != len(text):
        raise wrong(skip(place + 1), "something follows the array")
    return lines


def _rows(path: str) -> Blocks:
    size_bytes = os.path.getsize(path)
    with reading(path), open_parquet(LengthFile(path=Path(path), name=path, content=None)) as table:
        num_rows = max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=ROWS):
            lines = [json.dumps(_without_nulls(row), default=str, ensure_ascii=False) for row in batch.to_pylist()]
            yield "".join(f"{line}\n" for line in lines).encode(), size_bytes * len(lines) // num_rows


def _without_nulls(value: Any) -> Any:
    """Return a row without nulls in its objects, which tables have for missing keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_without_nulls(entry) for entry in value]
    return value
