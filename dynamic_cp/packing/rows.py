"""Fills rows of lanes to target durations, with a mixed CP size inside a row.

Rows are filled in the order of descending targets, each from its first lane on: the longest remaining sample that meets
the target, at the smallest CP size that does, opens a bucket, which is topped up with the longest samples that still
fit. One factor on all targets is bisected until every sample has a place. The longest unused sample that fits a bucket
is found in logarithmic time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.packing.durations import Durations, fastest_ns, padded_seqlen, sample_ns
from dynamic_cp.pricing.table import tangent
from dynamic_cp.pricing.work import Lengths, density_of, grows_with_length


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


class RowTargets(NamedTuple):
    """Rows to fill.

    Attributes:
        num_lanes: [row] lanes of the row.
        targets_ns, floors_ns: [row] wanted nanoseconds; the floor is not scaled. Both 0: the row stays empty.
    """

    num_lanes: Ints
    targets_ns: Floats
    floors_ns: Floats


class Filling(NamedTuple):
    """Samples in buckets, buckets in rows.

    Attributes:
        bucket_of_sample: [sample] -> bucket.
        rows, first_lanes, log2_cp_sizes: [bucket] -> row, first lane within its row, log2 of its CP size.
    """

    bucket_of_sample: Ints
    rows: Ints
    first_lanes: Ints
    log2_cp_sizes: Ints


@compiled
def alone_ns(lengths: Lengths, durations: Durations, num_sizes: int) -> Floats:
    """Return [log2 of CP size, sample] -> nanoseconds of the sample alone in a bucket; infinite: it does not fit."""
    seqlens, densities = lengths
    alone = np.full((num_sizes, len(seqlens)), np.inf)
    for k in range(num_sizes):
        for sample in range(len(seqlens)):
            alone[k, sample] = sample_ns(durations, k, seqlens[sample], density_of(densities, sample))
    return alone


@compiled
def fill_least(
    lengths: Lengths, durations: Durations, alone: Floats, rows: RowTargets, factors: tuple[float, float],
    num_steps: int, slack: float = 0.0,
) -> tuple[float, Filling]:  # fmt: skip
    """Return the smallest factor on the targets that places all samples, -1 where there is none, and that filling.

    Args:
        alone: of `alone_ns`, up to the largest CP size that rows may use.
        factors: (least, largest) to try.
        num_steps: halvings of their range; the result is within range / 2^num_steps of the least.
        slack: a row may last so many times what its first sample, the longest left, takes at least; 0: as its target
            says.
    """
    wanted = np.maximum(rows.targets_ns, rows.floors_ns)
    order = np.argsort(-wanted, kind="mergesort")
    order = order[: np.count_nonzero(wanted)]
    low, high = factors
    factor = -1.0
    nothing = np.zeros(0, np.int64)
    best = Filling(nothing, nothing, nothing, nothing)
    middle = (low + high) / 2 if num_steps else high
    while factor < 0.0 or num_steps > 0:
        wanted = np.maximum(rows.targets_ns * middle, rows.floors_ns)
        num_left, filling = _fill(lengths, durations, alone, rows.num_lanes, wanted, order, slack)
        if num_left == 0:
            factor = high = middle
            best = filling
        elif middle == high:
            break
        else:
            low = middle
        num_steps -= factor > 0.0
        middle = (low + high) / 2 if factor > 0.0 else high  # the largest only where the middle was too small
    return factor, best


@compiled
def _fill(
    lengths: Lengths, durations: Durations, alone: Floats, row_lanes: Ints, wanted_ns: Floats, order: Ints,
    slack: float,
) -> tuple[int, Filling]:  # fmt: skip
    """Return how many samples find no place, and the filling; `order`: rows to fill, one after the other."""
    num_samples, num_sizes = len(lengths.seqlens), len(alone)
    unused = next_unused(num_samples, 0)
    num_left = num_samples
    most = 0
    for row in order:
        most += row_lanes[row]
    bucket_of_sample = np.full(num_samples, -1, np.int64)
    rows, first_lanes, sizes = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    bucket = 0
    meets = np.zeros(num_sizes, np.int64)
    for row in order:
        limit_ns = wanted_ns[row]
        if slack > 0.0:
            limit_ns = max(limit_ns, slack * _least_of_longest(alone, unused, row_lanes[row]))
        for k in range(num_sizes):
            meets[k] = first_at_most(alone[k], 0, limit_ns)
        lane = 0
        while lane < row_lanes[row] and num_left:
            sample, k = _opener(meets, unused, lane, row_lanes[row])
            if sample == num_samples:
                lane += 1
                continue
            rows[bucket], first_lanes[bucket], sizes[bucket] = row, lane, k
            num_left -= _fill_bucket(lengths, durations, unused, sample, k, limit_ns, bucket, bucket_of_sample)
            bucket += 1
            lane += 1 << k
        if num_left == 0:
            break
    return num_left, Filling(bucket_of_sample, rows[:bucket], first_lanes[:bucket], sizes[:bucket])


@inlined
def _fill_bucket(
    lengths: Lengths, durations: Durations, unused: Ints, sample: int, k: int, limit_ns: float, bucket: int,
    bucket_of_sample: Ints,
) -> int:  # fmt: skip
    """Put `sample` into a new bucket of CP size 2^k, then the longest that fit; return how many it takes."""
    seqlens, densities = lengths
    terms, num_exchanges, multiples, capacities = durations
    tokens = squares = 0.0
    num_taken = 0
    while sample < len(seqlens):
        padded = float(padded_seqlen(seqlens[sample], multiples[k]))
        tokens += padded
        squares += density_of(densities, sample) * padded * padded
        bucket_of_sample[sample] = bucket
        num_taken += 1
        skip(unused, sample)
        sample = longest_within(
            seqlens, densities, terms, num_exchanges, multiples, capacities,
            unused, sample, k, tokens, squares, limit_ns,
        )  # fmt: skip
    return num_taken


@compiled
def _least_of_longest(alone: Floats, unused: Ints, num_lanes: int) -> float:
    """Return the least nanoseconds of the longest unused sample on some of `num_lanes` lanes; 0 where it cannot run."""
    longest = first_unused(unused, 0)
    least = np.inf
    if longest < alone.shape[1]:
        for k in range(len(alone)):
            if 1 << k <= num_lanes:
                least = min(least, alone[k, longest])
    return least if least < np.inf else 0.0


@compiled
def _opener(meets: Ints, unused: Ints, lane: int, num_lanes: int) -> tuple[int, int]:
    """Return (longest unused sample that meets the limit at some aligned CP size, the smallest such log2 CP size).

    Args:
        meets: [log2 of CP size] -> the longest sample that alone meets the limit.
    """
    chosen, chosen_k = len(unused) - 1, 0
    for k in range(len(meets)):
        lanes = 1 << k
        if lane % lanes or lane + lanes > num_lanes:
            break
        if meets[k] < chosen:
            sample = first_unused(unused, meets[k])
            if sample < chosen:
                chosen, chosen_k = sample, k
    return chosen, chosen_k
