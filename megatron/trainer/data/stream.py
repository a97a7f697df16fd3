"""The stream of samples of one split: the sample at position p is a function of (seed, p), on every rank."""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.plans.global_batch import GlobalBatch
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, sample_of
from megatron.trainer.data.samples import ShuffledDataset
from megatron.trainer.data.source import count

logger = logging.getLogger(__name__)

NUM_PROBED_SAMPLES = 8
MAX_PERIOD = 1 << 16


def whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers >= 1 in proportion to `weights` (> 0). They are exact if their sum is at most MAX_PERIOD;
    otherwise they are rounded to that sum, and the log says so.
    """
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
