"""The samples of one or more indexes as one endless sequence of draws: epoch after epoch, each newly shuffled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.samples import SampleIndex


def shuffled(num_samples: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a permutation of 0 .. num_samples - 1.

    DEVIATION: sorts random words instead of calling Generator.permutation. Reason: numpy promises that the raw words of
    a bit generator never change, but not the methods of a Generator; a checkpoint must resume with another numpy.
    """
    keys = np.random.Philox(np.random.SeedSequence(seed)).random_raw(num_samples)
    index_bits = np.uint64(num_samples.bit_length())
    keys >>= index_bits  # the low bits carry the index: sorting distinct keys is fast and has one result
    keys <<= index_bits
    keys |= np.arange(num_samples, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << index_bits) - np.uint64(1)
    return keys.view(np.int64)


class ShuffledDataset:
    """Draw k is sample k % num_samples of the order of epoch k // num_samples.

    Args:
        parts: joined in this order.
        seed: words that no other dataset of the job has.

    Attributes:
        has_masks: samples may have masks of their own.
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
        """Samples of one epoch."""
        return int(self._first_samples[-1])

    def seqlens(self, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths in tokens of the samples of `draws`, int64 [n]."""
        seqlens = np.empty(len(draws), dtype=np.int64)
        for part, numbers, chosen in self._by_part(draws):
            seqlens[chosen] = part.seqlens(numbers)
        return seqlens

    def masks(self, draws: NDArray[np.int64]) -> NDArray[np.object_]:
        """Return the masks of the samples of `draws`, [n]; None where a sample is causal."""
        masks = np.full(len(draws), None)
        for part, numbers, chosen in self._by_part(draws):
            masks[chosen] = part.masks(numbers)
        return masks

    def read(self, draw: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return the seqlen + 1 tokens of the sample of `draw`, and which of them are learned; None: all."""
        ((part, numbers, _),) = self._by_part(np.array([draw]))
        return part.read_targeted(int(numbers[0]))

    def _by_part(self, draws: NDArray[np.int64]) -> Iterator[tuple[SampleIndex, NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield each part that has samples of `draws`, the numbers of these there, and which of `draws` they are."""
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
            # A batch touches two epochs at most unless an epoch is smaller than the batch; older ones are not needed.
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = shuffled(self.num_samples, (*self.seed, epoch))
        return self._orders[epoch]
