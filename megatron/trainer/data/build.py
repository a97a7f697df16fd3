"""From a DataConfig to the streams of training, validation and test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.trainer.data import tokenizer
from megatron.trainer.data.chat_reader import build_chat_reader
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.data_path import find_files, parse_blend
from megatron.trainer.data.dataset import ShuffledDataset
from megatron.trainer.data.entries import IndexedEntry, index_entries, open_entry
from megatron.trainer.data.mock import MockDocuments
from megatron.trainer.data.samples import SampleIndex
from megatron.trainer.data.source import Source
from megatron.trainer.data.split import SPLIT_NAMES, document_ranges, parse_split
from megatron.trainer.data.stream import SampleStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Splits:
    """The three streams; None where --split leaves no documents for evaluation."""

    train: SampleStream
    valid: SampleStream | None
    test: SampleStream | None


def build_splits(config: DataConfig, entries: Sequence[IndexedEntry | None] | None = None) -> Splits:
    """Return the streams of `config`: the same in every process, reading indexes only.

    Without blend weights the samples of all paths are shuffled together: each comes once per epoch, so a path's part is
    in proportion to its samples. With weights each path is a dataset of its own with its own epochs.

    Args:
        entries: what `index_entries` found, here or on another rank; None: it is done now.

    Raises:
        DataError: data that is missing, malformed or empty; a training split without samples.
        InvalidInputError: flags that contradict themselves.
    """
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
    """Return (first, last + 1) of each share's documents; those of one line stay together."""
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
    entries, weights = parse_blend(config.data_path)
    for entry, index in zip(entries, indexed, strict=True):
        if index is not None and index.has_copies:
            find_files(entry, config, built)  # another host writes its own where it does not share a folder
    return [
        open_entry(entry, index, built, chat_reader) for entry, index in zip(entries, indexed, strict=True)
    ], weights


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
        name: of SPLIT_NAMES.
        parts: sources, each with the range (first, last + 1) of its documents.
        weights: of the parts; None: the samples of all parts are shuffled together.
        seed, seq_length, overlong: see `DataConfig`.
        split: for messages; None: each split has sources of its own.

    Raises:
        DataError: a training split without samples.
    """
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
