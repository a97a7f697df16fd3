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

from megatron.trainer.data.json_text import LineError, check_prompt, content_of_line, num_bytes

SNIFFED_BYTES = 8192
BUFFER_BYTES = 1 << 17


class ScanError(Exception):
    """A file that is no longer what it was when it was listed."""


class JsonLinesRange(NamedTuple):
    """The lines that start in a range of a file.

    Attributes:
        offsets_bytes: int64 [n], where the line of each document starts in the file; no document is of a blank line.
        lengths: int64 [n], its tokens; a text with 1 for the end of document.
        blanks: int64 [b], for each blank line how many documents come before it in this range.
        continued: int64 [c], which of the n documents are of the line of the document before.
        error: the first line without text, counted from 0 in this range, and what is wrong with it; the lines after it
            are not looked at.
        first_targets: int64, the first token that is learned of each document that does not learn all: of each chat.
        num_targets: tokens of chats, and of lines with responses, that are learned.
        questions: int64 [q], which of the n documents are prompts with responses.
        num_answers: int64 [q], how many responses each of them has.
        answers: int64 [sum(num_answers)], tokens of each response, those at the end of the line.
    """

    offsets_bytes: array[int]
    lengths: array[int]
    blanks: array[int]
    continued: array[int]
    num_lines: int
    error: tuple[int, str] | None
    first_targets: array[int]
    num_targets: int
    questions: array[int]
    num_answers: array[int]
    answers: array[int]


def scan_json_lines(path: str, start: int, stop: int, size_bytes: int, json_key: str) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1; a byte of text is a token.

    Args and errors: see `scan_lines`.
    """

    def measure(line: bytes) -> list[tuple[int, ...]]:
        content = content_of_line(line, json_key)
        if isinstance(content, str):
            return [(num_bytes(content) + 1,)]
        return [measured(num_bytes(content.prompt), [num_bytes(response) + 1 for response in content.responses])]

    return scan_lines(path, start, stop, size_bytes, measure)


def measured(num_prompt_tokens: int, answers: Sequence[int]) -> tuple[int, ...]:
    """Return what `scan_lines` needs of a prompt with responses.

    Args:
        answers: tokens of each response.

    Raises:
        LineError: a prompt that is too short.
    """
    check_prompt(num_prompt_tokens)
    num_targets = sum(answers)
    return num_prompt_tokens + num_targets, num_prompt_tokens, num_targets, *answers


def scan_lines(
    path: str, start: int, stop: int, size_bytes: int, measure: Callable[[bytes], Sequence[tuple[int, ...]]]
) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1.

    Args:
        size_bytes: of the file when it was listed; what lies behind is not looked at.
        measure: a line -> for each document of it: its tokens; of a chat also the first that is learned and how many
            are; of a prompt with responses besides these the tokens of each response.

    Raises:
        OSError: a file that cannot be read.
        ScanError: one that has become shorter.
    """
    offsets_bytes, lengths, blanks, continued, first_targets = (array("q") for _ in range(5))
    questions, num_answers, answers = array("q"), array("q"), array("q")
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
                    documents = measure(line)
                except LineError as caught:
                    error = (num_lines, str(caught))
                    break
                for number, (length, *targets) in enumerate(documents):
                    if number:
                        continued.append(len(lengths))
                    if targets:
                        first_targets.append(targets[0])
                        num_targets += targets[1]
                    if len(targets) > 2:
                        questions.append(len(lengths))
                        num_answers.append(len(targets) - 2)
                        answers.extend(targets[2:])
                    lengths.append(length)
                    offsets_bytes.append(offset_bytes)
            num_lines += 1
            offset_bytes += len(line)
    return JsonLinesRange(
        offsets_bytes,
        lengths,
        blanks,
        continued,
        num_lines,
        error,
        first_targets,
        num_targets,
        questions,
        num_answers,
        answers,
    )


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
