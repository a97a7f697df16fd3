"""Finds the longest unused sample that still fits a bucket, in logarithmic time."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.packing.durations import Durations, bucket_ns, padded_seqlen
from dynamic_cp.prices import Ints


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


@compiled
def longest_that_fits(
    seqlens: Ints, durations: Durations, unused: Ints, start: int,
    k: int, tokens: float, squares: float, limit_ns: float,
) -> int:  # fmt: skip
    """Return the first unused sample >= `start` with which a bucket stays within its capacity and `limit_ns`.

    Args:
        seqlens: [sample] tokens, descending.
        durations: prices and limits.
        unused: of `next_unused`.
        start: first sample to look at.
        k: log2 of the bucket's CP size.
        tokens, squares: sums of the padded lengths that are in it.
        limit_ns: the bucket must not last longer.

    Returns:
        A sample, or len(seqlens) when none fits.
    """
    num_samples = len(seqlens)
    room = durations.capacities[k] - tokens
    terms = durations.terms[k, 0]
    low, high = start, num_samples
    if durations.num_exchanges[k] == 1 and terms[3] == 0.0 and terms[2] > 0.0 and durations.multiples[k] == 1:
        # Without kinks and padding the longest length that fits is the root of a quadratic.
        slack_ns = limit_ns - (terms[0] + terms[1] * tokens + terms[2] * squares)
        if slack_ns < 0.0:
            return num_samples
        most = (np.sqrt(terms[1] * terms[1] + 4.0 * terms[2] * slack_ns) - terms[1]) / (2.0 * terms[2])
        most = min(most, room)
        while low < high:
            middle = (low + high) >> 1
            if seqlens[middle] <= most:
                high = middle
            else:
                low = middle + 1
        return first_unused(unused, low)
    middle = num_samples - 1  # most buckets end because not even the shortest sample fits
    while low < high:
        padded = float(padded_seqlen(durations, k, seqlens[middle]))
        if padded <= room and bucket_ns(durations, k, tokens + padded, squares + padded * padded) <= limit_ns:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) >> 1
    return first_unused(unused, low)
