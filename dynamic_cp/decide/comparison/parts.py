"""Where the seconds of an iteration go: parts of the mean rank's time that add up to the iteration.

    iteration = compute + launch + tensor parallel + padding + exchange + expert exchange       (busy)
              + pipeline bubble + CP wait + expert wait + DP wait                               (nothing runs)
              + gradient reduction

Busy time is split by pricing each bucket again with more of it free. Exchange is what free exchange of keys and values
would save; if attention is placed, it includes waiting for what other lanes compute. Tensor parallel is what free
tensor parallelism would save on top, padding what computing true tokens alone would then save (in a place without
samples all of it). Launch is the price of no tokens. Expert exchange is what the all-to-alls of experts cost a lane's
own tokens. Lanes that share experts take longer than if each had their mean: that is expert wait. Compute is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pipeline.timeline import Timeline
from dynamic_cp.plans.padding import padded_of
from dynamic_cp.pricing.cost_model import BucketCost, CostModel, is_priced_lane_by_lane
from dynamic_cp.pricing.table import prices_of
from dynamic_cp.pricing.work import length_sums, squared_tokens
from dynamic_cp.types import Bucket, Plan, Problem, Topology

_FREE_BYTES_PER_S = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Seconds of the mean rank (all stages and lanes), which add up to the iteration.

    Attributes:
        compute_s: kernels on true tokens, embedding, head and loss included.
        launch_s: fixed costs of a bucket: launches, and kernels that short packs do not fill.
        tensor_parallel_s: collectives of tensor and sequence parallelism.
        padding_s: computing padding, places without samples included.
        exchange_s: exchange inside CP groups that no computing hides.
        expert_exchange_s: sending tokens to experts and back.
        pipeline_bubble_s: waiting for another pipeline stage, travel time between stages included.
        cp_wait_s, expert_wait_s: waiting for other lanes of the CP group, and for those that share experts.
        dp_wait_s: done, while other lanes still work.
        gradient_reduction_s: what reducing gradients and gathering parameters adds.
    """

    compute_s: float
    launch_s: float
    tensor_parallel_s: float
    padding_s: float
    exchange_s: float
    expert_exchange_s: float
    pipeline_bubble_s: float
    cp_wait_s: float
    expert_wait_s: float
    dp_wait_s: float
    gradient_reduction_s: float

    @property
    def iteration_s(self) -> float:
        return sum(seconds for _, seconds in self)

    @property
    def busy_s(self) -> float:
        """Seconds in which something runs, without the gradient reduction."""
        kernels_s = self.compute_s + self.launch_s + self.padding_s
        return kernels_s + self.tensor_parallel_s + self.exchange_s + self.expert_exchange_s

    @property
    def bubble_s(self) -> float:
        """Seconds in which nothing runs."""
        return self.pipeline_bubble_s + self.cp_wait_s + self.expert_wait_s + self.dp_wait_s

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Yield (name of the part without its unit, seconds)."""
        return ((name, getattr(self, f"{name}_s")) for name in PART_LABELS)


PART_LABELS: Mapping[str, str] = {
    "compute": "computing",
    "launch": "launches",
    "tensor_parallel": "TP collectives",
    "padding": "padding",
    "exchange": "CP exchange",
    "expert_exchange": "expert exchange",
    "pipeline_bubble": "pipeline bubble",
    "cp_wait": "CP wait",
    "expert_wait": "expert wait",
    "dp_wait": "DP wait",
    "gradient_reduction": "gradients",
}
"""Part -> its name in tables and sentences, in the order of display."""


def mean_parts(all_parts: tuple[TimeParts, ...]) -> TimeParts:
    return TimeParts(
        **{
            field.name: sum(getattr(parts, field.name) for parts in all_parts) / len(all_parts)
            for field in fields(TimeParts)
        }
    )


class PricesByPart(NamedTuple):
    """Cost models that differ in what is free."""

    all: CostModel
    without_exchange: CostModel
    without_communication: CostModel


def prices_by_part(problem: Problem) -> PricesByPart:
    """Return the cost models that `time_parts` subtracts from each other."""
    no_exchange = replace(
        problem.hardware,
        bandwidth_in_node_bytes_per_s=_FREE_BYTES_PER_S,
        bandwidth_across_nodes_bytes_per_s=_FREE_BYTES_PER_S,
        exchange_latency_s_per_layer=0.0,
        ring_step_overhead_s_per_layer=0.0,
        host_ring_step_s_per_layer=0.0,
        host_message_s_per_layer=0.0,
    )
    nothing = replace(no_exchange, collective_bandwidth_in_node_bytes_per_s=0.0)  # 0: not priced
    return PricesByPart(
        *(CostModel(replace(problem, hardware=hardware)) for hardware in (problem.hardware, no_exchange, nothing))
    )


def time_parts(timeline: Timeline, prices: PricesByPart) -> TimeParts:
    """Return the parts of `timeline`, which was simulated with `prices.all`."""
    split = timeline.split
    num_places = split.busy_ns.size
    closed, lane_by_lane = _of_closed_forms(timeline.plan, prices), _of_lanes(timeline.plan, prices)
    exchange_s, tensor_parallel_s, padding_s, launch_s, expert_exchange_s, level_s = map(
        sum, zip(closed, lane_by_lane, strict=True)
    )
    busy_s = float(split.busy_ns.sum()) / num_places / 1e9
    expert_wait_s = max(0.0, busy_s - level_s) if timeline.plan.topology.expert_lanes > 1 else 0.0
    return TimeParts(
        # The rest, so that rounding to nanoseconds breaks no sum.
        compute_s=busy_s - exchange_s - expert_exchange_s - tensor_parallel_s - padding_s - launch_s - expert_wait_s,
        launch_s=launch_s,
        tensor_parallel_s=tensor_parallel_s,
        padding_s=padding_s,
        exchange_s=exchange_s,
        expert_exchange_s=expert_exchange_s,
        pipeline_bubble_s=float(split.pipeline_bubble_ns.sum()) / num_places / 1e9,
        cp_wait_s=float(split.cp_wait_ns.sum()) / num_places / 1e9,
        expert_wait_s=expert_wait_s,
        dp_wait_s=float(split.dp_wait_ns.sum()) / num_places / 1e9,
        gradient_reduction_s=timeline.gradient_reduction_s,
    )


class _Parts(NamedTuple):
    """Seconds of the mean rank; level_s: all of it, if lanes that share experts had equally many tokens."""

    exchange_s: float
    tensor_parallel_s: float
    padding_s: float
    launch_s: float
    expert_exchange_s: float
    level_s: float


def _of_closed_forms(plan: Plan, prices: PricesByPart) -> _Parts:
    """Return the parts of the buckets that are priced from their tokens alone."""
    buckets = _buckets_of(plan, prices.all)
    if not len(buckets.rows):
        return _Parts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    full = buckets.seconds(prices.all, buckets.padded)
    free_exchange = buckets.seconds(prices.without_exchange, buckets.padded)
    computing = buckets.seconds(prices.without_communication, buckets.padded)
    true = np.where(buckets.is_empty, 0.0, buckets.seconds(prices.without_communication, buckets.true))
    launch = np.where(buckets.is_empty, 0.0, buckets.seconds(prices.without_communication, np.zeros_like(buckets.true)))
    experts = _expert_exchange_s(buckets, prices)
    return _Parts(
        exchange_s=buckets.mean_over_places(full - free_exchange - experts),
        tensor_parallel_s=buckets.mean_over_places(free_exchange - computing),
        padding_s=buckets.mean_over_places(computing - true),
        launch_s=buckets.mean_over_places(launch),
        expert_exchange_s=buckets.mean_over_places(experts),
        level_s=buckets.mean_over_places(full),
    )


def _expert_exchange_s(buckets: _Buckets, prices: PricesByPart) -> Floats | float:
    """Return [bucket] -> seconds, both passes, of sending a lane's own tokens to experts and back."""
    table, free = prices.all.table, prices.without_exchange.table
    constant, _, per_routed = (table.expert_terms - free.expert_terms).sum(axis=0).tolist()
    if not per_routed:
        return 0.0
    seconds: Floats = constant + table.imbalance * per_routed * buckets.padded[:, 0] / buckets.cp_sizes
    return seconds


