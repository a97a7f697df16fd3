"""Tasks of indexing that tokenize: ranges of JSONL files, and chunks of text files. They need installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DynamicCPError
from megatron.trainer.data.json_text import content_of_line, encode
from megatron.trainer.data.scan import SNIFFED_BYTES, JsonLinesRange, ScanError, measured, scan_lines
from megatron.trainer.data.tokenizer import TextTokenizer


class LineReader(Protocol):
    """What reads the lines of a data set. Pickles."""

    def measure(self, line: bytes) -> list[tuple[int, ...]]:
        """Return what `scan.scan_lines` needs of a line; LineError where it is malformed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """Reads the text field of JSONL lines as tokens and the end of document; prompts with responses, too.

    A prompt is tokenized by itself and has no end; each response has one, which is learned with it.
    """

    tokenizer: TextTokenizer
    json_key: str

    def parts(self, line: bytes) -> list[NDArray[np.int64]]:
        """Return the tokens of a line: of its text alone, or of its prompt and of each response.

        Raises:
            LineError: neither is there.
        """
        content = content_of_line(line, self.json_key)
        if isinstance(content, str):
            return [self._ended(content)]
        return [self.tokenizer.encode(encode(content.prompt)), *map(self._ended, content.responses)]

    def measure(self, line: bytes) -> list[tuple[int, ...]]:
        """Return what `scan.scan_lines` needs of a line."""
        first, *answers = map(len, self.parts(line))
        return [measured(first, answers) if answers else (first,)]

    def _ended(self, text: str) -> NDArray[np.int64]:
        return np.append(self.tokenizer.encode(encode(text)), self.tokenizer.eod)


def scan_read_lines(path: str, start: int, stop: int, size_bytes: int, reader: LineReader) -> JsonLinesRange:
    """Return the lines of `path` that start at bytes start .. stop - 1, as `reader` sees them; see `scan_lines`."""
    try:
        return scan_lines(path, start, stop, size_bytes, reader.measure)
    except DynamicCPError as error:  # a tokenizer that this process cannot load
        raise ScanError(str(error)) from error


class TextMeasures(NamedTuple):
    """What `measure_text_files` found: for each file its tokens with the end of document, -1 for one that is binary."""

    lengths: list[int]
    num_replaced: int


def measure_text_files(paths: Sequence[str], tokenizer: TextTokenizer) -> TextMeasures:
    """Return the tokens of text files; `num_replaced` of them are not UTF-8.

    Raises:
        OSError, ScanError: a file that cannot be read, a tokenizer that cannot be loaded.
    """
    lengths, num_replaced = [], 0
    for path in paths:
        with open(path, "rb") as file:
            text = file.read()
        if b"\0" in text[:SNIFFED_BYTES]:
            lengths.append(-1)
            continue
        try:
            str(text, "utf-8")
        except UnicodeDecodeError:
            num_replaced += 1
        try:
            lengths.append(len(tokenizer.encode(text)) + 1)
        except DynamicCPError as error:
            raise ScanError(str(error)) from error
    return TextMeasures(lengths, num_replaced)
