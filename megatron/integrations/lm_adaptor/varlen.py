"""--use-varlen-dataset: each document of Megatron-LM's data flags is a sample of its own length.

Megatron-LM itself says which files, weights and splits its flags mean, which tokenizer is used and what is masked. Only
the order of the samples is ours.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.integrations.lm_adaptor.checkout import tokenizer_module
from megatron.trainer.data.build import build_stream
from megatron.trainer.data.config import SPLIT_NAMES, document_ranges, parse_split
from megatron.trainer.data.indexed import IndexedDocuments
from megatron.trainer.data.mock import MockDocuments
from megatron.trainer.data.source import Source
from megatron.trainer.data.stream import SampleStream
from megatron.trainer.data.tokenizer import NullTokenizer

logger = logging.getLogger(__name__)

Shares = tuple[float, ...]
"""Shares of the documents that training, validation and test get."""

SplitSources = Sequence[tuple[Sequence[Source], Sequence[Fraction] | None] | None]
"""Sources and their weights for training, validation and test; None: nothing is read."""

PATH_FLAGS = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
)
_MOCK_SPLIT = "969,30,1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """The .bin/.idx prefixes of a split; without weights each counts by its number of documents."""

    prefixes: tuple[str, ...]
    weights: tuple[Fraction, ...] | None


class VarlenDataset(MegatronDataset):
    """A data set of Megatron-LM's form over a stream of samples with their own lengths, masked as its GPTDataset does.
    Training asks for `num_samples` of the endless stream; the base class takes the padding id from `tokenizer`."""

    def __init__(
        self, stream: SampleStream, num_samples: int, *, tokenizer: Any, eod: int, args: argparse.Namespace
    ) -> None:
        config = SimpleNamespace(tokenizer=tokenizer, allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens)
        super().__init__(stream, None, np.arange(0), num_samples, Split[stream.name], config)
        self._eod, self._eod_mask_loss = eod, args.eod_mask_loss

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return []  # they would name a cache, and there is none

    def __len__(self) -> int:
        return int(self.num_samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.dataset.read(index)
        tokens, labels = torch.from_numpy(sample.tokens), torch.from_numpy(sample.labels)
        _, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            tokens,
            self._eod,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=self._eod_mask_loss,
            create_attention_mask=False,
        )
        if self._pad_token_id is not None:  # not in place: labels may lie in the file
            loss_mask = loss_mask.masked_fill(labels == self._pad_token_id, 0.0)
            tokens, labels = (ids.masked_fill(ids == self._pad_token_id, 0) for ids in (tokens, labels))
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenData:
    """The documents of a run: streams of training, validation and test, their tokenizer, and the id that ends each."""

    streams: tuple[SampleStream | None, ...]
    tokenizer: Any
    eod: int

    def data_sets(
        self, args: argparse.Namespace, num_samples: Sequence[int | None]
    ) -> tuple[VarlenDataset | None, ...]:
        """Return the data sets of training, validation and test, with as many samples as Megatron-LM asks for."""
        return tuple(
            VarlenDataset(stream, wanted, tokenizer=self.tokenizer, eod=self.eod, args=args)
            if stream is not None and wanted
            else None
            for stream, wanted in zip(self.streams, num_samples, strict=True)
        )

    def fingerprint(self) -> str:
        """Return a hash of all streams; see `SampleStream.fingerprint`."""
        parts = [stream.fingerprint() for stream in self.streams if stream is not None]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def build_on_all_ranks(args: argparse.Namespace, device: torch.device) -> VarlenData:
    """Return `build`'s documents, the same on all ranks; an error is the same on all, too. Collective over the job."""
    from megatron.dynamic_cp.agreement.verify import check_same_digest, run_on_all_ranks

    data = run_on_all_ranks(lambda: build(args, data_tokenizer(args)), device)
    check_same_digest(run_on_all_ranks(data.fingerprint, device), "the data of --use-varlen-dataset", device)
    origin = "--eod-id" if args.eod_id is not None else f"the EOD of --tokenizer-type {args.tokenizer_type}"
    log_single_rank(logger, logging.INFO, f"dynamic CP: documents end with id {data.eod}, {origin}")
    for stream in data.streams:
        if stream is not None:
            log_single_rank(logger, logging.INFO, f"dynamic CP: data, {stream.describe()}")
    return data


def data_tokenizer(args: argparse.Namespace) -> Any:
    """Return the tokenizer that Megatron-LM's scripts give their data sets and its tools/preprocess_data.py takes;
    InvalidInputError if megatron-core cannot build it. Without --legacy-tokenizer it is not the one that Megatron-LM
    builds at start, and its end of document may have another id."""
    legacy = getattr(args, "legacy_tokenizer", None)  # newer checkouts have no such flag
    if legacy:
        return importlib.import_module("megatron.training.global_vars").get_tokenizer()
    core = importlib.import_module(tokenizer_module())
    try:
        return core.build_tokenizer(args)
    except Exception as error:  # any library's: some look for files on the network
        remedy = "choose another" if legacy is None else "give --legacy-tokenizer if the documents were made with it"
        raise InvalidInputError(
            f"Megatron-LM's data sets cannot have --tokenizer-type {args.tokenizer_type}: {type(error).__name__}: "
            f"{error}; {remedy}"
        ) from error


