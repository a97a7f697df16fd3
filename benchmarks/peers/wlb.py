"""A peer in the manner of WLB-LLM (OSDI '25, Algorithm 1), written from its description: static CP, variable lengths.

Every bucket has one CP size. Samples, longest first, go to the bucket with the least workload Wa(d^2) + Wl(d) if it
has room there, else to the one with the fewest tokens.

What differs from the paper:
- no outlier queues: they carry documents over to later global batches, which we may not do; nor are documents that fit
  nowhere carried over: then the number of micro-batches grows by one. The paper owes most of its gain to the queues;
- CP shards are perfectly even (the paper chooses between two ways of sharding by measured kernel times);
- tuned where the paper has constants: the number of micro-batches, the CP size and the order of micro-batches are the
  best of a sweep by simulation, and buckets of similar workload share a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np

from benchmarks.peers.peer import PeerResult, longest_first
from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import sift_down
from dynamic_cp.packing.durations import Packing
from dynamic_cp.packing.judge import build_plan, in_orders, price_packing
from dynamic_cp.packing.static import in_rows
from dynamic_cp.plans.padding import padded_seqlen, round_up
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import linear_parts
from dynamic_cp.pricing.work import Lengths, density_of, lengths_of
from dynamic_cp.types import Sample

SWEEP = (1.0, 1.15, 1.3, 1.6, 2.0, 2.5)
"""Numbers of micro-batches, as multiples of the least that holds all tokens."""


def peer(samples: Sequence[Sample], cost_model: CostModel) -> PeerResult:
    """Return the fastest plan over all CP sizes that hold the longest sample, and over the sweep."""
    ordered = longest_first(samples)
    lengths = lengths_of(ordered, cost_model.model)
    best: tuple[int, Packing, str] | None = None
    for k, capacity in enumerate(cost_model.table.capacities.tolist()):
        if ordered[0].seqlen > capacity:
            continue
        for packing in packings_like_wlb(lengths, cost_model, k):
            for found_ns, _, one in in_orders(lengths, packing, cost_model):
                if best is None or found_ns < best[0]:
                    best = found_ns, one, f"CP {1 << k}, {packing.num_rows} micro-batches"
    if best is None:
        return PeerResult(None, None, f"no CP size holds the longest sample, {ordered[0].seqlen} tokens")
    found_ns, packing, note = best
    return PeerResult(
        found_ns / 1e9, build_plan(ordered, price_packing(lengths, packing, cost_model), cost_model, "wlb"), note
    )


def packings_like_wlb(lengths: Lengths, cost_model: CostModel, k: int) -> Iterator[Packing]:
    """Yield packings of CP size 2^k for a sweep of numbers of rows; rows descend by workload.

    Args:
        lengths: the samples; the size holds the longest.
        cost_model: prices, limits and lanes.
        k: log2 of the CP size.
    """
    topology, table = cost_model.topology, cost_model.table
    blocks, capacity = topology.num_lanes >> k, int(table.capacities[k])
    padded = padded_seqlen(lengths.seqlens, int(table.multiples[k]))
    fewest = -(-int(padded.sum()) // (blocks * capacity))
    # Workload of a sample: the slopes of forward and backward. Exchange that attention hides has no price here.
    row = table.level_terms[table.first_option[k, table.links[k, 0]]]
    _, per_token, per_token2 = linear_parts(row).sum(axis=0).tolist()
    tried = set()
    for factor in SWEEP:
        num_rows = round_up(ceil(factor * fewest), topology.num_microbatches_multiple)
        while num_rows not in tried:
            fits, bucket_of_sample, work = _deal(
                padded, lengths.densities, capacity, per_token, per_token2, num_rows * blocks
            )
            if fits:
                tried.add(num_rows)
                places = np.empty(num_rows * blocks, np.int64)
                places[np.argsort(-work, kind="stable")] = np.arange(num_rows * blocks)
                yield in_rows(places[bucket_of_sample], np.arange(num_rows * blocks), k, blocks)
            else:
                num_rows += topology.num_microbatches_multiple


@compiled
def _deal(
    padded: Ints, densities: Floats | None, capacity: int, per_token: float, per_token2: float, num_buckets: int
) -> tuple[bool, Ints, Floats]:
    """Return whether all samples have room, the bucket of each sample, the workload of each bucket."""
    tokens, work = np.zeros(num_buckets), np.zeros(num_buckets)
    known_tokens, known_work = np.zeros(num_buckets), np.zeros(num_buckets)
    by_tokens, by_work = np.arange(num_buckets), np.arange(num_buckets)
    bucket_of_sample = np.zeros(len(padded), np.int64)
    for sample in range(len(padded)):
        length = float(padded[sample])
        bucket = _least(work, known_work, by_work)
        if tokens[bucket] + length > capacity:
            bucket = _least(tokens, known_tokens, by_tokens)
            if tokens[bucket] + length > capacity:
                return False, bucket_of_sample, work
        bucket_of_sample[sample] = bucket
        tokens[bucket] += length
        work[bucket] += per_token * length + per_token2 * density_of(densities, sample) * length * length
    return True, bucket_of_sample, work


@compiled
def _least(keys: Floats, known: Floats, items: Ints) -> int:
    """Return the item with the least key. The heap `items` is ordered by `known`, older keys; keys only grow."""
    while known[items[0]] < keys[items[0]]:
        known[items[0]] = keys[items[0]]
        sift_down(known, items, len(items))
    return items[0]  # type: ignore[no-any-return]
