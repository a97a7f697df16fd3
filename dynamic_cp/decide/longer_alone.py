"""Plans with samples longer than the token limit allows, each in a pack of its own, as slime and SkyRL pack them.

A stand-in of exactly the tokens that the largest group holds takes its place in the search, so nothing joins it and all
other packs keep the limit. Where that group is one lane of causal attention, the stand-in also has the seconds of the
sample; else it is planned as if it had its own tokens only. The plan that comes out is simulated with the true lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dynamic_cp.decide.plan_in_memory import plan_in_memory
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.allowed import limit_that_holds, widest_bucket
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import linear_parts
from dynamic_cp.types import Bucket, Mask, MicroBatch, PlannedBatch, Problem, Sample


@dataclass(frozen=True, slots=True)
class _Heavier(Mask):
    """Gives a stand-in more attention work, so that it takes as long as the sample."""

    name: ClassVar[str] = "longer"
    squared: int

    def squared_tokens(self, seqlen: int) -> int:
        return self.squared


def plan_longer_alone(batch: GlobalBatch, problem: Problem, *, check_memory: bool) -> PlannedBatch:
    """Return a plan of `batch`, samples without masks; its limit is what the longest of them needs on a rank."""
    capacity, cp_size = widest_bucket(problem.topology, problem.options, places=False)
    if batch.seqlens.max() <= capacity:
        return plan_in_memory(batch, problem, check_memory=check_memory)[0]
    prices = CostModel(problem)
    model = problem.model
    is_weighed = cp_size == 1 and model.causal_attention and model.window is None and model.linear_attention is None
    samples = tuple(batch)

    def stand_in(sample: Sample) -> Sample:
        if sample.seqlen <= capacity:
            return sample
        return replace(sample, seqlen=capacity, mask=_heavier(sample, capacity, prices) if is_weighed else None)

    planned, _ = plan_in_memory([*map(stand_in, samples)], problem, check_memory=False)

    def true(bucket: Bucket) -> Bucket:
        return replace(bucket, samples=tuple(samples[one.sample_id] for one in bucket.samples))

    rows = [MicroBatch(buckets=tuple(map(true, row.buckets))) for row in planned.plan.micro_batches]
    limit = limit_that_holds(int(batch.seqlens.max()), problem.topology, problem.options)
    plan = replace(planned.plan, micro_batches=tuple(rows), max_tokens_per_rank=limit)
    check_plan(plan, samples)
    problem = replace(problem, options=replace(problem.options, max_tokens_per_rank=limit))
    if check_memory and problem.hardware.hbm_bytes:
        MemoryModel(problem).check_plan_fits(plan)
    timeline = simulate(plan, CostModel(problem))
    number = sum(one.seqlen > capacity for one in samples)
    return PlannedBatch(
        plan=plan,
        predicted_s=timeline.iteration_s,
        predicted_busy_s=timeline.lane_busy_s,
        reason=f"{number} longer than {capacity} tokens alone, {timeline.iteration_s:.6f} s; without: {planned.reason}",
    )


def _heavier(sample: Sample, capacity: int, prices: CostModel) -> Mask:
    """Return the mask with which `capacity` tokens on a lane compute as long as `sample`, host and exchanges apart."""
    terms = prices.table.level_terms[int(prices.table.first_option[0, 0])]
    _, per_token, per_token2 = linear_parts(terms).sum(axis=0).tolist()
    return _Heavier(sample.seqlen**2 + round(per_token / per_token2 * (sample.seqlen - capacity)))
