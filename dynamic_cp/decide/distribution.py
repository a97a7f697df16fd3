"""Distributions of sequence lengths: lognormal ones to draw from, the usual stand-in for the documents of a corpus, and
a summary of given lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamic_cp.decide.length_formats import MAX_LENGTH
from dynamic_cp.errors import InvalidInputError

SPEC_EXAMPLE = "lognormal:mean=1024,sigma=1.5,min=128,max=8192"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lengths exp(N(log_median, sigma^2)) in tokens.

    Attributes:
        log_median: natural logarithm of the median in tokens.
        sigma: standard deviation of the logarithm.
        min_tokens: who draws makes shorter lengths this long; None: as the caller says.
        max_tokens: longer lengths become this long.
    """

    log_median: float
    sigma: float
    min_tokens: int | None = None
    max_tokens: int = MAX_LENGTH

    def draw(self, generator: np.random.Generator, num_samples: int) -> NDArray[np.float64]:
        """Return lengths, float64 [samples], clipped above only."""
        return np.minimum(generator.lognormal(self.log_median, self.sigma, num_samples), self.max_tokens)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest length that can be drawn."""
        return self.max_tokens if self.sigma else min(self.max_tokens, int(math.exp(self.log_median)))


LOGNORMALS = {
    "lognormal-github": Lognormal(log_median=math.log(1800), sigma=1.6),
    "lognormal-cc": Lognormal(log_median=math.log(900), sigma=1.15),
}


def parse_lognormal(spec: str) -> Lognormal:
    """Return the distribution that a text like `SPEC_EXAMPLE` names.

    `min` and `max` are optional. The median may be given, or the mean, with ln(median) = ln(mean) - sigma^2 / 2.

    Raises:
        InvalidInputError: a key that is unknown, double or missing, or a number out of range.

    Source: the mean is NVIDIA's convention for mock data; clipping moves the mean of what is drawn.
    """
    values: dict[str, float] = {}
    for part in spec.partition(":")[2].split(","):
        key, _, text = part.partition("=")
        key = key.strip()
        if key not in ("mean", "median", "sigma", "min", "max") or key in values:
            raise InvalidInputError(f"{spec}: {part!r} is unknown or double: write it like {SPEC_EXAMPLE}")
        try:
            values[key] = float(text)
        except ValueError:
            raise InvalidInputError(
                f"{spec}: {key} is {text!r}, a number is needed: write it like {SPEC_EXAMPLE}"
            ) from None
    if len({"mean", "median"} & set(values)) != 1 or "sigma" not in values:
        raise InvalidInputError(f"{spec} has {', '.join(values)}: give sigma, and mean or median, as in {SPEC_EXAMPLE}")
    center, sigma = values.get("mean", values.get("median", 0.0)), values["sigma"]
    if not (1 <= center <= MAX_LENGTH and 0 <= sigma <= 10):
        raise InvalidInputError(
            f"{spec}: the mean or median is {center} and sigma {sigma}: 1 .. {MAX_LENGTH} and 0 .. 10 are allowed"
        )
    bounds = {key: values[key] for key in ("min", "max") if key in values}
    if any(value != math.floor(value) for value in bounds.values() if math.isfinite(value)):
        raise InvalidInputError(f"{spec}: min and max are whole tokens: write it like {SPEC_EXAMPLE}")
    least, most = bounds.get("min", 1), bounds.get("max", MAX_LENGTH)
    if not 1 <= least <= most <= MAX_LENGTH:
        raise InvalidInputError(f"{spec}: min is {least} and max {most}: 1 <= min <= max <= {MAX_LENGTH} is needed")
    return Lognormal(
        log_median=math.log(center) - (sigma**2 / 2 if "mean" in values else 0.0),
        sigma=sigma,
        min_tokens=int(least) if "min" in values else None,
        max_tokens=int(most),
    )


PERCENTS = (0.0, 1.0, 10.0, 50.0, 90.0, 99.0, 99.9, 100.0)
TAIL_THRESHOLDS_TOKENS = (8_192, 32_768, 131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailShare:
    """Shares of the samples strictly longer than `longer_than_tokens` in all samples, tokens and squared tokens; the
    last is nearly their share of the attention work."""

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
