"""One task of indexing: a range of a JSONL file, or a chunk of text files; and the process that does such tasks.

Only the standard library is imported, so that a process starts in 0.03 s instead of 0.2 s with numpy.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron.trainer.data.json_text import LineError, Question, check_prompt, content_of_line, num_bytes, parts_of_line
from megatron.trainer.data.turns import Parts, Turn

SNIFFED_BYTES = 8192
BUFFER_BYTES = 1 << 17
MOST_KEYS = 32
UNREAD = "lines with the unread key "
"""What precedes a key in the counts of an index."""


class ScanError(Exception):
    """A file that is no longer what it was when it was listed."""


COLUMNS = (
    *("offsets_bytes", "lengths", "blanks", "continued"),
    *("first_targets", "questions", "num_answers", "answers", "depths"),
)


class JsonLinesRange(NamedTuple):
    """The lines that start in a range of a file.

    Attributes:
        columns: COLUMNS -> int64:
            offsets_bytes: [n], where the line of each document starts in the file; no document is of a blank line.
            lengths: [n], its tokens; a text with 1 for the end of document.
            blanks: [b], for each blank line how many documents come before it in this range.
            continued: [c], which of the n documents are of the line of the document before.
            first_targets: the first token that is learned of each document that does not learn all: of each chat.
            questions: [q], which of the n documents are prompts with responses, or trees of turns.
            num_answers: [q], how many responses each of them has, or parts behind the first one.
            answers: [sum(num_answers)], tokens of each response, those at the end of the line.
            depths: [sum(num_answers)], 1 for a response; for a part of a tree how often what is above it branches.
        num_targets: tokens of chats, and of lines with responses, that are learned.
        unread: key that nothing reads -> how many lines have it; the first MOST_KEYS of them.
        error: the first line without text, counted from 0 in this range, and what is wrong with it; the lines after it
            are not looked at.
    """

    columns: dict[str, array[int]]
    num_lines: int
    num_targets: int
    unread: dict[str, int]
    error: tuple[int, str] | None


def scan_json_lines(path: str, start: int, stop: int, size_bytes: int, json_key: str) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1; a byte of text is a token.

    Args and errors: see `scan_lines`.
    """

    def measure(content: str | Question | list[Turn]) -> list[tuple[int, ...]]:
        if isinstance(content, str):
            return [(num_bytes(content) + 1,)]
        if not isinstance(content, Question):
            return [parts_of_line(content, [num_bytes(turn.text) + turn.ends for turn in content]).measures()]
        num_prompt_tokens, answers = num_bytes(content.prompt), [num_bytes(text) + 1 for text in content.responses]
        check_prompt(num_prompt_tokens)
        depths = (1,) * len(answers)
        length = num_prompt_tokens + sum(answers)
        return [Parts(length, num_prompt_tokens, sum(answers), tuple(answers), depths).measures()]

    def measure_line(line: bytes) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
        content, unread = content_of_line(line, json_key)
        return measure(content), unread

    return scan_lines(path, start, stop, size_bytes, measure_line)


def scan_lines(
    path: str,
    start: int,
    stop: int,
    size_bytes: int,
    measure: Callable[[bytes], tuple[Sequence[tuple[int, ...]], tuple[str, ...]]],
) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1.

    Args:
        size_bytes: of the file when it was listed; what lies behind is not looked at.
        measure: a line -> for each document of it: its tokens; of a chat also the first that is learned and how many
            are; of a prompt with responses, and of a tree, besides tokens and depth of each part behind the first.
            Then the line's keys that nothing reads.

    Raises:
        OSError: a file that cannot be read.
        ScanError: one that has become shorter.
    """
    columns = {name: array("q") for name in COLUMNS}
    num_lines = num_targets = 0
    unread: dict[str, int] = {}
    error = None
    for offset_bytes, line in _lines(path, start, stop, size_bytes):
        if line.isspace():
            columns["blanks"].append(len(columns["lengths"]))
        else:
            try:
                documents, keys = measure(line)
            except LineError as caught:
                error = (num_lines, str(caught))
                break
            for number, document in enumerate(documents):
                num_targets += _append(columns, offset_bytes, document, is_continued=number > 0)
            add_keys(unread, dict.fromkeys(keys, 1))
        num_lines += 1
    return JsonLinesRange(columns, num_lines, num_targets, unread, error)


def add_keys(unread: dict[str, int], found: dict[str, int]) -> None:
    """Add numbers of lines with keys; keys may be names of things, so that there is no end of them."""
    for key, num_lines in found.items():
        if key in unread or len(unread) < MOST_KEYS:
            unread[key] = unread.get(key, 0) + num_lines


def _lines(path: str, start: int, stop: int, size_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that start at bytes start .. stop - 1, and where they start."""
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
            yield offset_bytes, line
            offset_bytes += len(line)


def _append(columns: dict[str, array[int]], offset_bytes: int, measures: Sequence[int], *, is_continued: bool) -> int:
    """Append what `measure` says of a document of the line at `offset_bytes`; return how many tokens are learned."""
    length, *targets = measures
    document = len(columns["lengths"])
    if is_continued:
        columns["continued"].append(document)
    columns["lengths"].append(length)
    columns["offsets_bytes"].append(offset_bytes)
    if not targets:
        return 0
    first_target, num_targets, *answers = targets
    columns["first_targets"].append(first_target)
    if answers:
        columns["questions"].append(document)
        columns["num_answers"].append(len(answers) // 2)
        columns["answers"].extend(answers[::2])
        columns["depths"].extend(answers[1::2])
    return num_targets


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
