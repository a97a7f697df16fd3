"""The samples of a global batch as two arrays: thousands of `Sample` objects take milliseconds of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.types import Mask, Sample, counted


class GlobalBatch(Sequence[Sample]):
    """A sequence of samples that makes them when they are asked for.

    Args:
        sample_ids, seqlens: int64 [num_samples].
        masks: of each sample, as `Sample.mask`; None: no sample has one.
    """

    def __init__(
        self, sample_ids: NDArray[np.int64], seqlens: NDArray[np.int64], masks: Sequence[Mask | None] | None = None
    ) -> None:
        self.sample_ids = sample_ids
        self.seqlens = seqlens
        self.masks = masks

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> GlobalBatch:
        """Return `samples` as arrays, unchanged if they are that already."""
        if isinstance(samples, GlobalBatch):
            return samples
        masks = [sample.mask for sample in samples]
        return cls(
            np.array([sample.sample_id for sample in samples], dtype=np.int64),
            np.array([sample.seqlen for sample in samples], dtype=np.int64),
            None if all(mask is None for mask in masks) else masks,
        )

    def __repr__(self) -> str:
        longest = f", longest {self.seqlens.max()}" if len(self) else ""
        return f"<GlobalBatch: {counted(len(self), 'sample')}, {self.seqlens.sum()} tokens{longest}>"

    def __len__(self) -> int:
        return len(self.seqlens)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> GlobalBatch: ...
    def __getitem__(self, index: int | slice) -> Sample | GlobalBatch:
        if isinstance(index, slice):
            masks = None if self.masks is None else self.masks[index]
            return GlobalBatch(self.sample_ids[index], self.seqlens[index], masks)
        mask = None if self.masks is None else self.masks[index]
        return Sample(sample_id=int(self.sample_ids[index]), seqlen=int(self.seqlens[index]), mask=mask)

    def __iter__(self) -> Any:
        masks = itertools.repeat(None, len(self)) if self.masks is None else self.masks
        rows = zip(self.sample_ids.tolist(), self.seqlens.tolist(), masks, strict=True)
        return (Sample(sample_id=sample_id, seqlen=seqlen, mask=mask) for sample_id, seqlen, mask in rows)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other, strict=True))
        )

    def seqlens_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of samples by their ids, int64 of the same shape; 0 for an unknown id."""
        if not len(self):
            return np.zeros_like(sample_ids)
        order = np.argsort(self.sample_ids, kind="stable")
        places = np.minimum(np.searchsorted(self.sample_ids, sample_ids, sorter=order), len(order) - 1)
        found = order[places]
        return np.where(self.sample_ids[found] == sample_ids, self.seqlens[found], 0)
