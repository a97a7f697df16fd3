"""What every compared planner returns, and the way from buckets to a legal plan.

A peer is a function `peer(samples, cost_model) -> PeerResult`. Its seconds compare with `makespan_s` of our plan: the
same prices, the same simulator, no gradient reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.padding import padded_seqlens, round_up
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.work import squared_tokens
from dynamic_cp.types import Bucket, MicroBatch, Plan, Sample


class PeerResult(NamedTuple):
    """Modelled seconds of one iteration (None: not defined here), the plan if the method has that form, remarks."""

    seconds: float | None
    plan: Plan | None
    note: str


class PeerBucket(NamedTuple):
    """Samples of one group of lanes."""

    first_lane: int
    cp_size: int
    samples: Sequence[Sample]


def longest_first(samples: Iterable[Sample]) -> list[Sample]:
    """Return `samples` by descending length, then ascending id."""
    return sorted(samples, key=lambda sample: (-sample.seqlen, sample.sample_id))


def pyramid(num_rows: int) -> list[int]:
    """Return the order short - long - short of rows that descend (or long - short - long of rows that ascend)."""
    return [*range(num_rows - 1, -1, -2), *range(num_rows % 2, num_rows, 2)]


def plan_of_rows(rows: Sequence[Iterable[PeerBucket]], cost_model: CostModel, policy: str) -> Plan:
    """Return the plan of `rows`, each bucket with its fastest exchange; free lanes become empty places."""
    topology = cost_model.topology
    micro_batches = []
    for row in [*rows, *[()] * (round_up(len(rows), topology.num_microbatches_multiple) - len(rows))]:
        buckets = [_bucket(bucket, cost_model) for bucket in row if bucket.samples]
        taken = {lane for bucket in buckets for lane in bucket.lanes}
        buckets += [Bucket(first_lane=lane) for lane in range(topology.num_lanes) if lane not in taken]
        micro_batches.append(MicroBatch(buckets=tuple(sorted(buckets, key=lambda bucket: bucket.first_lane))))
    return Plan(
        topology=topology,
        max_tokens_per_rank=cost_model.options.max_tokens_per_rank,
        micro_batches=tuple(micro_batches),
        policy=policy,
    )


def best_order(rows: Sequence[Sequence[PeerBucket]], cost_model: CostModel, policy: str) -> tuple[float, Plan]:
    """Return (seconds, plan) of the fastest of three orders of `rows`, which descend by work."""
    forward = list(range(len(rows)))
    orders = (forward, forward[::-1], pyramid(len(rows))) if cost_model.topology.pp_size > 1 else (forward,)
    plans = [plan_of_rows([rows[index] for index in order], cost_model, policy) for order in orders]
    makespans = [makespan_ns(plan, cost_model) for plan in plans]
    fastest = makespans.index(min(makespans))
    return makespans[fastest] / 1e9, plans[fastest]


def _bucket(bucket: PeerBucket, cost_model: CostModel) -> Bucket:
    lengths = (sample.seqlen for sample in bucket.samples)
    padded = padded_seqlens(lengths, bucket.cp_size, cost_model.topology.rank_token_multiple)
    squared = squared_tokens(bucket.samples, padded, cost_model.model)
    attention = cost_model.best_exchange(bucket.cp_size, bucket.first_lane, sum(padded), squared)
    return Bucket(
        first_lane=bucket.first_lane,
        cp_size=bucket.cp_size,
        samples=tuple(bucket.samples),
        cp_comm_type=attention.cp_comm_type,
        inner_cp_size=attention.inner_cp_size,
    )
