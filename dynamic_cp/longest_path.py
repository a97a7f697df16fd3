"""The makespan of a packing: the longest path through the schedules of all stages and lanes, as one compiled loop.

A bucket starts an operation on a stage when its input has arrived and the stage is free on ALL its lanes, and ends on
all of them together. There is no other barrier. Virtual stage g = chunk * pp_size + stage: F at g needs F at g - 1 and
one hop, B at g needs B at g + 1 and one hop, B at the last g comes after its F in the list. A hop delays its receiver
and occupies nobody. The first virtual stage also embeds tokens, the last one computes logits and loss.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.prices import Ints
from dynamic_cp.schedule import stage_operations

FORWARD, BACKWARD = 0, 1
EMBEDDING, HEAD = 0, 1


class Grid(NamedTuple):
    """Durations of a packing, whole nanoseconds; lanes of one bucket hold equal numbers.

    Attributes:
        sizes: [micro-batch, lane] -> lanes of the bucket there.
        chunk_ns: [FORWARD or BACKWARD, micro-batch, lane] -> one model chunk without embedding and head.
        edge_ns: [EMBEDDING or HEAD, FORWARD or BACKWARD, micro-batch, lane] -> what the edge stages do in addition.
        hop_ns: [micro-batch, lane] -> delay to the next stage.
    """

    sizes: Ints
    chunk_ns: Ints
    edge_ns: Ints
    hop_ns: Ints


@lru_cache(maxsize=512)
def common_operations(pp_size: int, num_microbatches: int, vp_size: int) -> Ints:
    """Return [operation] -> (stage, micro-batch, chunk, FORWARD or BACKWARD), in an order in which one lane can run.

    All lanes run the same lists, so the order is right for every bucket of any plan.
    """
    lists = [stage_operations(stage, pp_size, num_microbatches, vp_size) for stage in range(pp_size)]
    position = [0] * pp_size
    done: set[tuple[int, int, int]] = set()  # kind, micro-batch, virtual stage
    last = pp_size * vp_size - 1
    rows: list[tuple[int, int, int, int]] = []
    pending = list(range(pp_size))
    while pending:
        stage = pending.pop()
        while position[stage] < len(lists[stage]):
            operation = lists[stage][position[stage]]
            virtual, kind = operation.chunk * pp_size + stage, int(operation.kind == "B")
            if kind == FORWARD:
                source = (FORWARD, operation.micro_batch, virtual - 1) if virtual > 0 else None
            else:
                at_end = virtual == last
                source = (FORWARD if at_end else BACKWARD, operation.micro_batch, virtual if at_end else virtual + 1)
            if source is not None and source not in done:
                break
            done.add((kind, operation.micro_batch, virtual))
            rows.append((stage, operation.micro_batch, operation.chunk, kind))
            position[stage] += 1
            pending += [(stage + 1) % pp_size, (stage - 1) % pp_size]
    operations = np.array(rows, np.int64).reshape(-1, 4)
    operations.setflags(write=False)
    return operations


@compiled
def end_times(operations: Ints, pp_size: int, vp_size: int, grid: Grid, ends: Ints) -> int:
    """Return the end of the last operation in nanoseconds.

    Args:
        operations: [operation, 4] of `common_operations`.
        pp_size, vp_size: pipeline stages and model chunks of a stage.
        grid: what runs.
        ends: [operation, lane], filled with the end of each operation; shape [0, lane] when nobody needs it.
    """
    # An array is taken out of its tuple once: compiled code counts references.
    sizes, chunk_ns, edge_ns, hop_ns = grid.sizes, grid.chunk_ns, grid.edge_ns, grid.hop_ns
    num_microbatches, num_lanes = sizes.shape
    last = pp_size * vp_size - 1
    output = np.zeros((2, last + 1, num_microbatches, num_lanes), np.int64)
    free = np.zeros((pp_size, num_lanes), np.int64)
    keep = ends.shape[0] > 0
    groups, first_groups = _groups(sizes)
    start = np.zeros(num_lanes, np.int64)
    for index in range(operations.shape[0]):
        stage, row, chunk, kind = operations[index, 0], operations[index, 1], operations[index, 2], operations[index, 3]
        virtual = chunk * pp_size + stage
        source = virtual - 1 if kind == FORWARD else virtual + 1
        # Every lane for itself, then the lanes of a group wait for each other.
        for lane in range(num_lanes):
            start[lane] = free[stage, lane]
        if 0 <= source <= last:
            for lane in range(num_lanes):
                start[lane] = max(start[lane], output[kind, source, row, lane] + hop_ns[row, lane])
        for group in range(first_groups[row], first_groups[row + 1]):
            first, after = groups[group, 0], groups[group, 1]
            latest = start[first]
            for lane in range(first + 1, after):
                latest = max(latest, start[lane])
            for lane in range(first, after):
                start[lane] = latest
        for lane in range(num_lanes):
            start[lane] += chunk_ns[kind, row, lane]
        if virtual == 0:
            for lane in range(num_lanes):
                start[lane] += edge_ns[EMBEDDING, kind, row, lane]
        if virtual == last:
            for lane in range(num_lanes):
                start[lane] += edge_ns[HEAD, kind, row, lane]
        for lane in range(num_lanes):
            output[kind, virtual, row, lane] = start[lane]
            free[stage, lane] = start[lane]
        if keep:
            for lane in range(num_lanes):
                ends[index, lane] = start[lane]
    return int(free.max())


@compiled
def _groups(sizes: Ints) -> tuple[Ints, Ints]:
    """Return [group of several lanes] -> (first lane, lane after the last), and [micro-batch] -> its first group."""
    num_microbatches, num_lanes = sizes.shape
    groups = np.empty((num_microbatches * num_lanes // 2, 2), np.int64)
    first_groups = np.zeros(num_microbatches + 1, np.int64)
    count = 0
    for row in range(num_microbatches):
        lane = 0
        while lane < num_lanes:
            after = lane + sizes[row, lane]
            if after > lane + 1:
                groups[count, 0], groups[count, 1] = lane, after
                count += 1
            lane = after
        first_groups[row + 1] = count
    return groups, first_groups
