"""Says in a few numbers how sequence lengths are distributed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dynamic_cp.errors import InvalidInputError

PERCENTS = (0.0, 1.0, 10.0, 50.0, 90.0, 99.0, 99.9, 100.0)
TAIL_THRESHOLDS_TOKENS = (8_192, 32_768, 131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailShare:
    """What the samples strictly longer than `longer_than_tokens` hold, as fractions of the whole.

    `tokens_squared` is their share of the sum of S^2, which is nearly their share of the attention work.
    """

    longer_than_tokens: int
    samples: float
    tokens: float
    tokens_squared: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """A list of lengths in a few numbers.

    Attributes:
        quantiles_tokens: (percent, the smallest length that this percentage of the samples does not exceed).
        tails: beyond 8k, 32k and 128k tokens.
    """

    num_samples: int
    num_tokens: int
    mean_tokens: float
    quantiles_tokens: tuple[tuple[float, int], ...]
    tails: tuple[TailShare, ...]


def describe(lengths: ArrayLike) -> LengthSummary:
    """Return count, mean, quantiles and tails of `lengths` (integers >= 1, tokens, [samples]).

    Raises:
        InvalidInputError: there are no lengths, or what is given is none.
    """
    values = np.asarray(lengths)
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu" or values.min() < 1:
        raise InvalidInputError(
            f"cannot describe {values.dtype} values of shape {values.shape}: give at least 1 whole number >= 1"
        )
    values = np.sort(values)
    squares = values.astype(np.float64) ** 2
    num_samples, num_tokens = len(values), int(values.sum(dtype=np.int64))
    first_longer = [int(np.searchsorted(values, tokens, side="right")) for tokens in TAIL_THRESHOLDS_TOKENS]
    return LengthSummary(
        num_samples=num_samples,
        num_tokens=num_tokens,
        mean_tokens=num_tokens / num_samples,
        quantiles_tokens=tuple(
            (percent, int(np.percentile(values, percent, method="inverted_cdf"))) for percent in PERCENTS
        ),
        tails=tuple(
            TailShare(
                longer_than_tokens=threshold,
                samples=(num_samples - first) / num_samples,
                tokens=int(values[first:].sum(dtype=np.int64)) / num_tokens,
                tokens_squared=float(squares[first:].sum() / squares.sum()),
            )
            for threshold, first in zip(TAIL_THRESHOLDS_TOKENS, first_longer, strict=True)
        ),
    )
