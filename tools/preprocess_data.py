"""JSONL or text files -> Megatron's .bin/.idx, tokenized once, by flags that Megatron-LM's tool has.

python -m tools.preprocess_data --input corpus.jsonl --output-prefix data/corpus --workers 8 --append-eod \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR

    input (--input: files, globs, folders) -> pieces of 256 KiB -> worker processes tokenize -> one writer, in order
    -> PREFIX_KEY_document.bin and .idx beside their names, read back, renamed

The output does not depend on --workers. It appears whole or not at all: what is being written has another name, and
the .idx, without which nobody reads the .bin, comes last. The files hold tokens only; chats with a loss mask are
trained from their JSONL (--sft).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError, DynamicCPError, InvalidInputError
from dynamic_cp.lengths.megatron_index import read_megatron_index
from megatron.trainer.data import tokenizer
from megatron.trainer.data.config import TOKENIZERS, DataConfig
from megatron.trainer.data.files import DocumentFiles, FileTable, find_files
from megatron.trainer.data.source import count
from megatron.trainer.data.tokenizer import TextTokenizer
from megatron.trainer.data.tokenizing import (
    TOKENIZED_PIECE_BYTES,
    checked_lines,
    lines_of_files,
    mapped,
    texts_of_files,
    units_of,
)
from megatron.trainer.data.workers import Progress, num_usable_cpus
from tools.tokenize_tasks import Task, tokenize_files, tokenize_lines

logger = logging.getLogger("preprocess_data")

SUFFIXES = (".bin", ".idx")  # in this order: nobody reads a .bin that has no .idx


class Output:
    """One pair of files that is being written under temporary names; `publish` makes it real, `discard` removes it.

    Args:
        prefix: of the files.
        dtype: of a token.
    """

    def __init__(self, prefix: str, dtype: Any) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix = prefix
        self._paths = [f"{prefix}.{os.uname().nodename}.{os.getpid()}.tmp{suffix}" for suffix in SUFFIXES]
        self._builder = IndexedDatasetBuilder(self._paths[0], dtype=dtype)
        self._dtype = np.dtype(dtype)
        self._crc32 = 0
        self._lengths: list[int] = []

    def add(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Append documents.

        Raises:
            DataError: they cannot be written.
        """
        stored = tokens.astype(self._dtype)
        self._crc32 = zlib.crc32(stored.tobytes(), self._crc32)
        try:
            for document in np.split(stored, np.cumsum(lengths)[:-1]) if len(lengths) else []:
                self._builder.add_document(document, [len(document)])
        except OSError as error:  # here, because where the input is read an OSError is one of reading
            raise _cannot_write(self._paths[0], error) from error
        self._lengths += lengths.tolist()

    def finish(self) -> tuple[int, int]:
        """Write the index and read both files back; return documents and tokens.

        Raises:
            DataError: no documents, or files that read back otherwise than they were written.
        """
        if not self._lengths:
            raise DataError(f"{self.prefix} would have no documents: every text of --input is empty or binary")
        self._builder.finalize(self._paths[1])
        crc32 = 0
        for path in self._paths:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                while path == self._paths[0] and (piece := file.read(1 << 20)):
                    crc32 = zlib.crc32(piece, crc32)
        index = read_megatron_index(self._paths[1])
        if crc32 != self._crc32 or index.document_tokens.tolist() != self._lengths:
            raise DataError(
                f"{self.prefix}.bin reads back with checksum {crc32:#x} and {len(index.document_tokens)} documents, "
                f"written were {self._crc32:#x} and {len(self._lengths)}: look at the disk"
            )
        return len(self._lengths), sum(self._lengths)

    def publish(self) -> None:
        """Give the files their names."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self.prefix}.idx")  # an old index must not describe the new .bin, however this ends
        for path, suffix in zip(self._paths, SUFFIXES, strict=True):
            os.replace(path, f"{self.prefix}{suffix}")

    def discard(self) -> None:
        """Remove what is not finished."""
        with suppress(OSError):  # a full disk, once more: what is still in the buffer is not wanted
            self._builder.data_file.close()
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path)


def _cannot_write(path: str, error: OSError) -> DataError:
    return DataError(f"cannot write {error.filename or path}: {error.strerror or error}; check room and permissions")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's flags."""
    parser = argparse.ArgumentParser(prog="preprocess_data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--input", nargs="+", required=True, help="JSONL or text: files, globs or folders, in order")
    parser.add_argument("--data-glob", default="**/*", help="files of a folder")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="text fields; each makes files of its own")
    parser.add_argument("--output-prefix", required=True, help="files are PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--tokenizer-type", choices=TOKENIZERS, default="HuggingFaceTokenizer")
    parser.add_argument("--tokenizer-model", metavar="DIR", help="local folder with tokenizer.json")
    parser.add_argument("--vocab-size", type=int, help="more ids than the tokenizer has, as the model will have")
    parser.add_argument("--eod-id", type=int, help="ends a document, instead of eos_token")
    parser.add_argument("--append-eod", action="store_true", help="store an end of document after every document")
    parser.add_argument("--workers", type=int, default=num_usable_cpus(), help="processes that tokenize")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    return parser


