"""Static context parallelism: every bucket has the same CP size. For comparison and as fallback.

`pack_next_fit` packs as Megatron's dp_balanced does (next-fit in input order), `pack_balanced` spreads the modelled
time over a given number of rows, longest samples first. Lanes that no block of this CP size covers stay empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.loops import find_room, sift_down
from dynamic_cp.packing.durations import Durations, Packing, bucket_ns, padded_seqlen
from dynamic_cp.plans import padding
from dynamic_cp.pricing.allowed import capacity_tokens
from dynamic_cp.pricing.work import Lengths, density_of
from dynamic_cp.types import is_power_of_two

if TYPE_CHECKING:
    from dynamic_cp.types import PlanOptions, Sample, Topology


def check_static_cp_size(cp_size: int, longest: Sample, topology: Topology, options: PlanOptions) -> None:
    """Refuse a static CP size that no group has or that cannot hold the longest sample.

    Raises:
        InvalidInputError: the size is no power of two or larger than any group.
        InfeasibleSampleError: the size cannot hold the longest sample.
    """
    if not is_power_of_two(cp_size) or cp_size > topology.max_cp_size:
        raise InvalidInputError(
            f"static_cp_size is {cp_size}, a power of two <= {topology.max_cp_size} is needed for "
            f"{topology.num_lanes} lanes: change --context-parallel-size"
        )
    capacity = capacity_tokens(cp_size, topology, options)
    if longest.seqlen > capacity:
        raise InfeasibleSampleError(
            f"sample {longest.sample_id} has {longest.seqlen} tokens, a static group of {cp_size} lanes holds "
            f"{capacity}: raise --context-parallel-size or --max-seqlen-per-dp-cp-rank",
            sample_id=longest.sample_id,
            seqlen=longest.seqlen,
            capacity_tokens=capacity,
        )


def fewest_rows(seqlens: Ints, durations: Durations, k: int, num_lanes: int) -> int:
    """Return the fewest rows whose buckets of CP size 2^k hold all padded tokens."""
    tokens = int(padding.padded_seqlen(seqlens, int(durations.multiples[k])).sum())
    return -(-tokens // ((num_lanes >> k) * int(durations.capacities[k])))


def pack_next_fit(
    seqlens: Ints, input_order: Ints, durations: Durations, k: int, num_lanes: int, rows_multiple: int
) -> Packing:
    """Return next-fit rows in input order; the last bins are split until whole micro-batches are full, if possible.

    Args:
        seqlens: [sample] tokens, descending.
        input_order: [position] -> sample.
        durations: limits of buckets.
        k: log2 of the CP size.
        num_lanes: lanes.
        rows_multiple: wanted divisor of the number of rows.
    """
    capacity = int(durations.capacities[k])
    padded = padding.padded_seqlen(seqlens, int(durations.multiples[k]))
    num_bins, bucket_of_sample = _next_fit(padded, input_order, capacity)
    blocks = num_lanes >> k
    wanted = padding.round_up(num_bins, blocks * rows_multiple)
    inside = np.bincount(bucket_of_sample)
    # The last sample of the last bin that has two goes into a bin of its own, until there are enough.
    for sample in input_order[::-1].tolist():
        if num_bins == wanted:
            break
        if inside[bucket_of_sample[sample]] > 1:
            inside[bucket_of_sample[sample]] -= 1
            bucket_of_sample[sample] = num_bins
            num_bins += 1
    return in_rows(bucket_of_sample, np.arange(num_bins), k, blocks)


@compiled
def _next_fit(padded: Ints, input_order: Ints, capacity: int) -> tuple[int, Ints]:
    """Return (number of bins, bin of each sample): a sample that does not fit into the open bin opens the next one."""
    bin_of_sample = np.zeros(len(padded), np.int64)
    num_bins, tokens = 0, capacity
    for sample in input_order:
        if tokens + padded[sample] > capacity:
            num_bins, tokens = num_bins + 1, 0
        bin_of_sample[sample] = num_bins - 1
        tokens += padded[sample]
    return num_bins, bin_of_sample


def pack_balanced(lengths: Lengths, durations: Durations, k: int, num_lanes: int, num_rows: int) -> Packing | None:
    """Return rows of even buckets: the longest sample goes to the cheapest bucket with room; None when one has no room.

    Buckets that last similarly long share a row; rows descend.
    """
    blocks = num_lanes >> k
    missing, bucket_of_sample, price = _spread_evenly(lengths, durations, k, blocks * num_rows)
    if missing:
        return None
    place = np.empty(blocks * num_rows, np.int64)
    place[np.argsort(-price, kind="stable")] = np.arange(blocks * num_rows)
    return in_rows(place[bucket_of_sample], np.arange(blocks * num_rows), k, blocks)


def in_rows(bucket_of_sample: Ints, places: Ints, k: int, blocks: int) -> Packing:
    """Return buckets of CP size 2^k in rows of `blocks`; `places`: [bucket] -> row * blocks + block."""
    rows = places // blocks
    return Packing(int(rows[-1]) + 1, bucket_of_sample, rows, places % blocks << k, np.full(len(places), k, np.int64))


@compiled
def _spread_evenly(lengths: Lengths, durations: Durations, k: int, num_buckets: int) -> tuple[int, Ints, Floats]:
    """Return (samples without room, bucket of each sample, nanoseconds of each bucket); cheapest bucket first.

    Buckets without room for the present sample are parked, ordered by room, until samples are short enough.
    """
    seqlens, densities = lengths
    capacity = durations.capacities[k]
    tokens, squares = np.zeros(num_buckets), np.zeros(num_buckets)
    price, minus_room = np.zeros(num_buckets), np.full(num_buckets, -float(capacity))
    by_price, by_room = np.arange(num_buckets), np.zeros(num_buckets, np.int64)
    num_open, num_parked, num_missing = num_buckets, 0, 0
    bucket_of_sample = np.full(len(seqlens), -1, np.int64)
    for sample in range(len(seqlens)):
        padded = float(padded_seqlen(seqlens[sample], durations.multiples[k]))
        num_open, num_parked = find_room(price, by_price, num_open, minus_room, by_room, num_parked, padded)
        if num_open == 0:
            num_missing += 1
            continue
        bucket = by_price[0]
        bucket_of_sample[sample] = bucket
        tokens[bucket] += padded
        squares[bucket] += density_of(densities, sample) * padded * padded
        minus_room[bucket] += padded
        price[bucket] = bucket_ns(durations, k, tokens[bucket], squares[bucket])
        sift_down(price, by_price, num_open)
    return num_missing, bucket_of_sample, price
