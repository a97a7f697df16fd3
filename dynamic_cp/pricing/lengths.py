"""The samples of a batch as what prices are made of: how long they are, and how much of their keys they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.types import Sample


class Lengths(NamedTuple):
    """Samples, descending by length: all that packers and bounds know of them.

    Attributes:
        seqlens: [sample] tokens.
        densities: [sample] work of attention over that of the layers' own mask, as `Sample.density`. The attention
            price of a bucket is one of the sum of density * padded length squared.
    """

    seqlens: Ints
    densities: Floats

    @property
    def squares(self) -> Floats:
        """[sample] tokens squared, as a measure of attention work."""
        return self.densities * self.seqlens.astype(np.float64) ** 2


def lengths_of(samples: Sequence[Sample]) -> Lengths:
    """Return `samples`, which are descending by length, as arrays."""
    return Lengths(np.fromiter((sample.seqlen for sample in samples), np.int64, len(samples)), densities_of(samples))


def densities_of(samples: Sequence[Sample]) -> Floats:
    """Return [sample] -> its density."""
    if any(sample.mask is not None for sample in samples):
        return np.fromiter((sample.density for sample in samples), np.float64, len(samples))
    return np.ones(len(samples))  # mostly: in a fifth of the time


def squared_tokens(samples: Sequence[Sample], padded: Sequence[int]) -> float:
    """Return the attention work of a bucket's samples at their padded lengths, in squared tokens.

    Sums in the order in which packers do (`packing.padded`), so that both prices are equal to the last digit.

    Args:
        samples: of the bucket; none for an empty place.
        padded: tokens of each, or of the one sequence of padding.
    """
    total = 0.0
    for tokens, density in zip(padded, [sample.density for sample in samples] or [1.0], strict=True):
        total += density * tokens * tokens
    return total
