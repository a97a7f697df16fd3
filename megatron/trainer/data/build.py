"""From a DataConfig to the streams of training, validation and test.

One rank calls `index_entries` for all (`index_once`); `build_splits` opens the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import tokenizer
from megatron.trainer.data.chat_reader import build_chat_reader, chat_request
from megatron.trainer.data.config import SPLIT_NAMES, DataConfig, document_ranges, parse_split
from megatron.trainer.data.documents import StoredDocuments
from megatron.trainer.data.files import FileTable, find_files, parse_blend
from megatron.trainer.data.index_cache import check_cache_path, find_index
from megatron.trainer.data.index_file import DataIndex, IndexWriter
from megatron.trainer.data.indexed import IndexedDocuments
from megatron.trainer.data.lines import TextReader
from megatron.trainer.data.mock import MockDocuments
from megatron.trainer.data.source import Source
from megatron.trainer.data.stream import SampleIndex, SampleStream, ShuffledDataset
from megatron.trainer.data.tokenizer import TextTokenizer, Tokenizer
from megatron.trainer.data.tokenizing import write_index

if TYPE_CHECKING:
    from megatron.trainer.data.chat import ChatReader
    from megatron.trainer.data.chat_format import ChatFormat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Splits:
    """The three streams; None if --split leaves no documents for it."""

    train: SampleStream
    valid: SampleStream | None
    test: SampleStream | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedEntry:
    """An entry of text or JSONL files, as the user wrote it, what precedes the names of its files, and its index."""

    name: str
    root: str
    index: DataIndex


def index_entries(config: DataConfig, on_tick: Callable[[], None] | None = None) -> tuple[IndexedEntry | None, ...]:
    """Return each entry of --data-path with its index, from the cache or new; None for .bin/.idx data.

    `on_tick` is called about twice a second during long tasks. DataError if data are missing or malformed,
    InvalidInputError if flags contradict themselves.
    """
    if config.mock:
        return ()
    built = tokenizer.build(config)
    chat_reader = build_chat_reader(config, built)
    check_cache_path(config.cache_path)
    entries, _ = parse_blend(config.data_path)
    return tuple(_index_entry(entry, config, built, chat_reader, on_tick) for entry in entries)


def _index_entry(
    entry: str, config: DataConfig, built: Tokenizer, chat_reader: ChatReader | None, on_tick: Callable[[], None] | None
) -> IndexedEntry | None:
    files = find_files(entry, config, built)
    if files is None:
        return None
    assert isinstance(built, TextTokenizer)
    request = {"kind": files.kind, "tokenizer": repr(built)}
    if chat_reader is not None:
        request = chat_request(chat_reader)
    elif files.kind == "jsonl":
        request["json_key"] = config.json_key
    reader = chat_reader or TextReader(tokenizer=built, json_key=config.json_key)

    def write(table: FileTable, writer: IndexWriter) -> None:
        write_index(files, table, request, reader, built, writer, on_tick=on_tick)

    index = find_index(files, request, write, cache_path=config.cache_path, on_tick=on_tick)
    return IndexedEntry(name=entry, root=files.root, index=index)


def build_splits(config: DataConfig, entries: Sequence[IndexedEntry | None] | None = None) -> Splits:
    """Return the streams of `config`: the same in every process, reading indexes only.

    Without blend weights the samples of all paths are shuffled together: each comes once per epoch, and a path's share
    is its share of the samples. With weights each path is a dataset with its own epochs.

    Args:
        entries: what `index_entries` returned, here or on another rank; None: call it now.

    Raises DataError: data that are missing, malformed or empty; a training split without samples. Raises
    InvalidInputError: flags that contradict themselves."""
    shares = parse_split(config.split)
    if not shares[0]:
        raise InvalidInputError(f"--split {config.split} gives the training data a share of 0: raise its first number")
    sources, weights = _open_sources(config, index_entries(config) if entries is None else entries)
    for source in sources:
        if not len(source.lengths):
            raise DataError(
                f"no documents found ({source.describe()}): check --data-path and --data-glob; "
                "pre-tokenized data needs the prefix of its .bin and .idx files"
            )
    ranges = [_ranges(source, shares) for source in sources]
    streams: dict[str, Any] = dict.fromkeys(SPLIT_NAMES)
    for split, name in enumerate(SPLIT_NAMES):
        if shares[split]:
            streams[name] = build_stream(
                name,
                [(source, bounds[split]) for source, bounds in zip(sources, ranges, strict=True)],
                weights,
                seed=config.seed,
                seq_length=config.seq_length,
                overlong=config.overlong,
                split=config.split,
            )
    return Splits(**streams)


def _ranges(source: Source, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    ranges, num_documents = document_ranges(shares, len(source.lengths)), len(source.lengths)
    bounds = [source.first_of_line(stop) if stop < num_documents else stop for _, stop in ranges]
    return tuple(pairwise([0, *bounds]))


def _open_sources(
    config: DataConfig, indexed: Sequence[IndexedEntry | None]
) -> tuple[list[Source], list[Fraction] | None]:
    built = tokenizer.build(config)
    if config.mock:
        return [MockDocuments(config.varlen_mock_config, config.seq_length, config.seed, built)], None
    chat_reader = build_chat_reader(config, built)
    chat_format = None if chat_reader is None else chat_reader.chat_format
    entries, weights = parse_blend(config.data_path)
    return [open_entry(entry, one, built, chat_format) for entry, one in zip(entries, indexed, strict=True)], weights


def open_entry(
    entry: str, indexed: IndexedEntry | None, built: Tokenizer, chat_format: ChatFormat | None = None
) -> Source:
    """Return the documents of an entry; DataError if .bin/.idx files are missing, truncated or contradictory."""
    if indexed is None:
        return IndexedDocuments(entry, built)
    return StoredDocuments(entry, indexed.root, indexed.index, built.vocab_size, chat_format)


def build_stream(
    name: str,
    parts: Sequence[tuple[Source, tuple[int, int]]],
    weights: Sequence[Fraction] | None,
    *,
    seed: int,
    seq_length: int,
    overlong: str,
    split: str | None,
) -> SampleStream | None:
    """Return the stream of one split; None, with a warning, for a validation or test split without samples.

    Args:
        name: one of SPLIT_NAMES.
        parts: sources, each with the range (first, last + 1) of its documents.
        weights: of the parts; None: the samples of all parts are shuffled together.
        seed, seq_length, overlong: see `DataConfig`.
        split: for messages; None: each split has its own sources.

    Raises DataError: a training split without samples."""
    indexes = [SampleIndex.build(source, *bounds, seq_length=seq_length, overlong=overlong) for source, bounds in parts]
    groups = [indexes] if weights is None else [[index] for index in indexes]
    datasets = [ShuffledDataset(group, (seed, SPLIT_NAMES.index(name), number)) for number, group in enumerate(groups)]
    for dataset in datasets:
        if dataset.num_samples:
            continue
        num_documents = sum(part.num_documents for part in dataset.parts)
        described = "; ".join(part.source.describe() for part in dataset.parts)
        share = "" if split is None else f"--split {split}, "
        message = (
            f"the {name} split of {described} has {num_documents} documents and 0 samples "
            f"({share}--seq-length {seq_length}, --overlong {overlong})"
        )
        if name == "train":
            raise DataError(f"{message}: add data or change one of them")
        logger.warning("%s: it is left out", message)
    kept = [number for number, dataset in enumerate(datasets) if dataset.num_samples]
    if not kept:
        return None
    weights = weights or [Fraction(1)]
    return SampleStream(name, [datasets[number] for number in kept], [weights[number] for number in kept])
