"""Tasks of indexing that tokenize: ranges of JSONL files, and chunks of text files. They need installed packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from dynamic_cp.errors import DynamicCPError
from megatron.trainer.data.line_reader import LineReader
from megatron.trainer.data.scan import SNIFFED_BYTES, JsonLinesRange, ScanError, scan_lines
from megatron.trainer.data.tokenizer import TextTokenizer


@contextmanager
def tokenizing() -> Iterator[None]:
    """Turn the error of a tokenizer that this process cannot load into one that `scan.serve` hands on."""
    try:
        yield
    except DynamicCPError as error:
        raise ScanError(str(error)) from error


def texts_of(paths: Sequence[str]) -> Iterator[tuple[bytes, bool]]:
    """Yield the content of each file, and whether it is binary: has a NUL in its first 8 KiB."""
    for path in paths:
        with open(path, "rb") as file:
            text = file.read()
        yield text, b"\0" in text[:SNIFFED_BYTES]


def scan_read_lines(path: str, start: int, stop: int, size_bytes: int, reader: LineReader) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1, as `reader` sees them; see `scan_lines`."""

    def measure(line: bytes) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
        documents = reader.read(line)
        return [document.measures() for document in documents], documents[0].unread

    with tokenizing():
        return scan_lines(path, start, stop, size_bytes, measure)


class TextMeasures(NamedTuple):
    """What was found of text files: the tokens of each with the end of document, -1 for one that is binary."""

    lengths: list[int]
    num_replaced: int = 0


def measure_text_files(paths: Sequence[str], tokenizer: TextTokenizer) -> TextMeasures:
    """Return the tokens of text files; `num_replaced` of them are not UTF-8.

    Raises:
        OSError, ScanError: a file that cannot be read, a tokenizer that cannot be loaded.
    """
    lengths, num_replaced = [], 0
    for text, is_binary in texts_of(paths):
        if is_binary:
            lengths.append(-1)
            continue
        try:
            str(text, "utf-8")
        except UnicodeDecodeError:
            num_replaced += 1
        with tokenizing():
            lengths.append(len(tokenizer.encode(text)) + 1)
    return TextMeasures(lengths, num_replaced)