def _of_lanes(plan: Plan, prices: PricesByPart) -> _Parts:
    """Return the parts of the buckets that are priced lane by lane."""
    topology = plan.topology
    nothing = _on_mean_stage([prices.without_communication.cost(1, 0, 0.0, 0.0)], topology)
    parts = np.zeros(len(_Parts._fields))
    for micro_batch in plan.micro_batches:
        for bucket in filter(is_priced_lane_by_lane, micro_batch.buckets):
            full, free_exchange, computing, true = (
                _on_mean_stage(cost_model.costs_lane_by_lane(bucket, micro_batch, **how), topology)
                for cost_model, how in (
                    (prices.all, {}),
                    (prices.without_exchange, {"with_exchange": False}),
                    (prices.without_communication, {"with_exchange": False}),
                    (prices.without_communication, {"with_exchange": False, "with_padding": False}),
                )
            )
            # Both add up in orders of their own: a negative difference is rounding, not padding.
            padding = max(0.0, computing - true)
            launch = bucket.cp_size * nothing
            parts += full - free_exchange, free_exchange - computing, padding, launch, 0.0, full
    return _Parts(*(parts / topology.num_lanes).tolist())


def _on_mean_stage(costs: Sequence[BucketCost], topology: Topology) -> float:
    """Return forward + backward seconds of lanes; embedding and head are spread over all stages."""
    edges_s = sum(
        one.embedding_forward_s + one.embedding_backward_s + one.head_forward_s + one.head_backward_s for one in costs
    )
    return sum(one.forward_s + one.backward_s for one in costs) + edges_s / topology.pp_size


