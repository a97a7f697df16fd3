"""A file of lengths or records while it is read: its bytes, its rows, and what is wrong with it."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dynamic_cp.errors import DataError, UnsupportedFeatureError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFile:
    """What is read.

    Attributes:
        path: of the file.
        name: what to call it in messages.
        content: all of it where it came out of a pipe, None: it is to be opened.
    """

    path: Path
    name: str
    content: bytes | None

    def read(self) -> bytes:
        return self.path.read_bytes() if self.content is None else self.content

    def head(self, num_bytes: int) -> tuple[bytes, int]:
        """Return its first bytes, at most `num_bytes`, and its size."""
        if self.content is not None:
            return self.content[:num_bytes], len(self.content)
        with self.path.open("rb") as file:
            return file.read(num_bytes), os.fstat(file.fileno()).st_size

    def lines(self) -> Iterator[bytes]:
        """Yield its lines; a long file is never in memory as a whole."""
        if self.content is not None:
            yield from io.BytesIO(self.content)
            return
        with self.path.open("rb") as file:
            yield from file

    def error(self, what: str) -> DataError:
        return DataError(f"{self.name}: {what}")

    def no_lengths(self, kind: str, why: str) -> DataError:
        """Return the error of a file that is not of its kind."""
        return DataError(f"{self.name} is not a {kind} file of lengths: {why}")

    def text(self, kind: str, content: bytes, first_line: int = 1) -> str:
        """Return `content`, which begins in `first_line`, as text; it may begin with a byte-order mark. Raises
        DataError: it is not UTF-8, with the line and the remedy."""
        if first_line == 1 and content.startswith(b"\x1f\x8b"):
            raise self.no_lengths(kind, "it is compressed: gunzip it first")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if content.startswith((b"\xff\xfe", b"\xfe\xff")) and len(content) > 2:
                raise self.no_lengths(kind, "it is UTF-16: save it as UTF-8") from error
            line, byte = first_line + content[: error.start].count(b"\n"), content[error.start]
            raise self.no_lengths(
                kind,
                f"byte 0x{byte:02x} in line {line} is not UTF-8: save it as UTF-8 (iconv -f latin1 -t utf-8, if it is "
                "Latin-1)",
            ) from error
        if "\0" in text:
            raise self.no_lengths(kind, "it is binary, a text of lengths is needed")
        return text


def is_plain(text: str) -> bool:
    """Return whether a number is in plain digits: Python alone also reads 1_000 and digits of all scripts."""
    return text.isascii() and "_" not in text


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_name(cell: str) -> bool:
    """Return whether the first cell of a CSV file names its column; what begins as a number is data, even wrong."""
    return cell[:1] not in "+-.0123456789" and not is_number(cell)


def csv_rows(file: LengthFile) -> list[tuple[int, list[str]]]:
    """Return the line and the cells of each row that is not blank. Raises DataError: it is no CSV, or a row has another
    number of cells than the first: 1,000 is two."""
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


@contextmanager
def open_parquet(file: LengthFile) -> Iterator[Any]:
    """Yield `file` as pyarrow's ParquetFile; what pyarrow finds wrong with it becomes a DataError. Raises
    UnsupportedFeatureError: pyarrow is not installed. Raises OSError: it cannot be read."""
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