def document_ids(args: argparse.Namespace, tokenizer: Any) -> NullTokenizer:
    """Return which ids documents may hold and which one ends them; InvalidInputError if none does, or it is no id."""
    num_ids = min(int(tokenizer.vocab_size), int(args.padded_vocab_size))
    eod = _eod_of(tokenizer) if args.eod_id is None else args.eod_id
    if eod is None:
        raise InvalidInputError(
            f"--tokenizer-type {args.tokenizer_type} has no token that ends a document: give its id with --eod-id"
        )
    if not 0 <= eod < num_ids:
        raise InvalidInputError(
            f"the end of document {eod} is not among the {num_ids} ids of --tokenizer-type {args.tokenizer_type}: give "
            "one of them with --eod-id"
        )
    return NullTokenizer(vocab_size=num_ids, eod=eod)


def _eod_of(tokenizer: Any) -> int | None:
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        return None
    return None if eod is None or eod < 0 else int(eod)  # sentencepiece has -1 for none


def build(args: argparse.Namespace, tokenizer: Any) -> VarlenData:
    """Return the documents that Megatron-LM's arguments mean. DataError: files that are missing or damaged, or a split
    without samples that is read. InvalidInputError: flags that contradict themselves."""
    ids = document_ids(args, tokenizer)
    shares, splits = _mock(args, ids) if args.mock_data else _indexed(args, ids)
    streams = []
    for number, (name, split) in enumerate(zip(SPLIT_NAMES, splits, strict=True)):
        if split is None or (shares is not None and not shares[number]):
            streams.append(None)
            continue
        sources, weights = split
        ranges = [
            (0, len(source.lengths)) if shares is None else document_ranges(shares, len(source.lengths))[number]
            for source in sources
        ]
        streams.append(
            build_stream(
                name,
                list(zip(sources, ranges, strict=True)),
                weights,
                seed=args.seed,
                seq_length=args.seq_length,
                overlong=args.overlong,
                split=args.split,
            )
        )
    train, valid, _ = streams
    if train is None and not args.skip_train:
        raise DataError("no training data: give --train-data-path, or --split a first number above 0")
    if valid is None and args.eval_iters > 0:
        raise DataError(
            f"--eval-iters is {args.eval_iters}, and no validation data are left: give --valid-data-path, or --split a "
            "second number that leaves some, or --eval-iters 0"
        )
    return VarlenData(streams=tuple(streams), tokenizer=tokenizer, eod=ids.eod)


def _mock(args: argparse.Namespace, ids: NullTokenizer) -> tuple[Shares, SplitSources]:
    given = _given_paths(args)
    if given:
        raise InvalidInputError(f"--mock-data and {given[0]} exclude each other: leave one of them out")
    source = MockDocuments(args.varlen_mock_dataset_config_json, args.seq_length, args.seed, ids)
    return parse_split(args.split or _MOCK_SPLIT), [([source], None)] * len(SPLIT_NAMES)


def _indexed(args: argparse.Namespace, ids: NullTokenizer) -> tuple[Shares | None, SplitSources]:
    shares, blends = read_blends(args)
    prefixes = dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes)
    opened = {prefix: IndexedDocuments(prefix, ids) for prefix in prefixes}
    return shares, [
        None if blend is None else ([opened[prefix] for prefix in blend.prefixes], blend.weights) for blend in blends
    ]


def read_blends(args: argparse.Namespace) -> tuple[Shares | None, list[Blend | None]]:
    """Return the shares of --split (None if each split has its own paths), and the blend of each split;
    InvalidInputError for no paths, paths that exclude each other, or what Megatron-LM itself cannot read."""
    given = _given_paths(args)
    if not given:
        raise InvalidInputError("no data: give --data-path, --train-data-path or one of its variants, or --mock-data")
    whole, per_split = (
        [flag for flag in given if (flag in ("--data-path", "--data-args-path")) == is_whole]
        for is_whole in (True, False)
    )
    if whole and per_split:
        raise InvalidInputError(f"{whole[0]} and {per_split[0]} exclude each other: leave one of them out")
    if bool(whole) != (args.split is not None):
        change = "give three shares such as 969,30,1" if whole else "leave it out"
        raise InvalidInputError(f"--split is {args.split} with {given[0]}: {change}")
    utils = importlib.import_module("megatron.training.utils")
    try:
        blend, blends = utils.get_blend_and_blend_per_split(args)
        with np.errstate(invalid="ignore"):  # a sum of 0
            shares = tuple(parse_and_normalize_split(args.split)) if whole else None
    except (AssertionError, KeyError, OSError, ValueError) as error:
        raise InvalidInputError(
            f"{', '.join(given)}: Megatron-LM cannot read this, {type(error).__name__}: {error}"
        ) from error
    if shares is not None and not math.isfinite(sum(shares)):
        raise InvalidInputError(f"{given[0]}: --split {args.split} has no share above 0: give one")
    return shares, [_as_blend(one, given) for one in ([blend] * len(SPLIT_NAMES) if whole else blends)]


def _given_paths(args: argparse.Namespace) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in PATH_FLAGS if getattr(args, name) is not None]


def _as_blend(blend: tuple[Sequence[str], Sequence[float] | None] | None, given: Sequence[str]) -> Blend | None:
    if blend is None:
        return None
    prefixes, weights = blend
    if weights is None:
        return Blend(prefixes=tuple(prefixes), weights=None)
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not 0 < weight < math.inf:
            raise InvalidInputError(f"{', '.join(given)}: weight {weight} for {prefix}, it must be > 0: leave it out")
    # Exact as written: 0.3 is three tenths.
    return Blend(prefixes=tuple(prefixes), weights=tuple(Fraction(str(weight)) for weight in weights))
