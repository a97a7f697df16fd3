"""A peer in the manner of WLB-LLM (OSDI '25, Algorithm 1): static CP, variable lengths, packed by `packing/wlb.py`.

What differs from the paper:
- no outlier queues: they carry documents over to later global batches, which we may not do; nor are documents that fit
  nowhere carried over: then the number of micro-batches grows by one. The paper owes most of its gain to the queues;
- CP shards are perfectly even (the paper chooses between two ways of sharding by measured kernel times);
- tuned where the paper has constants: the number of micro-batches, the CP size and the order of micro-batches are the
  best of a sweep by simulation, and buckets of similar workload share a micro-batch.

The packer itself is `dynamic_cp.packing.wlb`, because the dynamic policy has it among its candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.peer import PeerResult, longest_first
from dynamic_cp.packing.judge import build_plan, price_packing
from dynamic_cp.packing.orders import in_orders
from dynamic_cp.packing.table import Packing
from dynamic_cp.packing.wlb import packings_like_wlb
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.lengths import lengths_of
from dynamic_cp.types import Sample


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
