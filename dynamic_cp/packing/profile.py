"""How long each row of a lane should last: the best profile of durations for a pipeline, before any sample is packed.

With a pipeline, unequal neighbours cost more than uneven work: while one long micro-batch passes through the stages,
the others must fill the gaps. A profile gives every row of every class of lanes a duration, under the constraint that
all work is done and that a row with an indivisible long sample lasts at least as long as that. A lane's makespan is
the longest path through its schedule, convex in the durations; multiplicative weights find a profile close to the
best: a row shrinks in proportion to how often the longest path crosses it.

Typical result: rows grow geometrically (by about 1.4) over pp_size rows towards the long ones, fall over pp_size rows
after them, and the rest of such a lane stays nearly empty; lanes without long samples ramp up, stay flat, and decline.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.longest_path import FORWARD, common_operations
from dynamic_cp.prices import Floats, Ints

SMALLEST_SHARE = 3e-4
"""No row gets less than this share of the even work of a row, so that it can grow again."""


class LaneGraph(NamedTuple):
    """The schedule of one lane without groups.

    Attributes:
        micro_batch, kind: [operation] -> its micro-batch, FORWARD or BACKWARD; in an order in which they can run.
        before: [operation] -> the operation before it on its stage, or -1.
        source: [operation] -> the operation whose output it needs, or -1.
        ends: [stage] -> last operation.
    """

    micro_batch: Ints
    kind: Ints
    before: Ints
    source: Ints
    ends: Ints


@lru_cache(maxsize=512)
def lane_graph(pp_size: int, num_microbatches: int, vp_size: int) -> LaneGraph:
    """Return the graph of Megatron-Core's schedule."""
    operations = common_operations(pp_size, num_microbatches, vp_size)
    last_virtual = pp_size * vp_size - 1
    index: dict[tuple[int, int, int], int] = {}
    last = [-1] * pp_size
    before, source = [], []
    for position, (stage, micro_batch, chunk, kind) in enumerate(operations.tolist()):
        virtual = chunk * pp_size + stage
        if kind == FORWARD:
            needed = (kind, micro_batch, virtual - 1)
        else:
            needed = (kind, micro_batch, virtual + 1) if virtual < last_virtual else (FORWARD, micro_batch, virtual)
        before.append(last[stage])
        source.append(index.get(needed, -1))
        last[stage] = index[kind, micro_batch, virtual] = position
    return LaneGraph(
        operations[:, 1].copy(), operations[:, 3].copy(), np.array(before), np.array(source), np.array(last)
    )


class Lanes(NamedTuple):
    """Classes of lanes that share a profile.

    Attributes:
        num_lanes: [class] -> lanes of the class.
        long_forward_ns, long_backward_ns: [class, row] -> work of the indivisible sample there, without the overhead
            of a row; 0 where there is none.
    """

    num_lanes: Floats
    long_forward_ns: Floats
    long_backward_ns: Floats


