"""How long each row of a lane should last: the best profile of durations for a pipeline, before any sample is packed.

With a pipeline, unequal neighbours cost more than uneven work: while one long micro-batch passes through the stages,
the others must fill the gaps. A profile gives every row of every class of lanes a duration, under the constraint that
all work is done and that a row with an indivisible long sample lasts at least as long as that. A lane's makespan is
the longest path through its schedule, convex in the durations; multiplicative weights find a profile close to the
best: a row shrinks in proportion to how often the longest path crosses it. `simulate_blocks` counts such crossings in
blocks of lanes that are packed and share no group.

Typical result: rows grow geometrically (by about 1.4) over pp_size rows towards the long ones, fall over pp_size rows
after them, and the rest of such a lane stays nearly empty; lanes without long samples ramp up, stay flat, and decline.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pipeline.longest_path import Grid, end_times
from dynamic_cp.pipeline.schedule import BACKWARD, FORWARD, Graph

SMALLEST_SHARE = 3e-4
"""No row gets less than this share of the even work of a row, so that it can grow again."""


class LaneClasses(NamedTuple):
    """Classes of lanes that share a profile.

    Attributes:
        num_lanes: [class] -> lanes of the class.
        long_forward_ns, long_backward_ns: [class, row] -> work of the indivisible sample there, without the overhead
            of a row; 0 where there is none.
    """

    num_lanes: Floats
    long_forward_ns: Floats
    long_backward_ns: Floats


class Work(NamedTuple):
    """What candidates have to do.

    Attributes:
        total_ns: work of all lanes of a candidate together, without overheads of rows.
        backward_over_forward: ratio by which a row's work splits.
        empty_ns: (forward, backward) overhead that each row pays.
        vp_size: model chunks of a stage, which share a row's work.
    """

    total_ns: float
    backward_over_forward: float
    empty_ns: tuple[float, float]
    vp_size: int


@compiled
def best_profiles(
    graph: Graph, lanes: LaneClasses, first_classes: Ints, work: Work, num_iterations: int
) -> tuple[Floats, Floats]:
    """Return ([candidate] makespan, [class, row] work of the row without its overhead), in nanoseconds.

    Candidates do not influence each other; together they are faster than one after the other.

    Example:
        Two stages, three rows, one class with 12 ns, all of it forward. Say that rows last 3, 6 and 3 ns. The longest
        path is rows 1 and 2 on the first stage, then rows 2 and 3 on the second: 18 ns. It crosses row 2 twice, so row
        2 shrinks most, and all are scaled to 12 ns again. Rows of 4 ns each end after 16 ns.

        >>> lanes = LaneClasses(np.ones(1), np.zeros((1, 3)), np.zeros((1, 3)))
        >>> work = Work(total_ns=12.0, backward_over_forward=0.0, empty_ns=(0.0, 0.0), vp_size=1)
        >>> best_profiles(pipeline_graph(2, 3, 1), lanes, np.array([0, 1]), work, 250)[0].round(1).tolist()
        [16.0]

    Args:
        graph: the operations of a lane and what each waits for.
        lanes: classes of lanes of all candidates; their long rows are lower bounds.
        first_classes: [candidate] -> its first class, and at the end the number of classes.
        work: of each candidate.
        num_iterations: 40 rank candidates, 250 come within about 1 % of the best profile.
    """
    num_classes, num_rows = lanes.long_forward_ns.shape
    num_candidates = len(first_classes) - 1
    long_ns = lanes.long_forward_ns + lanes.long_backward_ns
    middle, width = num_rows / 2, num_rows / 3
    row_ns = np.empty((num_classes, num_rows))
    for row in range(num_rows):
        row_ns[:, row] = np.exp(-(((row - middle) / width) ** 2))
    durations = np.empty((2, num_rows, num_classes))
    ends, makespan = np.zeros((len(graph.kind) + 1, num_classes)), np.zeros(num_classes)
    crossed = np.zeros((2, num_rows))
    share = work.backward_over_forward / (1.0 + work.backward_over_forward)
    best, best_row_ns = np.full(num_candidates, np.inf), row_ns.copy()
    smallest_ns = np.empty(num_candidates)
    for candidate in range(num_candidates):
        all_lanes = lanes.num_lanes[first_classes[candidate] : first_classes[candidate + 1]].sum()
        smallest_ns[candidate] = SMALLEST_SHARE * work.total_ns / all_lanes / num_rows
    for iteration in range(num_iterations):
        for candidate in range(num_candidates):
            classes = (first_classes[candidate], first_classes[candidate + 1])
            _scale(lanes, long_ns, classes, work, share, smallest_ns[candidate], row_ns, durations)
        _run(graph, durations, ends, makespan)
        rate = 0.1 / (1.0 + 3.0 * iteration / num_iterations)
        for candidate in range(num_candidates):
            first, end = first_classes[candidate], first_classes[candidate + 1]
            worst = makespan[first:end].max()
            if worst < best[candidate]:
                best[candidate] = worst
                best_row_ns[first:end] = row_ns[first:end]
            for one in range(first, end):
                # Classes within 1 % of the slowest learn, the slowest most.
                pull = min(1.0, 1.0005 - (worst - makespan[one]) / (0.01 * worst))
                if pull > 0.0:
                    _cross(graph, ends, one, crossed)
                    _learn(long_ns, one, share, rate * pull, crossed, smallest_ns[candidate], row_ns)
    return best, best_row_ns


@inlined
def _is_bound(long_ns: Floats, row_ns: Floats, one: int, row: int) -> bool:
    """Return whether the row of a class is as short as the long sample in it allows."""
    return long_ns[one, row] > 0.0 and row_ns[one, row] <= 1.0001 * long_ns[one, row]  # type: ignore[no-any-return]


@compiled
def _scale(
    lanes: LaneClasses, long_ns: Floats, classes: tuple[int, int], work: Work, share: float, smallest_ns: float,
    row_ns: Floats, durations: Floats,
) -> None:  # fmt: skip
    """Scale the rows of a candidate, of `classes`, to all of its work, those of long samples apart; write durations."""
    num_lanes, long_forward_ns, long_backward_ns = lanes
    (first, end), num_rows = classes, row_ns.shape[1]
    fixed = free = 0.0
    for one in range(first, end):
        for row in range(num_rows):
            if _is_bound(long_ns, row_ns, one, row):
                row_ns[one, row] = long_ns[one, row]
                fixed += num_lanes[one] * row_ns[one, row]
            else:
                free += num_lanes[one] * row_ns[one, row]
    scale = max(0.0, work.total_ns - fixed) / max(free, 1e-9)
    for one in range(first, end):
        for row in range(num_rows):
            if _is_bound(long_ns, row_ns, one, row):
                forward_ns, backward_ns = long_forward_ns[one, row], long_backward_ns[one, row]
            else:
                row_ns[one, row] = max(smallest_ns, row_ns[one, row] * scale)
                forward_ns, backward_ns = row_ns[one, row] * (1.0 - share), row_ns[one, row] * share
            durations[FORWARD, row, one] = (work.empty_ns[FORWARD] + forward_ns) / work.vp_size
            durations[BACKWARD, row, one] = (work.empty_ns[BACKWARD] + backward_ns) / work.vp_size


@compiled
def _learn(
    long_ns: Floats, one: int, share: float, rate: float, crossed: Floats, smallest_ns: float, row_ns: Floats
) -> None:
    """Shrink each row of a class by how often its longest path crosses it, [FORWARD or BACKWARD, row]."""
    moved = counted = 0.0
    for row in range(row_ns.shape[1]):
        crossed[FORWARD, row] = (1.0 - share) * crossed[FORWARD, row] + share * crossed[BACKWARD, row]
        if not _is_bound(long_ns, row_ns, one, row):
            moved += row_ns[one, row]
            counted += row_ns[one, row] * crossed[FORWARD, row]
    mean = max(counted, 1e-9) / max(moved, 1e-9)
    for row in range(row_ns.shape[1]):
        learned = row_ns[one, row] * np.exp(-rate * crossed[FORWARD, row] / mean)
        row_ns[one, row] = max(smallest_ns, learned)


@compiled
def _run(graph: Graph, durations: Floats, ends: Floats, makespan: Floats) -> None:
    """Write when each operation ends, [operation, class], and the makespan of each class of lanes.

    Args:
        graph: hops take no time.
        durations: [FORWARD or BACKWARD, row, class] nanoseconds of a chunk.
        ends: one row longer; the last one, of what comes before the first operation, is 0.
    """
    micro_batch, kind, before, sender = graph.micro_batch, graph.kind, graph.before, graph.sender
    num_classes = ends.shape[1]
    for index in range(len(kind)):
        at, needed, way, row = before[index], sender[index], kind[index], micro_batch[index]
        if at < 0:
            at = len(kind)
        if needed < 0:
            needed = len(kind)
        for one in range(num_classes):
            ends[index, one] = max(ends[at, one], ends[needed, one]) + durations[way, row, one]
    makespan[:] = 0.0
    for index in graph.last:
        for one in range(num_classes):
            makespan[one] = max(makespan[one], ends[index, one])


@compiled
def _cross(graph: Graph, ends: Floats, one: int, crossed: Floats) -> None:
    """Count how often the longest path of a class crosses each row, [FORWARD or BACKWARD, row]."""
    micro_batch, kind, before, sender = graph.micro_batch, graph.kind, graph.before, graph.sender
    at = graph.last[0]
    for end in graph.last:
        if ends[end, one] > ends[at, one]:
            at = end
    crossed[:] = 0.0
    while at >= 0:
        crossed[kind[at], micro_batch[at]] += 1.0
        if before[at] < 0 or (sender[at] >= 0 and ends[sender[at], one] > ends[before[at], one]):
            at = sender[at]
        else:
            at = before[at]


@compiled
def simulate_blocks(
    graph: Graph, vp_size: int, grid: Grid, first_lanes: Ints, num_lanes: Ints, backward_over_forward: float
) -> tuple[Ints, Floats, Floats]:
    """Return [block] -> makespan, [block, row] -> longest lane, [block, row] -> crossings by the critical path.

    Args:
        graph: the operations and what each waits for.
        vp_size: model chunks of a stage.
        grid: durations of all lanes.
        first_lanes, num_lanes: [block] -> its lanes.
        backward_over_forward: a crossing counts by the share of its direction.
    """
    num_blocks, (num_rows, all_lanes) = len(first_lanes), grid.sizes.shape
    ends_ns = np.zeros(num_blocks, np.int64)
    row_ns, crossings = np.zeros((num_blocks, num_rows)), np.zeros((num_blocks, num_rows))
    share = backward_over_forward / (1.0 + backward_over_forward)
    chunk_ns = grid.chunk_ns
    ends = np.empty((len(graph.kind), all_lanes), np.int64)
    end_times(graph, grid, ends)
    last_operations = np.sort(graph.last)
    for block in range(num_blocks):
        start, stop = first_lanes[block], first_lanes[block] + num_lanes[block]
        for row in range(num_rows):
            for lane in range(start, stop):
                both = chunk_ns[FORWARD, row, lane] + chunk_ns[BACKWARD, row, lane]
                row_ns[block, row] = max(row_ns[block, row], float(both * vp_size))
        at, last_lane = -1, start
        for index in last_operations:
            for lane in range(start, stop):
                if at < 0 or ends[index, lane] > ends[at, last_lane]:
                    at, last_lane = index, lane
        ends_ns[block] = ends[at, last_lane]
        _follow(graph, grid, ends, at, last_lane, share, crossings, block)
    return ends_ns, row_ns, crossings


@compiled
def _follow(
    graph: Graph, grid: Grid, ends: Ints, at: int, lane: int, share: float, crossings: Floats, block: int
) -> None:
    """Follow one critical path back from operation `at` on `lane`; count its operations by row of `block`."""
    kinds, rows, befores, senders, pays = graph.kind, graph.micro_batch, graph.before, graph.sender, graph.pays
    sizes, chunk_ns, edge_ns = grid.sizes, grid.chunk_ns, grid.edge_ns
    while at >= 0:
        kind, row = kinds[at], rows[at]
        crossings[block, row] += share if kind == BACKWARD else 1.0 - share
        start = ends[at, lane] - chunk_ns[kind, row, lane]
        for edge in range(2):
            if pays[at, edge]:
                start -= edge_ns[edge, kind, row, lane]
        size = sizes[row, lane]
        first = lane // size * size
        before = befores[at]
        following = senders[at]
        if before >= 0:
            for member in range(first, first + size):
                if ends[before, member] == start:
                    following, lane = before, member
                    break
        at = following
