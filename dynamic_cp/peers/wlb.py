"""A packer in the manner of WLB-LLM (OSDI '25, Algorithm 1), written from its description: static CP, variable lengths.

Every bucket has one CP size. Documents, longest first, go to the bucket with the least workload Wa(d^2) + Wl(d) if it
has room there, else to the one with the fewest tokens.

What differs from the paper:
- no outlier queues: they carry documents over to later global batches, which we may not do; nor are documents that fit
  nowhere carried over: then the number of micro-batches grows by one. The paper owes most of its gain to the queues;
- CP shards are perfectly even (the paper chooses between two ways of sharding by measured kernel times);
- tuned where the paper has constants: the number of micro-batches, the CP size and the order of micro-batches are the
  best of a sweep by simulation, and buckets of similar workload share a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil

from dynamic_cp.cost_model import CostModel
from dynamic_cp.padding import round_up
from dynamic_cp.peers.peer import PeerBucket, PeerResult, best_order, longest_first
from dynamic_cp.types import Sample

SWEEP = (1.0, 1.15, 1.3, 1.6, 2.0, 2.5)
"""Numbers of micro-batches, as multiples of the least that holds all tokens."""


def peer(samples: Sequence[Sample], cost_model: CostModel) -> PeerResult:
    """Return the fastest plan over all CP sizes that hold the longest sample, and over the sweep."""
    ordered = longest_first(samples)
    topology, table = cost_model.topology, cost_model.table
    best: tuple[float, str, PeerResult] | None = None
    for k, capacity in enumerate(table.capacities.tolist()):
        padded = [round_up(sample.seqlen, int(table.multiples[k])) for sample in ordered]
        if padded[0] > capacity:
            continue
        blocks = topology.num_lanes >> k
        fewest = ceil(sum(padded) / (blocks * capacity))
        multiple = topology.num_microbatches_multiple
        tried = set()
        for factor in SWEEP:
            count = round_up(ceil(factor * fewest), multiple)
            while (buckets := _pack(ordered, padded, count * blocks, k, cost_model)) is None:
                count += multiple
            if count in tried:
                continue
            tried.add(count)
            rows = [
                [PeerBucket(place << k, 1 << k, held) for place, held in enumerate(buckets[start : start + blocks])]
                for start in range(0, len(buckets), blocks)
            ]
            seconds, plan = best_order(rows, cost_model, "wlb")
            if best is None or seconds < best[0]:
                best = seconds, f"CP {1 << k}, {count} micro-batches", PeerResult(seconds, plan, "")
    if best is None:
        return PeerResult(None, None, f"no CP size holds the longest sample, {ordered[0].seqlen} tokens")
    return best[2]._replace(note=best[1])


def _pack(
    ordered: Sequence[Sample], padded: Sequence[int], num_buckets: int, k: int, cost_model: CostModel
) -> list[list[Sample]] | None:
    """Return the contents of the buckets, descending by workload; None when a sample fits neither choice."""
    table = cost_model.table
    capacity = int(table.capacities[k])
    # Workload of a document: the slopes of forward and backward. Exchange that attention hides has no price here.
    slopes = table.terms[table.first_option[k, table.links[k, 0]]].sum(axis=0)[1:3]
    contents: list[list[Sample]] = [[] for _ in range(num_buckets)]
    tokens, work = [0] * num_buckets, [0.0] * num_buckets
    least_work = [(0.0, bucket) for bucket in range(num_buckets)]
    fewest_tokens = [(0, bucket) for bucket in range(num_buckets)]
    for sample, length in zip(ordered, padded, strict=True):
        while least_work[0][0] != work[least_work[0][1]]:  # outdated entries
            heappop(least_work)
        while fewest_tokens[0][0] != tokens[fewest_tokens[0][1]]:
            heappop(fewest_tokens)
        bucket = least_work[0][1]
        if tokens[bucket] + length > capacity:
            bucket = fewest_tokens[0][1]
            if tokens[bucket] + length > capacity:
                return None
        contents[bucket].append(sample)
        tokens[bucket] += length
        work[bucket] += float(slopes[0] * length + slopes[1] * length * length)
        heappush(least_work, (work[bucket], bucket))
        heappush(fewest_tokens, (tokens[bucket], bucket))
    return [contents[bucket] for bucket in sorted(range(num_buckets), key=lambda bucket: -work[bucket])]
