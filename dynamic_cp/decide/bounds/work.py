"""Lane-seconds that a global batch costs at least, whatever shares its buckets: the additive part of a lower bound.

The price of a bucket is not additive, because the exchange of the whole bucket hides behind its whole attention. But
for every lambda in [0, 1]

    weight * max(0, a + b * T - c * Q)  >=  lambda * weight * (a + b * T - c * Q),

and the right side is a sum over samples. Each kink of each way of running a bucket (a `Way`: CP size, link, exchange)
gets its own lambda; the sum over samples of the price at the best way is concave in them, so they are raised by
bisection, one after the other. A constant above the least one of all ways is shared by the tokens that fit.

Padding makes buckets only dearer, so true lengths are used and the bounds hold for prices with and without padding. Q
counts a sample's squared tokens by its density, and so does its additive price.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.decide.bounds.ways import Ways
from dynamic_cp.pricing.table import NUM_KINKS, kink_at, kinks_of, line_below
from dynamic_cp.pricing.work import Lengths, density_of

_MAX_GROUPS = 256
"""Samples that the search for lambdas looks at; the sum itself is taken over all."""
_ROUNDS = 3
_BISECTIONS = 7


class Work(NamedTuple):
    """Lane-seconds of all samples above the floors of their buckets, and how they were bounded.

    Attributes:
        seconds: forward_weight * forward + backward_weight * backward, summed over samples and lanes; inf if a sample
            has no way.
        per_token, per_token2: [way] lane-seconds of a sample per token and per token squared.
    """

    seconds: float
    per_token: Floats
    per_token2: Floats


def least_work(lengths: Lengths, ways: Ways, forward_weight: float = 1.0, backward_weight: float = 1.0) -> Work:
    """Return the work of samples at the best lambdas found."""
    weights = np.array([forward_weight, backward_weight])
    # The longest samples one by one, then one sample for each group of its neighbours; the groups grow.
    num_samples = len(lengths.seqlens)
    first = np.unique(np.geomspace(1, num_samples, _MAX_GROUPS).astype(np.int64) - 1)
    groups = lengths.take(first)
    counts = np.diff(first, append=num_samples).astype(np.float64)
    best = Work(-np.inf, np.zeros(0), np.zeros(0))
    # The ascent can get stuck where ways tie; of several starts the best one counts.
    for lambdas in (np.zeros((len(ways.cp_sizes), 2, NUM_KINKS)), _exposed_at(lengths, ways)):
        _raise_lambdas(groups, counts, ways, weights, lambdas, _ROUNDS, _BISECTIONS)
        per_token, per_token2 = _additive_prices(ways, weights, lambdas)
        total = sum_of_least(lengths, ways.longest, per_token, per_token2)
        if total > best.seconds:
            best = Work(total, per_token, per_token2)
    return best


def _exposed_at(lengths: Lengths, ways: Ways) -> Floats:
    """Return lambda 1 for the kinks that even the longest sample by itself exposes, 0 for the others."""
    tokens, density = float(lengths.seqlens[0]), float(density_of(lengths.densities, 0))
    weight, constant, per_token, per_token2 = kinks_of(ways.level_terms)
    exposed = constant + per_token * tokens - per_token2 * density * tokens * tokens > 0.0
    return np.where(exposed & (weight > 0.0) & (constant >= 0.0), 1.0, 0.0)


@compiled
def sum_of_least(lengths: Lengths, longest: Ints, per_token: Floats, per_token2: Floats) -> float:
    """Return the sum over samples of the least additive price; inf if one has no way."""
    seqlens, densities = lengths
    total = 0.0
    for sample in range(seqlens.shape[0]):
        tokens, density = float(seqlens[sample]), density_of(densities, sample)
        least = np.inf
        for way in range(longest.shape[0]):
            if tokens <= longest[way]:
                least = min(least, _price(tokens, per_token[way], density * per_token2[way]))
        total += least
    return total


@compiled
def _price(tokens: float, per_token: float, per_token2: float) -> float:
    """Return the least price of a sample of at least `tokens` (its padding can only add tokens).

    Args:
        tokens: of the sample.
        per_token, per_token2: prices, the latter times its density.
    """
    if per_token < 0.0 and per_token + 2.0 * per_token2 * tokens < 0.0:
        tokens = -per_token / (2.0 * per_token2)
    return tokens * (per_token + per_token2 * tokens)


@compiled
def _additive_price(ways: Ways, way: int, weights: Floats, lambdas: Floats) -> tuple[float, float]:
    """Return lane-seconds per token and per token squared of samples that run in `way`; `lambdas`: [2, NUM_KINKS]."""
    per_token = per_token2 = constant = 0.0
    for direction in range(2):
        fixed, linear, square = line_below(
            ways.level_terms, way, direction, lambdas[direction], ways.floors_s[direction]
        )
        constant += weights[direction] * fixed
        per_token += weights[direction] * linear
        per_token2 += weights[direction] * square
    size = ways.cp_sizes[way]
    return size * (per_token + constant / ways.capacities[way]), size * per_token2


@compiled
def _additive_prices(ways: Ways, weights: Floats, lambdas: Floats) -> tuple[Floats, Floats]:
    num_ways = ways.cp_sizes.shape[0]
    per_token, per_token2 = np.zeros(num_ways), np.zeros(num_ways)
    for way in range(num_ways):
        per_token[way], per_token2[way] = _additive_price(ways, way, weights, lambdas[way])
    return per_token, per_token2


@compiled
def _raise_lambdas(
    lengths: Lengths, counts: Floats, ways: Ways, weights: Floats, lambdas: Floats, rounds: int, bisections: int
) -> None:
    """Raise `lambdas` ([way, 2, NUM_KINKS]) in place, one by one, for `counts` samples of each of `lengths`."""
    num_ways = ways.cp_sizes.shape[0]
    per_token, per_token2 = _additive_prices(ways, weights, lambdas)
    for _ in range(rounds):
        for way in range(num_ways):
            others = _least_of_others(lengths, ways, way, per_token, per_token2)
            for direction in range(2):
                for kink in range(NUM_KINKS):
                    weight, constant, linear, square = kink_at(ways.level_terms, way, direction, kink)
                    # A negative constant would be gained by empty buckets too.
                    if weight <= 0.0 or constant < 0.0 or weights[direction] <= 0.0:
                        continue
                    gain = constant / ways.capacities[way] + linear
                    low, high, value = 0.0, 1.0, 1.0
                    for _ in range(bisections):
                        lambdas[way, direction, kink] = value
                        prices = _additive_price(ways, way, weights, lambdas[way])
                        if _slope(lengths, counts, ways.longest[way], others, prices, gain, square) >= 0.0:
                            low = value
                        else:
                            high = value
                        if low == 1.0:
                            break
                        value = 0.5 * (low + high)
                    lambdas[way, direction, kink] = low
            per_token[way], per_token2[way] = _additive_price(ways, way, weights, lambdas[way])


@compiled
def _least_of_others(lengths: Lengths, ways: Ways, way: int, per_token: Floats, per_token2: Floats) -> Floats:
    """Return [sample] -> its least additive price in another way; infinite where it has none."""
    seqlens, densities = lengths
    least = np.full(seqlens.shape[0], np.inf)
    for sample in range(seqlens.shape[0]):
        tokens, density = float(seqlens[sample]), density_of(densities, sample)
        for other in range(ways.cp_sizes.shape[0]):
            if other != way and tokens <= ways.longest[other]:
                least[sample] = min(least[sample], _price(tokens, per_token[other], density * per_token2[other]))
    return least


@compiled
def _slope(
    lengths: Lengths, counts: Floats, longest: int, others: Floats, prices: tuple[float, float],
    gain: float, loss: float,
) -> float:  # fmt: skip
    """Return how the work grows with a lambda: a sum over the samples for which the way is the cheapest.

    Args:
        lengths, counts: samples, and how many there are of each.
        longest: tokens of the longest sample that may run so.
        others: [sample] of `_least_of_others`.
        prices: of the way, per token and per token squared.
        gain, loss: of the kink, per token and per token squared.
    """
    per_token, per_token2 = prices
    if per_token2 < 0.0:
        return -1.0
    seqlens, densities = lengths
    slope = 0.0
    for sample in range(seqlens.shape[0]):
        tokens, density = float(seqlens[sample]), density_of(densities, sample)
        price = _price(tokens, per_token, density * per_token2)
        if tokens <= longest and price < others[sample]:
            slope += counts[sample] * tokens * (gain - loss * density * tokens)
    return slope
