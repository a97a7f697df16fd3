"""One task of indexing: a range of a JSONL file, or a chunk of text files; and the process that does such tasks.

Only the standard library is imported, so that a process starts in 0.03 s instead of 0.2 s with numpy.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.trainer.data.json_text import LineError, num_bytes, text_of_line

SNIFFED_BYTES = 8192
BUFFER_BYTES = 1 << 17


class ScanError(Exception):
    """A file that is no longer what it was when it was listed."""


class JsonLinesRange(NamedTuple):
    """The lines that start in a range of a file.

    Attributes:
        offsets_bytes: int64 [n], where each line that is not blank starts in the file.
        lengths: int64 [n], its tokens; a text with 1 for the end of document.
        blanks: int64 [b], for each blank line how many lines that are not blank come before it in this range.
        error: the first line without text, counted from 0 in this range, and what is wrong with it; the lines after it
            are not looked at.
        first_targets: int64 [n] of chats, the first token that is learned; else empty.
        num_targets: tokens of chats that are learned.
    """

    offsets_bytes: array[int]
    lengths: array[int]
    blanks: array[int]
    num_lines: int
    error: tuple[int, str] | None
    first_targets: array[int]
    num_targets: int


def scan_json_lines(path: str, start: int, stop: int, size_bytes: int, json_key: str) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1; a byte of text is a token.

    Args and errors: see `scan_lines`.
    """
    return scan_lines(path, start, stop, size_bytes, lambda line: (num_bytes(text_of_line(line, json_key)) + 1,))


def scan_lines(
    path: str, start: int, stop: int, size_bytes: int, measure: Callable[[bytes], tuple[int, ...]]
) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1.

    Args:
        size_bytes: of the file when it was listed; what lies behind is not looked at.
        measure: a line -> its tokens; or of a chat its tokens, the first that is learned and how many are.

    Raises:
        OSError: a file that cannot be read.
        ScanError: one that has become shorter.
    """
    offsets_bytes, lengths, blanks, first_targets = array("q"), array("q"), array("q"), array("q")
    num_lines = num_targets = 0
    error = None
    offset_bytes = start
    with open(path, "rb", buffering=BUFFER_BYTES) as file:
        if start:  # a line starts where the byte before it ends another
            file.seek(start - 1)
            offset_bytes = start - 1 + len(file.readline(stop - start + 1))
        while offset_bytes < stop:
            line = file.readline()
            if not line.endswith(b"\n") and offset_bytes + len(line) < size_bytes:
                raise ScanError(
                    f"{path} has {os.path.getsize(path)} bytes but had {size_bytes} when it was listed: the data must "
                    "not change while they are indexed; start again when they are complete"
                )
            if offset_bytes + len(line) > size_bytes:
                line = line[: size_bytes - offset_bytes]
            if line.isspace():
                blanks.append(len(lengths))
            else:
                try:
                    length, *targets = measure(line)
                except LineError as caught:
                    error = (num_lines, str(caught))
                    break
                lengths.append(length)
                offsets_bytes.append(offset_bytes)
                if targets:
                    first_targets.append(targets[0])
                    num_targets += targets[1]
            num_lines += 1
            offset_bytes += len(line)
    return JsonLinesRange(offsets_bytes, lengths, blanks, num_lines, error, first_targets, num_targets)


def sniff_text_files(paths: Sequence[str]) -> bytes:
    """Return a byte for each file: 1 when there is a NUL in its first 8 KiB, else 0.

    Raises:
        OSError: a file that cannot be read.
    """
    flags = bytearray()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            flags.append(b"\0" in file.read(SNIFFED_BYTES))
    return bytes(flags)


def serve() -> None:
    """Run tasks from stdin until it ends: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    tasks, results = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            function, task = pickle.load(tasks)
        except EOFError:
            return
        try:
            result = (True, function(*task))
        except (OSError, ScanError) as error:
            result = (False, error)
        try:
            pickle.dump(result, results)
            results.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent is gone
