"""A simulated iteration: when each operation ran, and where the time of every rank went.

All ranks of one (stage, lane) do the same, so they are one place here. On every place, in whole nanoseconds,

    busy + pipeline bubble + CP wait + DP wait = makespan

    busy             computes, or waits inside an operation: for an exposed exchange of keys and values, or in layers
                     with experts for the lanes that share them
    pipeline bubble  free, but the input of its next operation is not there yet; or done, while the same lane still
                     works on other stages (the pipeline drains)
    CP wait          free and its input is there, but another lane of the bucket's group has not come to the operation
    DP wait          the lane is done on all stages, other lanes are not

A place that waits for both its input and its group is in the pipeline bubble until the input arrives. Waits are named
by their nearest cause: an input that is late because the stage before it waited for its group is a pipeline bubble.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.pipeline.schedule import EMBEDDING, HEAD, Graph, Operation, places_of
from dynamic_cp.types import Bucket, Plan


class Span(NamedTuple):
    """When one bucket ran one operation on one stage: its lanes start together, `end_ns` is that of the last one."""

    stage: int
    operation: Operation
    bucket: Bucket
    start_ns: int
    end_ns: int
    lane_ends_ns: tuple[int, ...]

    def end_on_ns(self, lane: int) -> int:
        """Return when `lane`, one of the bucket's, ended."""
        return self.lane_ends_ns[lane - self.bucket.first_lane]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeSplit:
    """Nanoseconds of every place by what it did, each [stage, lane]; the four add up to the makespan everywhere."""

    busy_ns: Ints
    pipeline_bubble_ns: Ints
    cp_wait_ns: Ints
    dp_wait_ns: Ints

    @property
    def busy_fraction(self) -> float:
        """Share of all ranks' time that is busy."""
        return self._fraction(self.busy_ns)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which nothing runs: pipeline bubble, CP wait and DP wait together."""
        return self._fraction(self.pipeline_bubble_ns + self.cp_wait_ns + self.dp_wait_ns)

    @property
    def pipeline_bubble_fraction(self) -> float:
        """Share of all ranks' time spent in the pipeline bubble."""
        return self._fraction(self.pipeline_bubble_ns)

    @property
    def cp_wait_fraction(self) -> float:
        """Share of all ranks' time spent waiting for other lanes of a group."""
        return self._fraction(self.cp_wait_ns)

    @property
    def dp_wait_fraction(self) -> float:
        """Share of all ranks' time spent done, while other lanes still work."""
        return self._fraction(self.dp_wait_ns)

    def _fraction(self, part_ns: Ints) -> float:
        total_ns = (self.busy_ns + self.pipeline_bubble_ns + self.cp_wait_ns + self.dp_wait_ns).sum()
        return float(part_ns.sum() / total_ns) if total_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The simulated iteration of `plan`. What is derived is computed at each access: keep it if you need it twice.

    Attributes:
        grid: durations of the plan's buckets.
        graph: the operations of all stages and what each waits for.
        ends_ns: [operation, lane] -> its end; the iteration starts at 0.
        gradient_reduction_s: what reducing gradients and gathering parameters add.
    """

    plan: Plan
    grid: Grid
    graph: Graph
    ends_ns: Ints
    gradient_reduction_s: float

    def __repr__(self) -> str:
        return f"<Timeline: {self.iteration_s:.4g} s, {self.plan.describe()}>"

    @property
    def makespan_ns(self) -> int:
        """End of the last operation."""
        return int(self.ends_ns.max())

    @property
    def makespan_s(self) -> float:
        """Seconds of forward and backward of all micro-batches."""
        return self.makespan_ns / 1e9

    @property
    def iteration_s(self) -> float:
        """Seconds of the iteration, with the exposed part of the gradient reduction."""
        return self.makespan_s + self.gradient_reduction_s

    @property
    def lane_busy_s(self) -> tuple[float, ...]:
        """Seconds of compute and exposed exchange of each lane on one stage, the mean of its stages."""
        busy_ns = durations_ns(self.grid, self.graph).sum(axis=0)
        return tuple((busy_ns / self.plan.topology.pp_size / 1e9).tolist())

    @property
    def split(self) -> TimeSplit:
        """Where the time of every (stage, lane) went."""
        pp_size, num_lanes = self.plan.topology.pp_size, self.plan.topology.num_lanes
        durations = durations_ns(self.grid, self.graph)
        arrivals = self._arrivals_ns()
        busy, pipeline, group, last_end = np.zeros((4, pp_size, num_lanes), np.int64)
        for stage in range(pp_size):
            here = self.graph.stage == stage
            starts, ends = self.ends_ns[here] - durations[here], self.ends_ns[here]
            in_time = np.lexsort((starts, ends), axis=0)  # per lane; lists may differ from lane to lane
            starts, ends = np.take_along_axis(starts, in_time, axis=0), np.take_along_axis(ends, in_time, axis=0)
            arrived = np.take_along_axis(arrivals[here], in_time, axis=0)
            free = np.zeros_like(ends)
            free[1:] = ends[:-1]
            ready = np.maximum(free, arrived)
            busy[stage] = durations[here].sum(axis=0)
            pipeline[stage] = (ready - free).sum(axis=0)
            group[stage] = (starts - ready).sum(axis=0)
            last_end[stage] = ends[-1]
        lane_end = last_end.max(axis=0)
        return TimeSplit(
            busy_ns=busy,
            pipeline_bubble_ns=pipeline + lane_end - last_end,
            cp_wait_ns=group,
            dp_wait_ns=np.tile(lane_end.max() - lane_end, (pp_size, 1)),
        )

    @property
    def spans(self) -> tuple[Span, ...]:
        """Start and end of every operation of every bucket, by start, then end."""
        durations = durations_ns(self.grid, self.graph)
        spans = []
        for index, (stage, operation) in enumerate(places_of(self.graph)):
            for bucket in self.plan.micro_batches[operation.micro_batch].buckets:
                first = bucket.first_lane
                ends_ns = tuple(self.ends_ns[index, first : first + bucket.cp_size].tolist())
                start_ns = ends_ns[0] - int(durations[index, first])
                spans.append(Span(stage, operation, bucket, start_ns, max(ends_ns), ends_ns))
        return tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))

    def _arrivals_ns(self) -> Ints:
        """Return [operation, lane] -> when its input arrives; 0 if it needs none from another stage."""
        arrivals: Ints = self.ends_ns[self.graph.sender] + self.grid.hop_ns[self.graph.micro_batch]
        arrivals[self.graph.sender < 0] = 0
        return arrivals


def durations_ns(grid: Grid, graph: Graph, which: Ints | slice = slice(None)) -> Ints:
    """Return [operation of `which`, lane] -> nanoseconds from start to end, embedding and head included."""
    kind, micro_batch, pays = graph.kind[which], graph.micro_batch[which], graph.pays[which]
    durations: Ints = grid.chunk_ns[kind, micro_batch]
    for edge in (EMBEDDING, HEAD):
        paid = pays[:, edge]
        durations[paid] += grid.edge_ns[edge, kind[paid], micro_batch[paid]]
    return durations
