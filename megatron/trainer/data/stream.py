"""The stream of samples of one split: the sample at position p is a function of (seed, p), on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from dynamic_cp.plans.global_batch import GlobalBatch
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, sample_of
from megatron.trainer.data.blend import Blend
from megatron.trainer.data.dataset import ShuffledDataset
from megatron.trainer.data.source import count

NUM_PROBED_SAMPLES = 8


class SampleStream:
    """An endless stream of samples in a fixed order. Forks and pickles.

    Args:
        name: of the split.
        datasets: at least one, none of them empty.
        weights: of the datasets.
    """

    def __init__(self, name: str, datasets: Sequence[ShuffledDataset], weights: Sequence[Fraction]) -> None:
        self.name = name
        self._datasets = tuple(datasets)
        self._blend = Blend(weights)
        self._fingerprint: str | None = None

    @property
    def has_masks(self) -> bool:
        """Whether samples may have masks of their own."""
        return any(dataset.has_masks for dataset in self._datasets)

    @property
    def num_samples(self) -> int:
        """Samples that exist: one epoch, when there are no blend weights."""
        return sum(dataset.num_samples for dataset in self._datasets)

    def global_batch(self, consumed_samples: int, num_samples: int) -> GlobalBatch:
        """Return the samples at positions consumed_samples .. + num_samples - 1; sample_id is the position.

        Reads no data.
        """
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
        """Return the tokens of the sample at position `sample_id`; touches only its part of its document.

        Raises:
            DataError: a document that is not what its index says.
        """
        datasets, draws = self._blend.locate(np.array([sample_id], dtype=np.int64))
        dataset = self._datasets[datasets[0]]
        mask = dataset.masks(draws)[0] if dataset.has_masks else None
        return sample_of(*dataset.read(int(draws[0])), mask)

    def fingerprint(self) -> str:
        """Return a hash (hex) of what decides the stream; where the data lies is no part of it.

        That is every sample's length, the shuffle's seeds, the shares, and as a probe of the contents the tokens of up
        to 8 evenly spaced samples (at least one of every source) and the last end of document of every source: other
        data of equal lengths are noticed when a probe meets them.

        Raises:
            DataError: a document that is not what its index says.
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
                    tokens, is_target = part.read_targeted(number)
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
