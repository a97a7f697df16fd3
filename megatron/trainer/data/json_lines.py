"""JSONL files as documents: one object per line with a text field, or with a prompt and responses, found through an
index made by one scan.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.types import SharedQuestion
from megatron.trainer.data import questions
from megatron.trainer.data.file_table import FileTable
from megatron.trainer.data.index_cache import DocumentFiles
from megatron.trainer.data.json_text import LineError
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.line_table import LineTable
from megatron.trainer.data.progress import Progress
from megatron.trainer.data.questions import Questions
from megatron.trainer.data.scan import JsonLinesRange, ScanError, scan_json_lines
from megatron.trainer.data.source import count, reading
from megatron.trainer.data.token_scan import LineReader, TextReader, scan_read_lines
from megatron.trainer.data.tokenizer import ByteTokenizer, TextTokenizer
from megatron.trainer.data.unpacked import line_name
from megatron.trainer.data.workers import MAX_PROCESSES, map_in_processes, num_usable_cpus

logger = logging.getLogger(__name__)

RANGE_BYTES = 8 << 20
BYTES_PER_PROCESS = 32 << 20  # less is parsed in the time that a process takes to start
# The same for tokenizing, which is fifty times as much work.
TOKENIZED_RANGE_BYTES = 256 << 10
TOKENIZED_BYTES_PER_PROCESS = 1 << 20


def json_request(json_key: str, tokenizer: TextTokenizer) -> dict[str, str]:
    """Return what decides the lengths of JSONL files besides their contents."""
    return {"kind": "jsonl", "json_key": json_key, "tokenizer": repr(tokenizer)}


def index_json_lines(
    files: DocumentFiles,
    table: FileTable,
    request: Mapping[str, str],
    *,
    reader: LineReader | None = None,
    num_processes: int | None = None,
    on_tick: Callable[[], None] | None = None,
) -> LengthIndex:
    """Return the index of JSONL files; the same for any number of processes.

    Columns beside those of the table: `lengths`, and `offsets_bytes` of their lines, int64 [D]; `file_documents`, which
    document is the first of each file, int64 [F + 1]; `blanks`, for each blank line which document comes next, and
    `file_blanks`, which blank line is the first of each file: they give line numbers. Of chats also `first_targets`,
    int64 [D], and `continued`, the documents that are of the line of the document before, where there are any; where
    lines have prompts with responses also the columns of `questions`.

    Args:
        reader: tokenizes the lines; None: their texts have as many tokens as bytes.
        num_processes: default: one for every 32 MiB, when they are tokenized for every 1 MiB, at most as many as there
            are CPUs.

    Raises:
        DataError: the first line that is not a JSON object with a string under the text field.
    """
    sizes_bytes = table.sizes_bytes.tolist()
    paths = [files.root + name for name in files.names]
    for path, size_bytes in zip(paths, sizes_bytes, strict=True):
        if size_bytes < 0:
            raise DataError(f"{path} is not a regular file: JSONL must be read twice; copy it to a file", path=path)
    total_bytes = sum(sizes_bytes)
    range_bytes = RANGE_BYTES if reader is None else TOKENIZED_RANGE_BYTES
    if num_processes is None:
        bytes_per_process = BYTES_PER_PROCESS if reader is None else TOKENIZED_BYTES_PER_PROCESS
        num_processes = max(1, min(num_usable_cpus(), MAX_PROCESSES, total_bytes // bytes_per_process))
    owners = [file for file, size in enumerate(sizes_bytes) for _ in range(0, size, range_bytes)]
    tasks = [
        (
            path,
            start,
            min(start + range_bytes, size_bytes),
            size_bytes,
            request["json_key"] if reader is None else reader,
        )
        for path, size_bytes in zip(paths, sizes_bytes, strict=True)
        for start in range(0, size_bytes, range_bytes)
    ]
    scan = scan_json_lines if reader is None else scan_read_lines
    started_s = time.perf_counter()
    ranges: list[JsonLinesRange] = []
    num_lines = [0] * len(paths)
    with (
        reading(files.root),  # the error names the file
        Progress(f"indexing {files.name}", total_bytes, "bytes", on_tick) as progress,
        closing(map_in_processes(scan, tasks, num_processes, packages=reader is not None)) as results,
    ):
        for file, (_, start, stop, *_), result in zip(owners, tasks, _as_data_errors(results), strict=True):
            if result.error is not None:
                line, what = result.error
                where = line_name(files.root, files.names[file], num_lines[file] + line + 1)
                raise DataError(f"{where}{what}", where=where)
            num_lines[file] += result.num_lines
            ranges.append(result)
            progress.advance(stop - start)
    seconds = time.perf_counter() - started_s
    logger.info(
        "%s: %.1f MB of JSONL parsed in %.2f s by %s (%.0f MB/s)",
        files.name,
        total_bytes / 1e6,
        seconds,
        count(num_processes, "process", "processes"),
        total_bytes / 1e6 / seconds,
    )
    num_documents = np.array([len(part.lengths) for part in ranges], dtype=np.int64)
    num_blank = np.array([len(part.blanks) for part in ranges], dtype=np.int64)
    first_documents = np.cumsum(num_documents) - num_documents
    of_chats: dict[str, NDArray[np.int64]] = {}
    counts = {"blank lines": int(num_blank.sum())}
    if request["kind"] == "chat":
        of_chats["first_targets"] = _joined([part.first_targets for part in ranges])
        counts["tokens of assistants"] = sum(part.num_targets for part in ranges)
        continued = _joined([part.continued for part in ranges])
        if len(continued):
            of_chats["continued"] = continued + np.repeat(first_documents, [len(part.continued) for part in ranges])
    return LengthIndex.build(
        request,
        counts,
        table.columns()
        | {
            "lengths": _joined([part.lengths for part in ranges]),
            "offsets_bytes": _joined([part.offsets_bytes for part in ranges]),
            "file_documents": _firsts(owners, num_documents, len(paths)),
            "blanks": _joined([part.blanks for part in ranges]) + np.repeat(first_documents, num_blank),
            "file_blanks": _firsts(owners, num_blank, len(paths)),
        }
        | of_chats
        | questions.columns(
            _joined([part.questions for part in ranges])
            + np.repeat(first_documents, [len(part.questions) for part in ranges]),
            _joined([part.num_answers for part in ranges]),
            _joined([part.answers for part in ranges]),
        ),
    )


def _as_data_errors(results: Iterable[JsonLinesRange]) -> Iterator[JsonLinesRange]:
    try:
        yield from results
    except ScanError as error:
        raise DataError(str(error)) from error


def _joined(parts: list[array[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.frombuffer(part, dtype=np.int64) for part in parts)])


def _firsts(owners: list[int], numbers: NDArray[np.int64], num_files: int) -> NDArray[np.int64]:
    """Return how many things come before each file, and in all: int64 [F + 1]."""
    firsts = np.zeros(num_files + 1, dtype=np.int64)
    np.add.at(firsts, np.array(owners, dtype=np.int64) + 1, numbers)
    return np.cumsum(firsts)


class JsonLines:
    """One document per line: its text field and the end of document. Blank lines are counted.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `index_json_lines`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, tokenizer: TextTokenizer) -> None:
        self._name = name
        self._lines = LineTable(root, index)
        self._reader = TextReader(tokenizer=tokenizer, json_key=index.request["json_key"])
        self._num_blank = index.counts["blank lines"]
        self.lengths = index.columns["lengths"]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a line, reading only that line."""
        return np.concatenate(self._parts(document))[start:stop]

    def document_name(self, document: int) -> str:
        """Return the file and line number."""
        return self._lines.name(document)

    def describe(self) -> str:
        """Return the number of lines and of blank ones."""
        words = f"{self._name}: {count(len(self.lengths), 'JSON line')}"
        return words + (f", {count(self._num_blank, 'blank line')} skipped" if self._num_blank else "")

    def _parts(self, document: int) -> list[NDArray[np.int64]]:
        """Return `TextReader.parts` of a line, of as many tokens as its index says."""
        try:
            parts = self._reader.parts(self._lines.read(document))
        except LineError as error:
            raise self._lines.changed_line(document) from error
        num_tokens = sum(map(len, parts))
        if num_tokens != self.lengths[document]:
            unit = "bytes" if isinstance(self._reader.tokenizer, ByteTokenizer) else "tokens"
            raise self._lines.changed_line(document, num_tokens - 1, int(self.lengths[document]) - 1, f"{unit} of text")
        return parts


class QuestionLines(JsonLines):
    """JSON lines of which some or all are prompts with responses: a document is both, the responses are learned.

    Args: as `JsonLines`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, tokenizer: TextTokenizer) -> None:
        super().__init__(name, root, index, tokenizer)
        self._questions = Questions(index)
        self.has_masks = self._questions.has_masks
        self.first_targets = self._questions.first_targets()

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return tokens start .. stop - 1 of a line, and which of them are no prompt's."""
        parts = self._parts(document)
        answers = self._questions.answers(document)
        if [len(part) for part in parts[1:]] != answers:
            raise self._lines.changed_line(document)
        tokens = np.concatenate(parts)
        is_target = np.arange(len(tokens)) >= (len(parts[0]) if answers else 0)
        return tokens[start:stop], is_target[start:stop]

    def mask(self, document: int, num_predicted: int) -> SharedQuestion | None:
        """Return the mask of the first tokens of a line."""
        return self._questions.mask(document, num_predicted)

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of lines."""
        return self._questions.identity()

    def describe(self) -> str:
        """Return the number of lines, of prompts and of their responses."""
        return super().describe() + self._questions.describe()
