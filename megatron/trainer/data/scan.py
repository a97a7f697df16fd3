"""One task of indexing: a range of a JSONL file, or a chunk of text files. Plain functions that any process can run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.json_text import LineError, num_bytes, text_of_line
from megatron.trainer.data.source import reading

SNIFFED_BYTES = 8192
REST_OF_LINE_BYTES = 1 << 20


class JsonLinesRange(NamedTuple):
    """The lines that start in a range of a file.

    Attributes:
        offsets_bytes: int64 [n], where each line that is not blank starts in the file.
        lengths: int64 [n], bytes of its text and 1 for the end of document.
        blanks: int64 [b], for each blank line how many lines that are not blank come before it in this range.
        error: the first line without text, counted from 0 in this range, and what is wrong with it; the lines after it
            are not looked at.
    """

    offsets_bytes: NDArray[np.int64]
    lengths: NDArray[np.int64]
    blanks: NDArray[np.int64]
    num_lines: int
    error: tuple[int, str] | None


def scan_json_lines(path: str, start: int, stop: int, size_bytes: int, json_key: str) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1.

    Args:
        size_bytes: of the file when it was listed; what lies behind is not looked at.

    Raises:
        DataError: a file that cannot be read, or that has become shorter.
    """
    first, lines = _lines(path, start, stop, size_bytes)
    ends = np.cumsum(np.fromiter((len(line) + 1 for line in lines), dtype=np.int64, count=len(lines)))
    kept: list[int] = []
    lengths: list[int] = []
    blanks: list[int] = []
    error = None
    for number, line in enumerate(lines):
        if not line or line.isspace():
            blanks.append(len(lengths))
            continue
        try:
            lengths.append(num_bytes(text_of_line(line, json_key)) + 1)
        except LineError as caught:
            error = (number, str(caught))
            break
        kept.append(number)
    starts = np.concatenate([[0], ends[:-1]]) if lines else ends
    return JsonLinesRange(
        offsets_bytes=first + starts[np.array(kept, dtype=np.int64)],
        lengths=np.array(lengths, dtype=np.int64),
        blanks=np.array(blanks, dtype=np.int64),
        num_lines=len(lines),
        error=error,
    )


def _lines(path: str, start: int, stop: int, size_bytes: int) -> tuple[int, list[bytes]]:
    """Return where the first line that starts in the range does so, and the lines without their ends."""
    begin = max(0, start - 1)  # a line starts where the byte before it ends another
    with reading(path), open(path, "rb", buffering=0) as file:
        text = _read(file.fileno(), path, begin, stop, size_bytes)
        if start:
            newline = text.find(b"\n")
            if newline < 0 or begin + newline + 1 >= stop:
                return stop, []
            begin += newline + 1
            text = text[newline + 1 :]
        parts = [text]
        while stop < size_bytes and b"\n" not in parts[-1][-1 if len(parts) == 1 else 0 :]:
            parts.append(_read(file.fileno(), path, stop, min(size_bytes, stop + REST_OF_LINE_BYTES), size_bytes))
            stop += REST_OF_LINE_BYTES
    if len(parts) > 1:
        parts[-1] = parts[-1].partition(b"\n")[0]
    lines = b"".join(parts).split(b"\n")
    if len(parts) == 1 and not lines[-1]:
        lines.pop()  # what follows the last line end is no line
    return begin, lines


def _read(file: int, path: str, start: int, stop: int, size_bytes: int) -> bytes:
    parts = []
    while start < stop:
        part = os.pread(file, stop - start, start)
        if not part:
            raise DataError(
                f"{path} has {start} bytes but had {size_bytes} when it was listed: "
                "the data must not change while they are indexed; start again when they are complete",
                path=path,
                listed_bytes=size_bytes,
                found_bytes=start,
            )
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sniff_text_files(paths: Sequence[str]) -> bytes:
    """Return a byte for each file: 1 when there is a NUL in its first 8 KiB, else 0.

    Raises:
        DataError: a file that cannot be read.
    """
    flags = bytearray()
    for path in paths:
        with reading(path), open(path, "rb", buffering=0) as file:
            flags.append(b"\0" in file.read(SNIFFED_BYTES))
    return bytes(flags)
