"""Simulates blocks of lanes that share no group, and follows the critical path of each."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pipeline.graph import BACKWARD, FORWARD, Graph
from dynamic_cp.pipeline.longest_path import Grid, end_times


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
