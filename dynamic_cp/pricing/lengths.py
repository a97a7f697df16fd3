"""The samples of a batch as what prices are made of: how long they are, and how much of their keys they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.types import ModelShape, Sample


class Lengths(NamedTuple):
    """Samples, descending by length: all that packers and bounds know of them.

    Compiled code is compiled anew for batches with densities, and takes as long as ever for those without.

    Attributes:
        seqlens: [sample] tokens.
        densities: [sample] work of attention over that of layers without windows, as `ModelShape.density`; None: all
            1. The attention price of a bucket is one of the sum of density * padded length squared.
    """

    seqlens: Ints
    densities: Floats | None

    @property
    def squares(self) -> Floats:
        """[sample] tokens squared, as a measure of attention work."""
        squares: Floats = self.seqlens.astype(np.float64) ** 2
        return squares if self.densities is None else self.densities * squares

    @property
    def density_range(self) -> tuple[float, float]:
        """The least and the largest density."""
        return (1.0, 1.0) if self.densities is None else (float(self.densities.min()), float(self.densities.max()))

    def take(self, samples: Ints) -> Lengths:
        """Return some of them, by index."""
        return Lengths(self.seqlens[samples], None if self.densities is None else self.densities[samples])


@compiled
def density_of(densities: Floats | None, sample: int) -> float:
    """Return the density of a sample."""
    if densities is None:
        return 1.0
    return densities[sample]  # type: ignore[no-any-return]


@compiled
def grows_with_length(densities: Floats | None) -> bool:
    """Return whether longer samples surely are more work."""
    return densities is None


def lengths_of(samples: Sequence[Sample], model: ModelShape) -> Lengths:
    """Return `samples`, which are descending by length, as arrays."""
    seqlens = np.fromiter((sample.seqlen for sample in samples), np.int64, len(samples))
    return Lengths(seqlens, densities_of(samples, model))


def densities_of(samples: Sequence[Sample], model: ModelShape) -> Floats | None:
    """Return [sample] -> its density; None: all 1."""
    if not model.num_windowed_layers and all(sample.mask is None for sample in samples):
        return None
    return np.fromiter((model.density(sample) for sample in samples), np.float64, len(samples))


def squared_tokens(samples: Sequence[Sample], padded: Sequence[int], model: ModelShape) -> float:
    """Return the attention work of a bucket's samples at their padded lengths, in squared tokens.

    Sums in the order in which packers do (`packing.padded`), so that both prices are equal to the last digit.

    Args:
        samples: of the bucket; none for an empty place.
        padded: tokens of each, or of the one sequence of padding.
        model: whose layers attend.
    """
    total = 0.0
    for tokens, density in zip(padded, [model.density(sample) for sample in samples] or [1.0], strict=True):
        total += density * tokens * tokens
    return total
