"""Finds the longest unused sample that still fits a bucket, in logarithmic time."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.packing.durations import Durations, fastest_ns
from dynamic_cp.packing.padded import padded_seqlen
from dynamic_cp.pricing.lengths import Lengths, density_of, grows_with_length
from dynamic_cp.pricing.terms import tangent


@compiled
def next_unused(num_samples: int, num_used: int) -> Ints:
    """Return the union-find array in which the first `num_used` samples are used: an entry points at a later one."""
    unused = np.arange(num_samples + 1)
    unused[:num_used] = num_used
    return unused


@compiled
def first_unused(unused: Ints, sample: int) -> int:
    """Return the first unused sample at or after `sample`; the number of samples when there is none."""
    while unused[sample] != sample:
        unused[sample] = unused[unused[sample]]
        sample = unused[sample]
    return sample


@compiled
def skip(unused: Ints, sample: int) -> None:
    """Mark `sample` as used."""
    unused[sample] = sample + 1


@inlined
def first_at_most(values: Ints | Floats, start: int, most: float) -> int:
    """Return the first place from `start` on of a descending array with a value of at most `most`; its end if none."""
    low, high = start, len(values)
    if low < high and values[high - 1] > most:
        low = high
    while low < high:
        middle = (low + high) >> 1
        if values[middle] <= most:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def longest_that_fits(
    lengths: Lengths, durations: Durations, unused: Ints, start: int,
    k: int, tokens: float, squares: float, limit_ns: float,
) -> int:  # fmt: skip
    """Return the first unused sample >= `start` with which a bucket stays within its capacity and `limit_ns`.

    Args:
        lengths: the samples; the search takes shorter ones for less work.
        durations: prices and limits.
        unused: of `next_unused`.
        start: first sample to look at.
        k: log2 of the bucket's CP size.
        tokens, squares: sums of the padded lengths that are in it, and of their squares by density.
        limit_ns: the bucket must not last longer.

    Returns:
        A sample, or the number of samples when none fits.
    """
    seqlens, densities = lengths
    return longest_within(
        seqlens, densities, durations.terms, durations.num_exchanges, durations.multiples, durations.capacities,
        unused, start, k, tokens, squares, limit_ns,
    )  # fmt: skip


@inlined
def longest_within(
    seqlens: Ints, densities: Floats | None, terms: Floats, num_exchanges: Ints, multiples: Ints, capacities: Ints,
    unused: Ints, start: int, k: int, tokens: float, squares: float, limit_ns: float,
) -> int:  # fmt: skip
    """Return `longest_that_fits`; for inner loops, which take the arrays out of their tuples once."""
    num_samples = len(seqlens)
    room = capacities[k] - tokens
    # The root of the price of the first exchange, as if what hides now went on hiding.
    constant, linear, quadratic, has_kinks = tangent(terms, k, 0, tokens, squares)
    slack_ns = limit_ns - constant
    most = room
    if slack_ns < 0.0:
        most = -1.0
    elif slack_ns < np.inf and quadratic > 0.0:
        most = min(room, (np.sqrt(linear * linear + 4.0 * quadratic * slack_ns) - linear) / (2.0 * quadratic))
    elif slack_ns < np.inf and linear > 0.0:
        most = min(room, slack_ns / linear)
    low = first_at_most(seqlens, start, most)
    # Without kinks, padding and other masks the root is exact. Else it is close: walk from there, in growing steps.
    if num_exchanges[k] > 1 or has_kinks or multiples[k] > 1 or not grows_with_length(densities):
        guess, step = low, 1
        low, high = start, num_samples
        while low < high:
            middle = min(guess, high - 1)
            padded = float(padded_seqlen(seqlens[middle], multiples[k]))
            total, total2 = tokens + padded, squares + density_of(densities, middle) * padded * padded
            if padded <= room and fastest_ns(terms, num_exchanges, k, total, total2) <= limit_ns:
                high = middle
                guess = max((low + high) >> 1, high - step)
            else:
                low = middle + 1
                guess = min((low + high) >> 1, middle + step)
            step *= 4
    return first_unused(unused, low)
