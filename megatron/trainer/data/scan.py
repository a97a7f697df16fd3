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
BUFFER_BYTES = 1 << 17


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
    offsets_bytes: list[int] = []
    lengths: list[int] = []
    blanks: list[int] = []
    num_lines = 0
    error = None
    offset_bytes = start
    with reading(path), open(path, "rb", buffering=BUFFER_BYTES) as file:
        if start:  # a line starts where the byte before it ends another
            file.seek(start - 1)
            offset_bytes = start - 1 + len(file.readline(stop - start + 1))
        while offset_bytes < stop:
            line = file.readline()
            if not line:
                raise _truncated(path, size_bytes)
            if offset_bytes + len(line) > size_bytes:
                line = line[: size_bytes - offset_bytes]
            if line.isspace():
                blanks.append(len(lengths))
            else:
                try:
                    lengths.append(num_bytes(text_of_line(line, json_key)) + 1)
                except LineError as caught:
                    error = (num_lines, str(caught))
                    break
                offsets_bytes.append(offset_bytes)
            num_lines += 1
            offset_bytes += len(line)
    return JsonLinesRange(
        offsets_bytes=np.array(offsets_bytes, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        blanks=np.array(blanks, dtype=np.int64),
        num_lines=num_lines,
        error=error,
    )


def _truncated(path: str, listed_bytes: int) -> DataError:
    found_bytes = os.path.getsize(path)
    return DataError(
        f"{path} has {found_bytes} bytes but had {listed_bytes} when it was listed: "
        "the data must not change while they are indexed; start again when they are complete",
        path=path,
        listed_bytes=listed_bytes,
        found_bytes=found_bytes,
    )


def sniff_text_files(paths: Sequence[str]) -> bytes:
    """Return a byte for each file: 1 when there is a NUL in its first 8 KiB, else 0.

    Raises:
        DataError: a file that cannot be read.
    """
    flags = bytearray()
    with reading(paths[0]):  # the error names the file
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                flags.append(b"\0" in file.read(SNIFFED_BYTES))
    return bytes(flags)