class _Buckets(NamedTuple):
    """Buckets with closed forms as arrays: [bucket] -> row of the price tables; `padded` and `true`: [bucket, 2] -> sum
    of lengths and of their squares, by density; `passing`: all of these buckets if any passes on states, else ()."""

    rows: Ints
    cp_sizes: Ints
    padded: Floats
    true: Floats
    is_empty: Ints
    topology: Topology
    passing: tuple[Bucket, ...]

    def seconds(self, cost_model: CostModel, sums: Floats) -> Floats:
        """Return [bucket] -> forward + backward seconds at these `sums`, mean over the stages."""
        table = cost_model.table
        shifts = cost_model.states_over_heads(self.passing) if self.passing else 0.0
        both = prices_of(table.level_terms[self.rows] + shifts, sums[:, :1], sums[:, 1:])
        edges = float(table.edges_s_per_token.sum()) / self.topology.pp_size
        total: Floats = both.sum(axis=1) + edges * sums[:, 0] / self.cp_sizes
        return total

    def mean_over_places(self, seconds: Floats | float) -> float:
        """Return the seconds of the mean lane from [bucket] -> seconds."""
        return float(np.sum(seconds * self.cp_sizes)) / self.topology.num_lanes


def _buckets_of(plan: Plan, cost_model: CostModel) -> _Buckets:
    buckets = tuple(bucket for bucket in plan.buckets if not is_priced_lane_by_lane(bucket))
    multiple = plan.topology.rank_token_multiple
    padded = [padded_of(one, multiple) for one in buckets]
    squares = [
        squared_tokens(one.samples, tokens, cost_model.model) for one, tokens in zip(buckets, padded, strict=True)
    ]
    return _Buckets(
        rows=np.array([_row_of(one, cost_model) for one in buckets], np.int64),
        cp_sizes=np.array([one.cp_size for one in buckets], np.int64),
        padded=np.array([*zip(map(sum, padded), squares, strict=True)], np.float64),
        true=np.array([length_sums(one.samples, cost_model.model) for one in buckets], np.float64),
        is_empty=np.array([not one.samples for one in buckets]),
        topology=plan.topology,
        passing=buckets if any(one.exchanges_states for one in buckets) else (),
    )


def _row_of(bucket: Bucket, cost_model: CostModel) -> int:
    row = cost_model.row_of(bucket.cp_size, bucket.first_lane, bucket.cp_comm_type, bucket.inner_cp_size)
    assert row is not None, "the plan was made with these options"
    return row
