"""Static context parallelism: every bucket has the same CP size. For comparison and as fallback.

`static` packs as Megatron's dp_balanced does (next-fit in input order), `balanced` spreads the modelled time over a
given number of micro-batches (longest processing time first). Lanes that no block of C lanes covers stay empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import ceil

from dynamic_cp.cost_model import CostModel
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.packing import OpenBucket, Row, allowed_cp_sizes, capacity_tokens
from dynamic_cp.padding import round_up
from dynamic_cp.types import PlanOptions, Sample, Topology, is_power_of_two


def static_cp_size(samples: Iterable[Sample], topology: Topology, options: PlanOptions) -> int:
    """Return options.static_cp_size, or the smallest allowed CP size that holds the longest sample.

    Raises:
        InvalidInputError: the given size is no power of two or larger than any group.
        InfeasibleSampleError: the given size cannot hold the longest sample.
    """
    longest = max(samples, key=lambda sample: sample.seqlen)
    if options.static_cp_size is None:
        return min(
            cp for cp in allowed_cp_sizes(topology, options) if longest.seqlen <= capacity_tokens(cp, topology, options)
        )
    cp_size = options.static_cp_size
    if not is_power_of_two(cp_size) or cp_size > topology.max_cp_size:
        raise InvalidInputError(
            f"static_cp_size is {cp_size}, a power of two <= {topology.max_cp_size} is needed for "
            f"{topology.num_lanes} lanes: change --context-parallel-size",
            static_cp_size=cp_size,
            num_lanes=topology.num_lanes,
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
    return cp_size


def pack_static(samples: Sequence[Sample], cost_model: CostModel, cp_size: int) -> list[Row]:
    """Return next-fit rows in input order; the last bins are split until whole micro-batches are full, if possible."""
    topology = cost_model.topology
    capacity = capacity_tokens(cp_size, topology, cost_model.options)
    bins: list[list[Sample]] = []
    tokens = capacity
    for sample in samples:
        padded, _ = OpenBucket(0, cp_size).sums_with(sample)
        if tokens + padded > capacity:
            bins.append([])
            tokens = 0
        bins[-1].append(sample)
        tokens += padded
    blocks = topology.num_lanes // cp_size
    wanted = round_up(len(bins), blocks * topology.num_microbatches_multiple)
    while len(bins) < wanted and (divisible := [one for one in bins if len(one) > 1]):
        bins.append([divisible[-1].pop()])
    return [_row(bins[start : start + blocks], cp_size) for start in range(0, len(bins), blocks)]


def pack_balanced(
    samples: Sequence[Sample], cost_model: CostModel, cp_size: int, num_microbatches: int
) -> list[Row] | None:
    """Return rows of even buckets: the longest sample goes to the cheapest bucket with room; None when one has no room.

    Buckets of similar work share a row; rows descend.
    """
    capacity = capacity_tokens(cp_size, cost_model.topology, cost_model.options)
    blocks = cost_model.topology.num_lanes // cp_size
    buckets = [OpenBucket(index % blocks * cp_size, cp_size) for index in range(blocks * num_microbatches)]
    cheapest = [(0, index) for index in range(len(buckets))]
    for sample in sorted(samples, key=lambda sample: (-sample.seqlen, sample.sample_id)):
        full = []
        while cheapest:
            duration_ns, index = heappop(cheapest)
            if buckets[index].sums_with(sample)[0] <= capacity:
                break
            full.append((duration_ns, index))
        else:
            return None
        buckets[index].add(sample)
        heappush(cheapest, (buckets[index].duration_ns(cost_model), index))
        for entry in full:
            heappush(cheapest, entry)
    buckets.sort(key=lambda bucket: -bucket.tokens_squared)
    contents = [bucket.samples for bucket in buckets]
    return [_row(contents[start : start + blocks], cp_size) for start in range(0, len(contents), blocks)]


def min_microbatches(samples: Iterable[Sample], cost_model: CostModel, cp_size: int) -> int:
    """Return the fewest micro-batches whose buckets of `cp_size` hold all padded tokens."""
    bucket = OpenBucket(0, cp_size)
    tokens = sum(bucket.sums_with(sample)[0] for sample in samples)
    blocks = cost_model.topology.num_lanes // cp_size
    return ceil(tokens / (blocks * capacity_tokens(cp_size, cost_model.topology, cost_model.options)))


def _row(contents: Iterable[Sequence[Sample]], cp_size: int) -> Row:
    row = []
    for position, samples in enumerate(contents):
        bucket = OpenBucket(position * cp_size, cp_size)
        for sample in samples:
            bucket.add(sample)
        row.append(bucket)
    return row
