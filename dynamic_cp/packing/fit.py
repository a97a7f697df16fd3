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
    most = min(_most_tokens(durations, k, tokens, squares, limit_ns), room)
    low, high = start, num_samples
    while low < high:
        middle = (low + high) >> 1
        if seqlens[middle] <= most:
            high = middle
        else:
            low = middle + 1
    if durations.num_exchanges[k] == 1 and durations.terms[k, 0, 3] == 0.0 and durations.multiples[k] == 1:
        return first_unused(unused, low)  # without kinks and padding the root is exact
    # Close to the first that fits: walk from there, in growing steps.
    guess, step = low, 1
    low, high = start, num_samples
    while low < high:
        middle = min(guess, high - 1)
        padded = float(padded_seqlen(durations, k, seqlens[middle]))
        if padded <= room and bucket_ns(durations, k, tokens + padded, squares + padded * padded) <= limit_ns:
            high = middle
            guess = max((low + high) >> 1, high - step)
        else:
            low = middle + 1
            guess = min((low + high) >> 1, middle + step)
        step *= 4
    return first_unused(unused, low)


@compiled
def _most_tokens(durations: Durations, k: int, tokens: float, squares: float, limit_ns: float) -> float:
    """Return about how many tokens one more sample of a bucket may have: what hides now is taken to go on hiding."""
    terms = durations.terms[k, 0]
    constant, linear, quadratic = terms[0] + terms[1] * tokens + terms[2] * squares, terms[1], terms[2]
    at = 3
    while at < len(terms) and terms[at] != 0.0:
        exposed = terms[at + 1] + terms[at + 2] * tokens - terms[at + 3] * squares
        if exposed > 0.0:
            constant += terms[at] * exposed
            linear += terms[at] * terms[at + 2]
            quadratic -= terms[at] * terms[at + 3]
        at += 4
    slack_ns = limit_ns - constant
    if slack_ns < 0.0:
        return -1.0
    if quadratic <= 0.0:
        return slack_ns / linear if linear > 0.0 else np.inf
    if slack_ns == np.inf:
        return np.inf
    return (np.sqrt(linear * linear + 4.0 * quadratic * slack_ns) - linear) / (2.0 * quadratic)