@compiled
def best_profile(
    graph: LaneGraph, lanes: Lanes, vp_size: int, total_ns: float, backward_over_forward: float,
    empty_forward_ns: float, empty_backward_ns: float, num_iterations: int,
) -> tuple[float, Floats]:  # fmt: skip
    """Return (makespan in nanoseconds, [class, row] -> work of the row in nanoseconds, without its overhead).

    Args:
        graph: schedule of a lane.
        lanes: classes of lanes; their long rows are lower bounds.
        vp_size: model chunks of a stage.
        total_ns: work of all lanes together, without overheads of rows.
        backward_over_forward: ratio by which a row's work splits.
        empty_forward_ns, empty_backward_ns: overhead that each row pays.
        num_iterations: 60 rank candidates, 250 come within about 1 % of the best profile.
    """
    num_classes, num_rows = lanes.long_forward_ns.shape
    long_ns = lanes.long_forward_ns + lanes.long_backward_ns
    middle, width = num_rows / 2, num_rows / 3
    work = np.empty((num_classes, num_rows))
    for row in range(num_rows):
        work[:, row] = np.exp(-(((row - middle) / width) ** 2))
    forward, backward = np.empty(num_rows), np.empty(num_rows)
    crossings = np.zeros((num_classes, num_rows))
    makespan = np.zeros(num_classes)
    ends = np.zeros(len(graph.kind))
    crossed_forward, crossed_backward = np.zeros(num_rows), np.zeros(num_rows)
    share = backward_over_forward / (1.0 + backward_over_forward)
    smallest_ns = SMALLEST_SHARE * total_ns / lanes.num_lanes.sum() / num_rows
    best, best_work = np.inf, work.copy()
    for iteration in range(num_iterations):
        fixed = free = 0.0
        for one in range(num_classes):
            for row in range(num_rows):
                if long_ns[one, row] > 0.0 and work[one, row] <= 1.0001 * long_ns[one, row]:
                    work[one, row] = long_ns[one, row]
                    fixed += lanes.num_lanes[one] * work[one, row]
                else:
                    free += lanes.num_lanes[one] * work[one, row]
        scale = max(0.0, total_ns - fixed) / max(free, 1e-9)
        for one in range(num_classes):
            for row in range(num_rows):
                if long_ns[one, row] > 0.0 and work[one, row] <= 1.0001 * long_ns[one, row]:
                    forward[row] = (empty_forward_ns + lanes.long_forward_ns[one, row]) / vp_size
                    backward[row] = (empty_backward_ns + lanes.long_backward_ns[one, row]) / vp_size
                else:
                    work[one, row] = max(smallest_ns, work[one, row] * scale)
                    forward[row] = (empty_forward_ns + work[one, row] * (1.0 - share)) / vp_size
                    backward[row] = (empty_backward_ns + work[one, row] * share) / vp_size
            makespan[one] = _cross(graph, forward, backward, ends, crossed_forward, crossed_backward)
            crossings[one] = (1.0 - share) * crossed_forward + share * crossed_backward
        worst = makespan.max()
        if worst < best:
            best = worst
            best_work[:] = work
        rate = 0.1 / (1.0 + 3.0 * iteration / num_iterations)
        for one in range(num_classes):
            # Classes within 1 % of the slowest learn, the slowest most.
            pull = min(1.0, 1.0005 - (worst - makespan[one]) / (0.01 * worst))
            if pull <= 0.0:
                continue
            moved = crossed = 0.0
            for row in range(num_rows):
                if not (long_ns[one, row] > 0.0 and work[one, row] <= 1.0001 * long_ns[one, row]):
                    moved += work[one, row]
                    crossed += work[one, row] * crossings[one, row]
            mean = max(crossed, 1e-9) / max(moved, 1e-9)
            for row in range(num_rows):
                work[one, row] = max(smallest_ns, work[one, row] * np.exp(-rate * pull * crossings[one, row] / mean))
    return best, best_work


@compiled
def _cross(
    graph: LaneGraph, forward: Floats, backward: Floats, ends: Floats, crossed_forward: Floats, crossed_backward: Floats
) -> float:
    """Return the makespan of one lane; count how often its longest path crosses each row, forward and backward."""
    for index in range(len(graph.kind)):
        start = 0.0
        if graph.before[index] >= 0:
            start = ends[graph.before[index]]
        if graph.source[index] >= 0:
            start = max(start, ends[graph.source[index]])
        row = graph.micro_batch[index]
        ends[index] = start + (forward[row] if graph.kind[index] == FORWARD else backward[row])
    at = graph.ends[0]
    for end in graph.ends:
        if ends[end] > ends[at]:
            at = end
    makespan = ends[at]
    crossed_forward[:] = 0.0
    crossed_backward[:] = 0.0
    while at >= 0:
        if graph.kind[at] == FORWARD:
            crossed_forward[graph.micro_batch[at]] += 1.0
        else:
            crossed_backward[graph.micro_batch[at]] += 1.0
        before, source = graph.before[at], graph.source[at]
        if before < 0 or (source >= 0 and ends[source] > ends[before]):
            at = source
        else:
            at = before
    return makespan  # type: ignore[no-any-return]
