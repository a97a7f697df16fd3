"""Simulates blocks of lanes that share no group, and follows the critical path of each."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.longest_path import BACKWARD, FORWARD, Grid, end_times
from dynamic_cp.packing.profile import LaneGraph
from dynamic_cp.prices import Floats, Ints


@compiled
def simulate_blocks(
    operations: Ints, graph: LaneGraph, pp_size: int, vp_size: int, grid: Grid, first_lanes: Ints, num_lanes: Ints,
    backward_over_forward: float,
) -> tuple[Ints, Floats, Floats]:  # fmt: skip
    """Return [block] -> makespan, [block, row] -> longest lane, [block, row] -> crossings by the critical path.

    Args:
        operations, graph: the schedule of a lane.
        pp_size, vp_size: pipeline stages and model chunks of a stage.
        grid: durations of all lanes.
        first_lanes, num_lanes: [block] -> its lanes.
        backward_over_forward: a crossing counts by the share of its direction.
    """
    num_blocks, num_rows = len(first_lanes), grid.sizes.shape[0]
    ends_ns = np.zeros(num_blocks, np.int64)
    row_ns, crossings = np.zeros((num_blocks, num_rows)), np.zeros((num_blocks, num_rows))
    share = backward_over_forward / (1.0 + backward_over_forward)
    for block in range(num_blocks):
        start, stop = first_lanes[block], first_lanes[block] + num_lanes[block]
        part = Grid(
            grid.sizes[:, start:stop].copy(),
            grid.chunk_ns[:, :, start:stop].copy(),
            grid.edge_ns[:, :, :, start:stop].copy(),
            grid.hop_ns[:, start:stop].copy(),
        )
        ends = np.zeros((len(operations), stop - start), np.int64)
        ends_ns[block] = end_times(operations, pp_size, vp_size, part, ends)
        for row in range(num_rows):
            for lane in range(stop - start):
                both = part.chunk_ns[FORWARD, row, lane] + part.chunk_ns[BACKWARD, row, lane]
                row_ns[block, row] = max(row_ns[block, row], float(both * vp_size))
        _follow(operations, graph, pp_size, vp_size, part, ends, share, crossings[block])
    return ends_ns, row_ns, crossings


@compiled
def _follow(
    operations: Ints, graph: LaneGraph, pp_size: int, vp_size: int, grid: Grid, ends: Ints, share: float,
    crossings: Floats,
) -> None:  # fmt: skip
    """Follow one critical path back from the last end; count its operations by row."""
    last_virtual = pp_size * vp_size - 1
    at, lane = -1, 0
    for index in range(len(operations)):
        for one in range(ends.shape[1]):
            if at < 0 or ends[index, one] > ends[at, lane]:
                at, lane = index, one
    while at >= 0:
        stage, row, chunk, kind = operations[at]
        crossings[row] += share if kind == BACKWARD else 1.0 - share
        start = ends[at, lane] - grid.chunk_ns[kind, row, lane]
        virtual = chunk * pp_size + stage
        if virtual == 0:
            start -= grid.edge_ns[0, kind, row, lane]
        if virtual == last_virtual:
            start -= grid.edge_ns[1, kind, row, lane]
        size = grid.sizes[row, lane]
        first = lane // size * size
        before = graph.before[at]
        following = graph.source[at]
        if before >= 0:
            for member in range(first, first + size):
                if ends[before, member] == start:
                    following, lane = before, member
                    break
        at = following