def preprocess(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Write the files; return prefix -> (documents, tokens).

    Raises:
        DynamicCPError: bad input or flags; no file is left behind and none was replaced.
    """
    from megatron.core.datasets.indexed_dataset import DType

    if args.workers < 1:
        raise InvalidInputError(f"--workers is {args.workers}, at least 1 is needed")
    if len(set(args.json_keys)) != len(args.json_keys):
        raise InvalidInputError(f"--json-keys names a field twice: {' '.join(args.json_keys)}")
    config = DataConfig(
        seq_length=1,
        data_path=tuple(args.input),
        data_glob=args.data_glob,
        tokenizer=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        eod_id=args.eod_id,
    )
    built = tokenizer.build(config)
    if not isinstance(built, TextTokenizer):
        raise InvalidInputError(f"--tokenizer-type {args.tokenizer_type} cannot read text: use another")
    inputs = []
    for entry in args.input:
        files = find_files(entry, config, built)
        if files is None:
            raise InvalidInputError(f"--input {entry} is .bin/.idx data already: give JSONL or text")
        inputs.append(files)
    if len(args.json_keys) > 1 and any(files.kind == "text" for files in inputs):
        raise InvalidInputError(
            f"--json-keys has {len(args.json_keys)} fields, text files have one document: give JSONL"
        )
    prefixes = [f"{args.output_prefix}_{key}_document" for key in args.json_keys]
    for prefix in prefixes:
        for path in (prefix + suffix for suffix in SUFFIXES):
            if os.path.exists(path) and not args.force:
                raise InvalidInputError(f"{path} is there already: name another --output-prefix or add --force")
    dtype = DType.optimal_dtype(built.vocab_size)
    task = Task(tokenizer=built, keys=tuple(args.json_keys), append_eod=args.append_eod, dtype=np.dtype(dtype).str)
    outputs: list[Output] = []
    try:
        os.makedirs(os.path.dirname(args.output_prefix) or os.curdir, exist_ok=True)
        for prefix in prefixes:
            outputs.append(Output(prefix, dtype))  # one by one: those that are open are removed below
        for files in inputs:
            _write(files, task, outputs, args.workers)
        written = {output.prefix: output.finish() for output in outputs}
        for output in outputs:
            output.publish()
        return written
    except OSError as error:
        raise _cannot_write(args.output_prefix, error) from error
    finally:
        for output in outputs:
            output.discard()


def _write(files: DocumentFiles, task: Task, outputs: Sequence[Output], num_processes: int) -> None:
    """Append the documents of one --input to the outputs."""
    started_s = time.perf_counter()
    table = FileTable.of(files.root, files.names)
    sizes_bytes = table.sizes_bytes
    if (sizes_bytes < 0).any():
        name = files.names[int(np.argmin(sizes_bytes))]
        raise DataError(f"{files.root}{name} is not a regular file: copy it to one")
    total_bytes = int(sizes_bytes.sum())
    size = TOKENIZED_PIECE_BYTES
    num_processes = max(1, min(num_processes, -(-total_bytes // size)))
    num_empty = num_binary = num_documents = 0
    is_text = files.kind == "text"
    units = [] if is_text else units_of(files, table)
    pieces = texts_of_files(files, table, size) if is_text else lines_of_files(files, table, units, size)
    function = tokenize_files if is_text else tokenize_lines
    with (
        Progress(f"tokenizing {files.name}", total_bytes, "bytes") as progress,
        closing(mapped(function, pieces, (task,), num_processes, files.root)) as results,
    ):
        for piece, part in results if is_text else checked_lines(units, results):
            num_empty, num_binary = num_empty + part.num_empty, num_binary + part.num_binary
            num_documents += len(part.lengths[0])
            for output, tokens, lengths in zip(outputs, part.tokens, part.lengths, strict=True):
                output.add(tokens, lengths)
            progress.advance(piece.num_bytes)
    seconds = time.perf_counter() - started_s
    words = [count(num_documents, "document"), f"{num_empty} empty", f"{num_binary} binary files left out"]
    logger.info(
        "%s: %s; %.1f MB in %.1f s by %s", files.name, ", ".join(words), total_bytes / 1e6, seconds,
        count(num_processes, "process", "processes"),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code: 2 for bad input."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)  # so that what is half written is removed

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, leave)
    try:
        written = preprocess(args)
    except DynamicCPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for prefix, (num_documents, num_tokens) in written.items():
        print(f"{prefix}: {count(num_documents, 'document')}, {num_tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
