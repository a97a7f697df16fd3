"""Exact times of a plan: the longest path through the schedules of all stages and lanes.

A bucket starts an operation on a stage when its input has arrived and the stage is free on ALL its lanes, and ends on
all of them together. There is no other barrier: neither between micro-batches nor between lanes that share no bucket.
Times are whole nanoseconds, so two candidates compare the same on every CPU.

Virtual stage g = chunk * pp_size + stage. F at g needs F at g - 1 and one hop; B at g needs B at g + 1 and one hop; B
at the last g needs its own F. A hop delays its receiver and occupies nobody.

Limits: a group's operation is one event (its lanes do not drift apart inside it); the end-of-step gradient reduction
is not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dynamic_cp.cost_model import CostModel, nanoseconds
from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.schedule import Operation, stage_operations
from dynamic_cp.types import Bucket, Plan

LaneOperations = Mapping[tuple[int, int], Sequence[Operation]]
"""(stage, lane) -> what it runs, in order."""


class Step(NamedTuple):
    """One operation of one stage on some buckets (indices into its micro-batch; None = all, in lane order)."""

    stage: int
    operation: Operation
    bucket_index: int | None = None


class Span(NamedTuple):
    """When one bucket ran one operation on one stage."""

    stage: int
    operation: Operation
    bucket: Bucket
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The simulated iteration of `plan`.

    Attributes:
        makespan_ns: end of the last operation; the iteration starts at 0.
        lane_busy_s: seconds of compute and exposed exchange of each lane on one stage (the same on every stage).
        spans: start and end of every operation, in an order in which they can run.
    """

    plan: Plan
    makespan_ns: int
    lane_busy_s: tuple[float, ...]
    spans: tuple[Span, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds of the iteration, forward and backward of all micro-batches."""
        return self.makespan_ns / 1e9

    @property
    def bubble_fraction(self) -> float:
        """Share of all lanes' and stages' time in which nothing runs."""
        total_s = self.makespan_s * len(self.lane_busy_s)
        return 1.0 - sum(self.lane_busy_s) / total_s if total_s > 0 else 0.0


class _TimedBucket(NamedTuple):
    first_lane: int
    end_lane: int
    forward_ns: int
    backward_ns: int
    p2p_ns: int


def simulate(plan: Plan, cost_model: CostModel, operations: LaneOperations | None = None) -> Timeline:
    """Return the timeline of `plan`.

    Args:
        plan: a plan that passes `check_plan`.
        cost_model: prices of its buckets.
        operations: what each (stage, lane) runs; None = Megatron-Core's schedule, the same list on every lane.

    Raises:
        IllegalPlanError: `operations` deadlock; the message names the stuck actions.
    """
    timed = _time_buckets(plan, cost_model)
    ends: list[tuple[Step, int, int]] = []
    total_ns = _longest_path(plan, timed, _steps(plan, operations), ends)
    spans = []
    for step, index, end_ns in ends:
        times = timed[step.operation.micro_batch][index]
        length_ns = times.forward_ns if step.operation.kind == "F" else times.backward_ns
        bucket = plan.micro_batches[step.operation.micro_batch].buckets[index]
        spans.append(Span(step.stage, step.operation, bucket, (end_ns - length_ns) / 1e9, end_ns / 1e9))
    busy_ns = [0] * plan.topology.num_lanes
    for micro_batch in timed:
        for times in micro_batch:
            for lane in range(times.first_lane, times.end_lane):
                busy_ns[lane] += (times.forward_ns + times.backward_ns) * plan.topology.vp_size
    return Timeline(
        plan=plan,
        makespan_ns=total_ns,
        lane_busy_s=tuple(busy / 1e9 for busy in busy_ns),
        spans=tuple(spans),
    )


def makespan_ns(plan: Plan, cost_model: CostModel) -> int:
    """Return only the makespan of `plan` in nanoseconds: what a search compares."""
    return _longest_path(plan, _time_buckets(plan, cost_model), _steps(plan, None), None)


def _time_buckets(plan: Plan, cost_model: CostModel) -> list[list[_TimedBucket]]:
    """Return nanoseconds of ONE operation of each bucket: a model chunk takes 1 / vp_size of its stage."""
    vp_size = plan.topology.vp_size
    timed = []
    for micro_batch in plan.micro_batches:
        row = []
        for bucket in micro_batch.buckets:
            forward_s, backward_s, p2p_s = cost_model.bucket_cost(bucket)
            row.append(
                _TimedBucket(
                    bucket.first_lane,
                    bucket.first_lane + bucket.cp_size,
                    nanoseconds(forward_s / vp_size),
                    nanoseconds(backward_s / vp_size),
                    nanoseconds(p2p_s),
                )
            )
        timed.append(row)
    return timed


def _longest_path(
    plan: Plan,
    timed: Sequence[Sequence[_TimedBucket]],
    steps: Sequence[Step],
    ends: list[tuple[Step, int, int]] | None,
) -> int:
    """Return the end of the last operation; append (step, bucket index, end) of each operation to `ends` if given."""
    pp_size, vp_size = plan.topology.pp_size, plan.topology.vp_size
    last_virtual_stage = pp_size * vp_size - 1
    free_ns = [[0] * plan.topology.num_lanes for _ in range(pp_size)]
    # [virtual stage][micro-batch][bucket]: when its output is ready
    forward_end = [[[0] * len(row) for row in timed] for _ in range(last_virtual_stage + 1)]
    backward_end = [[[0] * len(row) for row in timed] for _ in range(last_virtual_stage + 1)]
    for step in steps:
        stage, (kind, micro_batch, chunk), bucket_index = step
        virtual_stage = chunk * pp_size + stage
        is_forward = kind == "F"
        if is_forward:
            output = forward_end[virtual_stage][micro_batch]
            source = forward_end[virtual_stage - 1][micro_batch] if virtual_stage > 0 else None
        else:
            output = backward_end[virtual_stage][micro_batch]
            source = backward_end[virtual_stage + 1][micro_batch] if virtual_stage < last_virtual_stage else None
        free = free_ns[stage]
        row = timed[micro_batch]
        for index in range(len(row)) if bucket_index is None else (bucket_index,):
            first, end, forward_ns, backward_ns, p2p_ns = row[index]
            start_ns = free[first] if end - first == 1 else max(free[first:end])
            if source is not None and source[index] + p2p_ns > start_ns:
                start_ns = source[index] + p2p_ns
            end_ns = start_ns + (forward_ns if is_forward else backward_ns)
            output[index] = end_ns
            for lane in range(first, end):
                free[lane] = end_ns
            if ends is not None:
                ends.append((step, index, end_ns))
    return max(map(max, free_ns))


def _steps(plan: Plan, operations: LaneOperations | None) -> Sequence[Step]:
    topology = plan.topology
    if operations is None:
        # Every lane of a stage runs the same list, so an order that is right for one lane is right for all buckets.
        return _common_order(topology.pp_size, plan.num_microbatches, topology.vp_size)
    groups = [[bucket.lanes for bucket in micro_batch.buckets] for micro_batch in plan.micro_batches]
    return resolve(operations, groups, topology.pp_size, topology.vp_size)


@lru_cache(maxsize=256)
def _common_order(pp_size: int, num_microbatches: int, vp_size: int) -> tuple[Step, ...]:
    one_lane = {(stage, 0): stage_operations(stage, pp_size, num_microbatches, vp_size) for stage in range(pp_size)}
    steps = resolve(one_lane, [[range(1)]] * num_microbatches, pp_size, vp_size)
    return tuple(step._replace(bucket_index=None) for step in steps)


def resolve(
    operations: LaneOperations, groups: Sequence[Sequence[range]], pp_size: int, vp_size: int
) -> tuple[Step, ...]:
    """Return all operations in an order in which they can run.

    Args:
        operations: what each (stage, lane) runs, in order.
        groups: [micro-batch][bucket] -> lanes of the bucket.
        pp_size, vp_size: stages and model chunks of a stage.

    Raises:
        IllegalPlanError: the lists deadlock. `stuck` maps (stage, lane) to the operation it cannot start.
    """
    last_virtual_stage = pp_size * vp_size - 1
    bucket_of_lane = [{lane: index for index, lanes in enumerate(row) for lane in lanes} for row in groups]
    position = dict.fromkeys(operations, 0)
    done: set[tuple[str, int, int, int]] = set()  # kind, micro-batch, virtual stage, bucket
    steps: list[Step] = []

    def next_operation(place: tuple[int, int]) -> Operation | None:
        todo = operations.get(place, ())
        return todo[position[place]] if todo and position[place] < len(todo) else None

    def obstacle(stage: int, lane: int, operation: Operation) -> str | None:
        """Return what keeps `operation` from starting; None when it can."""
        kind, micro_batch, chunk = operation
        index, virtual_stage = bucket_of_lane[micro_batch][lane], chunk * pp_size + stage
        source: tuple[str, int] | None = None
        if kind == "F" and virtual_stage > 0:
            source = ("F", virtual_stage - 1)
        elif kind == "B":
            at_end = virtual_stage == last_virtual_stage
            source = ("F", virtual_stage) if at_end else ("B", virtual_stage + 1)
        if source is not None and (source[0], micro_batch, source[1], index) not in done:
            needed = Operation("F" if source[0] == "F" else "B", micro_batch, source[1] // pp_size)
            return f"{needed} on stage {source[1] % pp_size}"
        for member in groups[micro_batch][index]:
            at_member = next_operation((stage, member))
            if at_member != operation:
                return f"lane {member}, which is at {at_member or 'its end'}"
        return None

    # Only the lanes next to a change can become ready: those of the same group, and of the neighbour stages.
    pending = list(operations)
    while pending:
        stage, lane = pending.pop()
        operation = next_operation((stage, lane))
        if operation is None or obstacle(stage, lane, operation) is not None:
            continue
        index = bucket_of_lane[operation.micro_batch][lane]
        members = groups[operation.micro_batch][index]
        done.add((operation.kind, operation.micro_batch, operation.chunk * pp_size + stage, index))
        steps.append(Step(stage, operation, index))
        for member in members:
            position[stage, member] += 1
        neighbours = {stage, (stage + 1) % pp_size, (stage - 1) % pp_size}
        pending += [(other, member) for other in sorted(neighbours) for member in members]

    stuck = {place: operation for place in operations if (operation := next_operation(place)) is not None}
    if stuck:
        lines = [
            f"  stage {stage} lane {lane} at {operation} waits for {obstacle(stage, lane, operation)}"
            for (stage, lane), operation in sorted(stuck.items())
        ]
        raise IllegalPlanError(
            f"the operations deadlock: {len(stuck)} of {len(operations)} (stage, lane) places are stuck; "
            "run shared groups in one order on all their lanes\n" + "\n".join(lines),
            stuck=stuck,
        )
    return tuple(steps)
