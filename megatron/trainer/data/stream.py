"""The stream of samples of one split: which pieces of which documents are trained on (`--overlong`), in which order.
The sample at position p is a function of (seed, p), on every rank."""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.types import Branches
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, sample_of
from megatron.trainer.data.source import Source, count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleIndex:
    """The samples of a range of documents of one source, in document order.

    A document of n tokens, its end of document included, predicts its last n - 1 tokens; one with n < 2 is empty and
    makes no sample. If n - 1 > seq_length it is overlong: an error, truncated, dropped, or split into consecutive
    pieces. Piece k reads tokens from k * seq_length on and predicts those after them, so every token but the document's
    first is predicted exactly once. Memory grows with documents, not with samples.

    Of chats and prompts with responses only some tokens are learned. If truncation leaves none, there is no sample.
    They are never split, because later pieces would lack the prompt.

    Attributes:
        documents: int64 [D], the documents that make samples.
        num_predicted: int64 [D], tokens that each of them predicts.
        first_samples: int64 [D + 1], number of samples before each of them.
    """

    source: Source
    seq_length: int
    overlong: str
    documents: NDArray[np.int64]
    num_predicted: NDArray[np.int64]
    first_samples: NDArray[np.int64]
    num_documents: int
    num_empty: int
    num_overlong: int
    num_untargeted: int

    @classmethod
    def build(
        cls, source: Source, first_document: int, last_document: int, *, seq_length: int, overlong: str
    ) -> SampleIndex:
        """Return the samples of documents first_document .. last_document - 1. DataError if one is overlong and
        `overlong` is "error", or "split" and it begins with a prompt."""
        num_predicted = source.lengths[first_document:last_document] - 1
        first_targets = np.ones_like(num_predicted)
        if source.first_targets is not None:
            first_targets = source.first_targets[first_document:last_document]
        too_long = num_predicted > seq_length
        num_overlong = int(too_long.sum())
        refused = np.zeros_like(too_long)
        if overlong == "error":
            refused = too_long
        elif overlong == "split":
            refused = too_long & (first_targets > 1)
        if refused.any():
            document = first_document + int(np.argmax(refused))
            others = "split, truncate or drop" if source.first_targets is None else "truncate or drop"
            why = ", and --overlong split would part its responses from their prompt" if overlong == "split" else ""
            raise DataError(
                f"{source.document_name(document)} predicts {source.lengths[document] - 1} tokens, --seq-length is "
                f"{seq_length} ({int(refused.sum())} such documents){why}: raise --seq-length or choose --overlong "
                f"{others}"
            )
        kept = num_predicted >= 1
        num_empty = len(kept) - int(kept.sum())
        if overlong == "drop":
            kept &= ~too_long
        untargeted = np.zeros_like(kept)
        if overlong == "truncate":
            untargeted = kept & (first_targets > seq_length)
            kept &= ~untargeted
        documents = np.flatnonzero(kept)
        num_predicted = num_predicted[documents]
        if overlong == "truncate":
            num_predicted = np.minimum(num_predicted, seq_length)
        first_samples = np.zeros(len(documents) + 1, dtype=np.int64)
        np.cumsum(-(-num_predicted // seq_length), out=first_samples[1:])
        return cls(
            source=source,
            seq_length=seq_length,
            overlong=overlong,
            documents=documents + first_document,
            num_predicted=num_predicted,
            first_samples=first_samples,
            num_documents=last_document - first_document,
            num_empty=num_empty,
            num_overlong=num_overlong,
            num_untargeted=int(untargeted.sum()),
        )

    @property
    def num_samples(self) -> int:
        return int(self.first_samples[-1])

    @property
    def num_tokens(self) -> int:
        return int(self.num_predicted.sum())

    def seqlens(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the predicted tokens of samples 0 <= numbers < num_samples, of the same shape."""
        rows, starts = self._locate(numbers)
        seqlens: NDArray[np.int64] = np.minimum(self.num_predicted[rows] - starts, self.seq_length)
        return seqlens

    def read(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return a sample's seqlen + 1 tokens, inputs and the last label, and which are learned (None: all)."""
        return self.source.read_targeted(*self._piece(number))

    def masks(self, numbers: NDArray[np.int64]) -> list[Branches | None]:
        """Return the masks of samples 0 <= numbers < num_samples; None for a causal one."""
        rows, _ = self._locate(numbers)  # a document with a mask is one sample
        documents, num_predicted = self.documents[rows].tolist(), self.num_predicted[rows].tolist()
        return [self.source.mask(*piece) for piece in zip(documents, num_predicted, strict=True)]

    def _piece(self, number: int) -> tuple[int, int, int]:
        row, start = (int(value[0]) for value in self._locate(np.array([number])))
        stop = start + min(int(self.num_predicted[row]) - start, self.seq_length) + 1
        return int(self.documents[row]), start, stop

    def _locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows in `documents` and the first tokens of samples."""
        rows = np.searchsorted(self.first_samples, numbers, side="right") - 1
        return rows, (numbers - self.first_samples[rows]) * self.seq_length


def shuffled(num_samples: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a permutation of 0 .. num_samples - 1.

    DEVIATION: sorts random words instead of calling Generator.permutation. Reason: numpy guarantees the raw words of a
    bit generator but not the methods of a Generator, and a checkpoint must resume with another numpy.
    """
    keys = np.random.Philox(np.random.SeedSequence(seed)).random_raw(num_samples)
    index_bits = np.uint64(num_samples.bit_length())
    keys >>= index_bits  # the low bits hold the index: distinct keys sort fast, with one result
    keys <<= index_bits
    keys |= np.arange(num_samples, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << index_bits) - np.uint64(1)
    return keys.view(np.int64)


class ShuffledDataset:
    """Draw k is sample k % num_samples in the order of epoch k // num_samples.

    `parts` are joined in this order, `seed` has numbers that no other dataset of the job has, and with `has_masks`
    samples may have their own masks.
    """

    def __init__(self, parts: Sequence[SampleIndex], seed: tuple[int, ...]) -> None:
        self.parts = tuple(parts)
        self.seed = seed
        self._first_samples = np.cumsum([0, *(part.num_samples for part in self.parts)])
        self._orders: dict[int, NDArray[np.int64]] = {}
        self.has_masks = any(part.source.has_masks for part in self.parts)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_orders": {}}

    @property
    def num_samples(self) -> int:
        return int(self._first_samples[-1])

    def seqlens(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths in tokens of the samples of `draws`, int64 [n]."""
        seqlens = np.empty(len(draws), dtype=np.int64)
        for part, numbers, chosen in self._by_part(draws):
            seqlens[chosen] = part.seqlens(numbers)
        return seqlens

    def masks(self, draws: NDArray[np.int64]) -> NDArray[np.object_]:
        """Return the masks of the samples of `draws`, [n]; None for a causal one."""
        masks = np.full(len(draws), None)
        for part, numbers, chosen in self._by_part(draws):
            masks[chosen] = part.masks(numbers)
        return masks

    def read(self, draw: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return the seqlen + 1 tokens of the sample of `draw`, and which are learned (None: all)."""
        ((part, numbers, _),) = self._by_part(np.array([draw]))
        return part.read(int(numbers[0]))

    def _by_part(self, draws: NDArray[np.int64]) -> Iterator[tuple[SampleIndex, NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield each part with samples of `draws`, their numbers in it, and a mask that selects them in `draws`."""
        samples = self._samples(draws)
        owners = np.searchsorted(self._first_samples, samples, side="right") - 1
        for owner in np.unique(owners):
            chosen = owners == owner
            yield self.parts[owner], samples[chosen] - self._first_samples[owner], chosen

    def _samples(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(draws, self.num_samples)
        samples = np.empty(len(draws), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            samples[chosen] = self._order(epoch)[places[chosen]]
        return samples

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            # A batch spans at most two epochs unless an epoch is smaller than it, so older orders are dropped.
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = shuffled(self.num_samples, (*self.seed, epoch))
        return self._orders[epoch]


logger = logging.getLogger(__name__)

NUM_PROBED_SAMPLES = 8
MAX_PERIOD = 1 << 16


def whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers >= 1 in proportion to `weights` (> 0). They are exact if their sum is at most MAX_PERIOD;
    otherwise they are rounded to that sum, and the log says so."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    rounded = [max(1, round(share * MAX_PERIOD)) for share in shares]
    rounded[rounded.index(max(rounded))] += MAX_PERIOD - sum(rounded)
    worst = max(abs(share - Fraction(whole, MAX_PERIOD)) for share, whole in zip(shares, rounded, strict=True))
    logger.info("blend weights rounded to 1/%d, the largest change of a share is %.2g", MAX_PERIOD, float(worst))
    return tuple(rounded)


@lru_cache(maxsize=8)
def interleave(shares: tuple[int, ...]) -> NDArray[np.int64]:
    """Return one period of the blend: the dataset of each position, int64 [sum(shares)].

    After p positions, the number of draws from each dataset differs from p times its share by less than one. So draw k
    of a dataset with share n of P positions must come at positions floor(k P / n) .. ceil((k + 1) P / n) - 1; the
    earliest deadline first meets all of them.

    Source: Baruah, Cohen, Plaxton, Varvel, "Proportionate progress", Algorithmica 1996: its windows, on one processor.
    """
    period = sum(shares)
    draws = sorted(
        (k * period // share, -(-(k + 1) * period // share), dataset)
        for dataset, share in enumerate(shares)
        for k in range(share)
    )
    positions = np.empty(period, dtype=np.int64)
    waiting: list[tuple[int, int]] = []
    released = 0
    for position in range(period):
        while released < period and draws[released][0] <= position:
            heapq.heappush(waiting, draws[released][1:])
            released += 1
        positions[position] = heapq.heappop(waiting)[1]
    return positions


class Blend:
    """An endless sequence of datasets in proportion to weights, with period `sum(whole_shares(weights))`.

    Example:
        Weights 1 and 3 give datasets 1, 1, 0, 1, 1, 1, 0, 1 ... and of those draws 0, 1, 0, 2, 3, 4, 1, 5 ...
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self.shares = np.array(whole_shares(weights), dtype=np.int64)
        self._datasets = interleave(tuple(self.shares.tolist()))
        self._draws = np.empty_like(self._datasets)
        for dataset, share in enumerate(self.shares):
            self._draws[self._datasets == dataset] = np.arange(share)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the dataset of each position, and the number of its draw there."""
        periods, places = np.divmod(positions, len(self._datasets))
        datasets = self._datasets[places]
        return datasets, periods * self.shares[datasets] + self._draws[places]


class SampleStream:
    """An endless stream of samples in a fixed order, blended of datasets that are not empty. Forks and pickles."""

    def __init__(self, name: str, datasets: Sequence[ShuffledDataset], weights: Sequence[Fraction]) -> None:
        self.name = name
        self._datasets = tuple(datasets)
        self._blend = Blend(weights)
        self._fingerprint: str | None = None

    @property
    def has_masks(self) -> bool:
        return any(dataset.has_masks for dataset in self._datasets)

    @property
    def num_samples(self) -> int:
        """Number of different samples: one epoch, if there are no blend weights."""
        return sum(dataset.num_samples for dataset in self._datasets)

    def global_batch(self, consumed_samples: int, num_samples: int) -> GlobalBatch:
        """Return the samples at positions consumed_samples .. + num_samples - 1, whose ids they are. Reads no data."""
        positions = np.arange(consumed_samples, consumed_samples + num_samples, dtype=np.int64)
        datasets, draws = self._blend.locate(positions)
        seqlens = np.empty(num_samples, dtype=np.int64)
        masks = np.full(num_samples, None)
        for dataset in np.unique(datasets):
            chosen = datasets == dataset
            seqlens[chosen] = self._datasets[dataset].seqlens(draws[chosen])
            if self._datasets[dataset].has_masks:
                masks[chosen] = self._datasets[dataset].masks(draws[chosen])
        return GlobalBatch(positions, seqlens, masks.tolist() if any(masks) else None)

    def read(self, sample_id: int) -> SampleTokens:
        """Return the tokens of the sample at position `sample_id`; DataError if its document differs from the index."""
        datasets, draws = self._blend.locate(np.array([sample_id], dtype=np.int64))
        dataset = self._datasets[datasets[0]]
        mask = dataset.masks(draws)[0] if dataset.has_masks else None
        return sample_of(*dataset.read(int(draws[0])), mask)

    def fingerprint(self) -> str:
        """Return a hash (hex) of what decides the stream, independent of where the data lie.

        It covers every sample's length, the shuffle's seeds and the shares. Contents are probed: up to 8 evenly spaced
        samples (at least one per source) and the last end of document of every source. Other data of equal lengths are
        noticed only where a probe meets them. DataError if a document differs from its index.
        """
        if self._fingerprint is None:
            parts = [part for dataset in self._datasets for part in dataset.parts if part.num_samples]
            digest = hashlib.sha256(
                repr([self._blend.shares.tolist(), [dataset.seed for dataset in self._datasets]]).encode()
            )
            for part in parts:
                digest.update(part.num_predicted.tobytes() + part.documents.tobytes())
                num_probes = min(part.num_samples, max(1, NUM_PROBED_SAMPLES // len(parts)))
                for number in np.linspace(0, part.num_samples - 1, num_probes).round().astype(np.int64).tolist():
                    tokens, is_target = part.read(number)
                    digest.update(tokens.astype(np.int64).tobytes())
                    if is_target is not None:
                        digest.update(is_target.tobytes())
                digest.update(part.source.identity())
                last_document = int(part.documents[-1])
                length = int(part.source.lengths[last_document])
                digest.update(part.source.read(last_document, length - 1, length).astype(np.int64).tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def describe(self) -> str:
        """Return one line: documents, samples, tokens, and what was left out or cut."""
        parts = [part for dataset in self._datasets for part in dataset.parts]
        num_documents = sum(part.num_documents for part in parts)
        num_empty = sum(part.num_empty for part in parts)
        num_overlong = sum(part.num_overlong for part in parts)
        num_untargeted = sum(part.num_untargeted for part in parts)
        done = {"error": "", "truncate": "truncated", "drop": "dropped", "split": "split"}[parts[0].overlong]
        words = [
            f"{count(num_documents, 'document')} ({num_empty} empty, {num_overlong} overlong {done}".rstrip() + ")",
            f"{count(self.num_samples, 'sample')} of at most {parts[0].seq_length} tokens",
            f"{sum(part.num_tokens for part in parts)} tokens",
        ]
        if num_untargeted:
            words.insert(1, f"{num_untargeted} left out because no assistant's token is left of them")
        if len(self._datasets) > 1:
            words.append("blended " + ":".join(map(str, self._blend.shares)))
        sources = dict.fromkeys(part.source.describe() for part in parts)
        return f"{self.name}: {', '.join(words)}; from {'; '.join(sources)}"
