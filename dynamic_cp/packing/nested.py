"""Packs without idle lanes: large groups first, small ones nested in the lanes of large ones, short samples last.

Without a pipeline a lane waits only inside a group. So it never waits if its groups shrink from micro-batch to
micro-batch: the lanes of a group have ended together, and so have those of each half. What is left is scheduling on
parallel machines:

1. Quota: a sample longer than the limit in nanoseconds gets a larger CP size (`choose_cp_sizes`); all others the
   smallest that holds them. Each sample above the base size opens a bucket of its own.
2. Memory: where the base buckets of the given number of rows cannot hold the remaining tokens, the large buckets are
   topped up, first where their exchange stays hidden behind attention, then anywhere; where even the large buckets are
   too many, large samples share them.
3. Balance: large buckets go to the aligned block of lanes that ends first; the remaining samples, longest first, to the
   lane that ends first, there into the emptiest bucket.

That is the three-stage method of NVIDIA's article on dynamic CP (quotas, memory-oriented filling, remaining samples in
descending order) in own words, with the nesting that makes the lanes' ends exact. Within 0.1 to 3 % of a lower bound on
the frozen cases (docs/planner.md).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import find_room, push, sift_down
from dynamic_cp.packing.durations import Durations, Packing, bucket_ns, padded_seqlen, sample_ns
from dynamic_cp.packing.rows import longest_that_fits, next_unused, skip
from dynamic_cp.pricing.table import growth_while_hidden
from dynamic_cp.pricing.work import Lengths, density_of

_WORTHWHILE_GAIN = 0.98
"""A larger CP size must take at most this share of the time of the smaller one."""
_FILL_SHARE = 0.996
"""Base buckets are counted on to hold this share of their capacity."""
_NUM_ROW_COUNTS = 6
_TOP_UP_SHARE = 0.9
"""Large buckets are counted on to take short samples for this share of their room."""


def pack_nested(
    lengths: Lengths, durations: Durations, num_lanes: int, num_rows: int, quota_ns: float
) -> tuple[float, Packing] | None:
    """Return (estimated end of the last lane without a pipeline, packing of `num_rows` rows); None: no room.

    Args:
        lengths: the samples.
        durations: prices and limits of buckets.
        num_lanes: lanes, any number >= 1.
        num_rows: rows that the packing may use.
        quota_ns: a sample that lasts longer gets a larger CP size, as long as that makes it shorter.
    """
    base = int(np.flatnonzero(durations.capacities)[0])
    log2_cp_sizes = choose_cp_sizes(lengths, durations, base, quota_ns)
    num_missing, end_ns, num_buckets, bucket_of_sample, rows, first_lanes, sizes = _pack(
        lengths, durations, log2_cp_sizes, base, num_lanes, num_rows
    )
    if num_missing:
        return None
    rows, first_lanes, sizes = rows[:num_buckets], first_lanes[:num_buckets], sizes[:num_buckets]
    return end_ns, Packing(num_rows, bucket_of_sample, rows, first_lanes, sizes)


def row_counts(lengths: Lengths, durations: Durations, num_lanes: int, num_rows: int, quota_ns: float) -> list[int]:
    """Return numbers of rows worth trying, from `num_rows` to where no large bucket needs to take short samples."""
    base = int(np.flatnonzero(durations.capacities)[0])
    log2_cp_sizes = choose_cp_sizes(lengths, durations, base, quota_ns)
    large = log2_cp_sizes > base
    places = (1 << (log2_cp_sizes[large] - base)).sum()
    places += lengths.seqlens[~large].sum() / (_FILL_SHARE * durations.capacities[base])
    last = max(num_rows, ceil(places / (num_lanes >> base))) + 1
    return sorted({round(count) for count in np.linspace(num_rows, last, _NUM_ROW_COUNTS).tolist()})


@compiled
def choose_cp_sizes(lengths: Lengths, durations: Durations, base: int, quota_ns: float) -> Ints:
    """Return [sample] -> log2 of the smallest CP size that meets the quota, else of the one with the least time."""
    seqlens, densities = lengths
    chosen = np.full(len(seqlens), base, np.int64)
    for sample in range(len(seqlens)):
        least = np.inf
        for k in range(base, len(durations.capacities)):
            alone_ns = sample_ns(durations, k, seqlens[sample], density_of(densities, sample))
            if alone_ns < least * _WORTHWHILE_GAIN:
                least = alone_ns
                chosen[sample] = k
            if alone_ns <= quota_ns:
                break
        if chosen[sample] == base:
            break  # shorter samples need no more
    return chosen


@compiled
def _pack(
    lengths: Lengths, durations: Durations, log2_cp_sizes: Ints, base: int, num_lanes: int, num_rows: int
) -> tuple[int, float, int, Ints, Ints, Ints, Ints]:
    """Return samples without a place, last end, number of buckets, bucket of each sample, row, first lane, CP size."""
    num_samples = len(lengths.seqlens)
    num_blocks = num_lanes >> base
    most = num_blocks * num_rows
    bucket_of_sample = np.full(num_samples, -1, np.int64)
    rows, first_lanes, sizes = np.zeros(most, np.int64), np.zeros(most, np.int64), np.full(most, base, np.int64)
    fits, buckets = _gather(lengths, durations, log2_cp_sizes, base, most, bucket_of_sample)
    lane_ns, lane_rows = np.zeros(num_lanes), np.zeros(num_lanes, np.int64)
    if not fits or not _place(durations, buckets, num_rows, lane_ns, lane_rows, rows, first_lanes):
        return num_samples, 0.0, 0, bucket_of_sample, rows, first_lanes, sizes
    num_large = len(buckets.log2_sizes)
    sizes[:num_large] = buckets.log2_sizes

    # The free places, block after block: bins of the short samples.
    first_bin = np.zeros(num_blocks + 1, np.int64)
    num_buckets = num_large
    for block in range(num_blocks):
        first_bin[block] = num_buckets
        for row in range(lane_rows[block << base], num_rows):
            rows[num_buckets], first_lanes[num_buckets] = row, block << base
            num_buckets += 1
    first_bin[num_blocks] = num_buckets
    block_ns = lane_ns[: num_blocks << base : 1 << base].copy()
    num_missing, end_ns = _spread(lengths, durations, base, first_bin, block_ns, bucket_of_sample)
    return num_missing, end_ns, num_buckets, bucket_of_sample, rows, first_lanes, sizes


class _Buckets(NamedTuple):
    """Buckets of large samples, the largest CP sizes first.

    Attributes:
        log2_sizes: [bucket] log2 of the CP size.
        tokens, squares: [bucket] sums; squares by density.
    """

    log2_sizes: Ints
    tokens: Floats
    squares: Floats


class _Large(NamedTuple):
    """Buckets of large samples while they are gathered.

    Attributes:
        tokens, squares: [sample] sums of the bucket that the sample opened; squares by density.
        log2_sizes: [sample] log2 of the CP size of that bucket.
        bucket_of_sample: [sample] -> the sample that opened its bucket.
    """

    tokens: Floats
    squares: Floats
    log2_sizes: Ints
    bucket_of_sample: Ints


@compiled
def _gather(
    lengths: Lengths, durations: Durations, log2_cp_sizes: Ints, base: int, most: int, bucket_of_sample: Ints
) -> tuple[bool, _Buckets]:
    """Put the large samples into buckets, each into its own where memory allows; fill `bucket_of_sample` for them.

    Four lanes, two rows (`most` is 8), a limit of 16 tokens. Samples of 56 and 24 tokens get CP 4 and CP 2: they take 6
    places and leave room for 8 tokens each. The other 2 places hold 32 tokens, nine short samples of 4 need 36. Large
    buckets have room for what is missing, so no large samples need to share one; the bucket of CP 2 takes short samples
    until the others fit.

    Returns:
        (whether they need at most `most` places, the buckets.)
    """
    seqlens, densities = lengths
    num_large = 0
    while num_large < len(seqlens) and log2_cp_sizes[num_large] > base:
        num_large += 1
    large = _Large(np.zeros(num_large), np.zeros(num_large), log2_cp_sizes, bucket_of_sample)
    capacity = durations.capacities[base] * _FILL_SHARE
    places, spare = 0, 0.0
    for sample in range(num_large):
        k = log2_cp_sizes[sample]
        large.tokens[sample] = float(padded_seqlen(seqlens[sample], durations.multiples[k]))
        large.squares[sample] = density_of(densities, sample) * large.tokens[sample] ** 2
        bucket_of_sample[sample] = sample
        places += 1 << (k - base)
        spare += durations.capacities[k] - large.tokens[sample]
    small_tokens = float(seqlens[num_large:].sum())
    places = _share_buckets(lengths, durations, base, most, (places, spare, small_tokens), large)
    if places > most:
        return False, _Buckets(log2_cp_sizes[:0], large.tokens, large.squares)
    hosts = _number_buckets(large)
    buckets = _Buckets(log2_cp_sizes[hosts], large.tokens[hosts], large.squares[hosts])
    _top_up(lengths, durations, num_large, small_tokens - (most - places) * capacity, bucket_of_sample, buckets)
    return True, buckets


@compiled
def _share_buckets(
    lengths: Lengths, durations: Durations, base: int, most: int, wanted: tuple[int, float, float], large: _Large
) -> int:
    """Let large samples share buckets while there is no other way: a larger CP size than needed costs exchange.

    Args:
        wanted: (places that the buckets take, tokens of room that they have, tokens of short samples).

    Returns:
        Places that the buckets take then.
    """
    places, spare, small_tokens = wanted
    tokens, squares, log2_sizes, bucket_of_sample = large
    num_large, num_samples = len(tokens), len(lengths.seqlens)
    capacity = durations.capacities[base] * _FILL_SHARE
    has_taken = np.zeros(num_large, np.bool_)
    for only_hidden in (True, False):
        unused = next_unused(num_samples, 0)
        for sample in range(num_large):
            # What has taken others is no longer a sample alone.
            if bucket_of_sample[sample] != sample or has_taken[sample]:
                skip(unused, sample)
        for host in range(num_large):
            if bucket_of_sample[host] != host:
                continue
            skip(unused, host)
            k, sample = log2_sizes[host], host + 1
            while places > most or small_tokens - (most - places) * capacity > _TOP_UP_SHARE * spare:
                sample = longest_that_fits(lengths, durations, unused, sample, k, tokens[host], squares[host], np.inf)
                if sample >= num_large:
                    break
                if only_hidden and not _is_hidden(durations, k, tokens[host], squares[host], lengths, sample):
                    break
                own = log2_sizes[sample]
                places -= 1 << (own - base)
                spare -= durations.capacities[own] - tokens[sample]
                spare -= _join(lengths, durations, large, sample, host)
                has_taken[host] = True
                skip(unused, sample)
    return places


@compiled
def _join(lengths: Lengths, durations: Durations, large: _Large, sample: int, host: int) -> float:
    """Put a large sample into the bucket of another one; return the tokens that it takes there."""
    padded = float(padded_seqlen(lengths.seqlens[sample], durations.multiples[large.log2_sizes[host]]))
    large.tokens[host] += padded
    large.squares[host] += density_of(lengths.densities, sample) * padded * padded
    large.bucket_of_sample[sample] = host
    return padded


@compiled
def _number_buckets(large: _Large) -> Ints:
    """Number the buckets by descending CP size, in `bucket_of_sample`, too; return the sample that opened each."""
    bucket_of_sample = large.bucket_of_sample
    num_large = len(large.tokens)
    hosts = np.zeros(num_large, np.int64)
    num_hosts = 0
    for sample in range(num_large):
        if bucket_of_sample[sample] == sample:
            hosts[num_hosts] = sample
            num_hosts += 1
    hosts = hosts[:num_hosts]
    hosts = hosts[np.argsort(-large.log2_sizes[hosts], kind="mergesort")]
    number = np.zeros(num_large, np.int64)
    for bucket in range(num_hosts):
        number[hosts[bucket]] = bucket
    for sample in range(num_large):
        bucket_of_sample[sample] = number[bucket_of_sample[sample]]
    return hosts


@compiled
def _is_hidden(durations: Durations, k: int, tokens: float, squares: float, lengths: Lengths, sample: int) -> bool:
    """Return whether a sample of `seqlen` adds compute to the bucket, but no exposed exchange."""
    padded = float(padded_seqlen(lengths.seqlens[sample], durations.multiples[k]))
    square = density_of(lengths.densities, sample) * padded * padded
    grown_ns = bucket_ns(durations, k, tokens + padded, squares + square)
    compute_ns = np.inf
    for exchange in range(durations.num_exchanges[k]):
        compute_ns = min(compute_ns, growth_while_hidden(durations.terms, k, exchange, padded, square))
    return grown_ns - bucket_ns(durations, k, tokens, squares) <= 1.001 * compute_ns


@compiled
def _top_up(
    lengths: Lengths, durations: Durations, num_large: int, missing_tokens: float, bucket_of_sample: Ints,
    buckets: _Buckets,
) -> None:  # fmt: skip
    """Move short samples, longest first, to the large buckets until `missing_tokens` are placed, or none fits."""
    sizes, tokens, squares = buckets
    seqlens, densities = lengths
    num_samples = len(seqlens)
    unused = next_unused(num_samples, num_large)
    for only_hidden in (True, False):
        for bucket in range(len(sizes) - 1, -1, -1):
            k, sample = sizes[bucket], num_large
            while missing_tokens > 0:
                sample = longest_that_fits(
                    lengths, durations, unused, sample, k, tokens[bucket], squares[bucket], np.inf
                )
                if sample == num_samples:
                    break
                if only_hidden and not _is_hidden(durations, k, tokens[bucket], squares[bucket], lengths, sample):
                    break
                padded = float(padded_seqlen(seqlens[sample], durations.multiples[k]))
                tokens[bucket] += padded
                squares[bucket] += density_of(densities, sample) * padded * padded
                bucket_of_sample[sample] = bucket
                missing_tokens -= seqlens[sample]
                skip(unused, sample)


@compiled
def _place(
    durations: Durations, buckets: _Buckets, num_rows: int, lane_ns: Floats, lane_rows: Ints,
    rows: Ints, first_lanes: Ints,
) -> bool:  # fmt: skip
    """Give each large bucket the block of lanes that ends first, the largest CP sizes first; False: no rows left."""
    sizes, tokens, squares = buckets
    num_lanes = len(lane_ns)
    block_ns, blocks = np.zeros(num_lanes), np.zeros(num_lanes, np.int64)
    num_open, present = 0, -1
    for bucket in range(len(sizes)):
        k = sizes[bucket]
        if k != present:
            present, num_open = k, 0
            for block in range(num_lanes >> k):
                block_ns[block] = lane_ns[block << k]
                if lane_rows[block << k] < num_rows:
                    push(block_ns, blocks, num_open, block)
                    num_open += 1
        if num_open == 0:
            return False
        block = blocks[0]
        first, end = block << k, (block + 1) << k
        rows[bucket], first_lanes[bucket] = lane_rows[first], first
        block_ns[block] += bucket_ns(durations, k, tokens[bucket], squares[bucket])
        lane_ns[first:end] = block_ns[block]
        lane_rows[first:end] += 1
        if lane_rows[first] == num_rows:
            num_open -= 1
            blocks[0] = blocks[num_open]
        sift_down(block_ns, blocks, num_open)
    return True


@compiled
def _spread(
    lengths: Lengths, durations: Durations, base: int, first_bin: Ints, block_ns: Floats, bucket_of_sample: Ints
) -> tuple[int, float]:
    """Give each sample without a bucket to the block that ends first; return how many find no room, and the last end.

    Within a block the emptiest bin takes it. Blocks without room for the present sample are parked, ordered by room,
    until samples are short enough.
    """
    seqlens, densities = lengths
    num_blocks = len(block_ns)
    capacity = float(durations.capacities[base])
    empty_ns = bucket_ns(durations, base, 0.0, 0.0)
    # Minus the room of each bin, and of the emptiest one of each block.
    filled, minus_room = np.full(first_bin[num_blocks], -capacity), np.full(num_blocks, -capacity)
    bins = np.arange(first_bin[num_blocks])  # of each block: a heap, the emptiest first
    end_ns = block_ns + (first_bin[1:] - first_bin[:-1]) * empty_ns
    by_end, by_room = np.zeros(num_blocks, np.int64), np.zeros(num_blocks, np.int64)
    num_open = num_parked = num_missing = 0
    for block in range(num_blocks):
        if first_bin[block] < first_bin[block + 1]:
            push(end_ns, by_end, num_open, block)
            num_open += 1
    for sample in range(len(seqlens)):
        if bucket_of_sample[sample] >= 0:
            continue
        padded = float(padded_seqlen(seqlens[sample], durations.multiples[base]))
        num_open, num_parked = find_room(end_ns, by_end, num_open, minus_room, by_room, num_parked, padded)
        if num_open == 0:
            num_missing += 1
            continue
        block = by_end[0]
        own = bins[first_bin[block] : first_bin[block + 1]]
        bucket_of_sample[sample] = own[0]
        filled[own[0]] += padded
        sift_down(filled, own, len(own))
        minus_room[block] = filled[own[0]]
        # At the base size prices are close to additive; exactly so without an exchange.
        end_ns[block] += bucket_ns(durations, base, padded, density_of(densities, sample) * padded * padded) - empty_ns
        sift_down(end_ns, by_end, num_open)
    return num_missing, end_ns.max()
