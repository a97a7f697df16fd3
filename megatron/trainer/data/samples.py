"""Documents -> samples: which pieces of which documents are trained on (`--overlong`), and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.types import Branches
from megatron.trainer.data.source import Source


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
        `overlong` is "error", or "split" and it begins with a prompt.
        """
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
