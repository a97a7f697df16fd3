"""The scheduler that megatron-core 0.16.1 ships (`--hybrid-context-parallel`), run as it is and priced by our model.

It does not pack: every sample is its own forward and backward pass, and a barrier over all lanes ends each of its
groups. Without a pipeline only (megatron-core asserts that). Generous to it: samples get our padding (2 x CP), not its
own (2 x lanes), and barriers cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

from benchmarks.peers.peer import PeerResult
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Bucket, Sample, is_power_of_two


def peer(samples: Sequence[Sample], cost_model: CostModel) -> PeerResult:
    """Return the seconds of the busiest lane, summed over the scheduler's groups; samples keep their order."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    topology = cost_model.topology
    if topology.pp_size > 1:
        return PeerResult(None, None, "0.16.1 refuses a pipeline")
    if not is_power_of_two(topology.num_lanes):
        return PeerResult(None, None, f"0.16.1 fails on {topology.num_lanes} lanes, which is not a power of two")
    lanes = SimpleNamespace(size=lambda: topology.num_lanes)  # all that the scheduler asks of a process group
    scheduler = BalancedCPScheduler(cost_model.options.max_tokens_per_rank, lanes)
    pairs = [(sample.sample_id, sample.seqlen) for sample in samples]
    try:
        _, groups = scheduler.get_groups_and_subsamples(pairs, None)
    except (AssertionError, IndexError) as error:
        return PeerResult(None, None, f"0.16.1 stopped with {type(error).__name__}: {error}")
    by_id = {sample.sample_id: sample for sample in samples}
    seconds = sum(_group_s(ids_of_lane, by_id, cost_model) for ids_of_lane in groups)
    return PeerResult(seconds, None, f"{len(groups)} barriers")


def _group_s(ids_of_lane: Sequence[Sequence[int]], by_id: dict[int, Sample], cost_model: CostModel) -> float:
    sizes = Counter(sample_id for ids in ids_of_lane for sample_id in ids)
    first_lanes: dict[int, int] = {}
    for lane, ids in enumerate(ids_of_lane):
        for sample_id in ids:
            first_lanes.setdefault(sample_id, lane)
    seconds = {
        sample_id: sum(
            cost_model.bucket_cost(
                Bucket(first_lane=first_lanes[sample_id], cp_size=cp_size, samples=(by_id[sample_id],))
            )
        )  # on the only stage: forward, backward, embedding and head; a hop costs nothing without a pipeline
        for sample_id, cp_size in sizes.items()
    }
    return max(sum(seconds[sample_id] for sample_id in ids) for ids in ids_of_lane)
