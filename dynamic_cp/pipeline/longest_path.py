"""The makespan of a packing: the longest path through the schedules of all stages and lanes, in one compiled loop.

A bucket starts an operation on a stage when its input has arrived and the stage is free on ALL its lanes; each lane
ends it when its own work is done. A hop delays its receiver and occupies nobody. `schedule.py` says which input an
operation needs and which stage pays embedding and head.

Lanes that share experts wait for each other in every layer. An operation then has one barrier over the union of the CP
groups and the EP blocks that overlap. It takes as long as its slowest lane, each computing apart, plus the time of the
experts (`pricing/experts.py`), or as long as the host: the same on all of them. There is no other barrier.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pipeline.schedule import Graph
from dynamic_cp.pricing.table import CONSTANT, PER_MEAN, PER_ROUTED, PriceTable


class Grid(NamedTuple):
    """Durations of a packing, whole nanoseconds; lanes of one bucket may differ.

    Attributes:
        sizes: [micro-batch, lane] -> lanes that wait for each other: the bucket's, and those that share experts.
        chunk_ns: [FORWARD or BACKWARD, micro-batch, lane] -> one model chunk without embedding and head.
        edge_ns: [EMBEDDING or HEAD, FORWARD or BACKWARD, micro-batch, lane] -> what `Graph.pays` adds.
        hop_ns: [micro-batch, lane] -> delay to the next stage.
    """

    sizes: Ints
    chunk_ns: Ints
    edge_ns: Ints
    hop_ns: Ints


def longest_path_ns(graph: Graph, grid: Grid) -> int:
    """Return the end of the last operation in nanoseconds."""
    return int(end_times(graph, grid, np.empty((len(graph.kind), grid.sizes.shape[1]), np.int64)))


@compiled
def end_times(graph: Graph, grid: Grid, ends: Ints) -> int:
    """Return the end of the last operation in nanoseconds.

    Example:
        Two stages, one micro-batch, two lanes of one bucket; a forward takes 3 and 5 ns, a backward twice that, a hop
        1 ns. The second stage begins when both lanes and the hop are done, at 6, turns at 11, and ends at 21; the
        backward of the first stage begins at 22 and ends at 32.

        >>> chunk_ns, edge_ns = np.array([[[3, 5]], [[6, 10]]]), np.zeros((2, 2, 1, 2), np.int64)
        >>> grid = Grid(np.full((1, 2), 2), chunk_ns, edge_ns, np.ones((1, 2), np.int64))
        >>> end_times(pipeline_graph(2, 1, 1), grid, np.empty((4, 2), np.int64))
        32

    Args:
        graph: the operations and what each waits for.
        grid: how long they take.
        ends: [operation, lane], filled with the end of each operation.
    """
    # Arrays are taken out of their tuples once: compiled code counts references.
    kinds, rows, befores, senders, pays = graph.kind, graph.micro_batch, graph.before, graph.sender, graph.pays
    sizes, chunk_ns, edge_ns, hop_ns = grid.sizes, grid.chunk_ns, grid.edge_ns, grid.hop_ns
    num_lanes = sizes.shape[1]
    groups, first_groups = _groups(sizes)
    start = np.zeros(num_lanes, np.int64)
    for index in range(len(kinds)):
        kind, row, before, sender = kinds[index], rows[index], befores[index], senders[index]
        # Every lane for itself; then the lanes of a group wait for each other.
        for lane in range(num_lanes):
            start[lane] = ends[before, lane] if before >= 0 else 0
        if sender >= 0:
            for lane in range(num_lanes):
                start[lane] = max(start[lane], ends[sender, lane] + hop_ns[row, lane])
        for group in range(first_groups[row], first_groups[row + 1]):
            first, after = groups[group, 0], groups[group, 1]
            latest = start[first]
            for lane in range(first + 1, after):
                latest = max(latest, start[lane])
            for lane in range(first, after):
                start[lane] = latest
        for lane in range(num_lanes):
            start[lane] += chunk_ns[kind, row, lane]
        for edge in range(2):
            if pays[index, edge]:
                for lane in range(num_lanes):
                    start[lane] += edge_ns[edge, kind, row, lane]
        for lane in range(num_lanes):
            ends[index, lane] = start[lane]
    makespan = 0
    for index in graph.last:
        for lane in range(num_lanes):
            makespan = max(makespan, ends[index, lane])
    return makespan


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


@compiled
def couple_lanes(grid: Grid, tokens: Floats, table: PriceTable, vp_size: int) -> None:
    """Let lanes of a micro-batch that share experts wait for each other, in place: `sizes` and `chunk_ns` of `grid`.

    Args:
        grid: durations of every lane for itself.
        tokens: [micro-batch, lane] padded tokens of a rank.
        table: how many lanes share experts, and what these cost.
        vp_size: model chunks of a stage.
    """
    # Arrays are taken out of their tuples once: compiled code counts references.
    sizes, chunk_ns, block, terms = grid.sizes, grid.chunk_ns, table.expert_lanes, table.expert_terms
    hosts_s = table.expert_host_s
    num_rows, num_lanes = sizes.shape
    for row in range(num_rows):
        first = 0
        while first < num_lanes:
            end = _end_of_tied(sizes[row], first, block)
            for direction in range(2):
                longest_ns = chunk_ns[direction, row, first]
                for lane in range(first + 1, end):
                    longest_ns = max(longest_ns, chunk_ns[direction, row, lane])
                # Rounded up, so that bounds that ignore the rounding of lanes hold here, too.
                experts_s = _experts_s(tokens[row, first:end], block, terms[direction], table.imbalance)
                longest_ns += int(np.ceil(experts_s / vp_size * 1e9))
                longest_ns = max(longest_ns, int(np.rint(hosts_s[direction] / vp_size * 1e9)))
                for lane in range(first, end):
                    chunk_ns[direction, row, lane] = longest_ns
            for lane in range(first, end):
                sizes[row, lane] = end - first
            first = end


@inlined
def _end_of_tied(sizes: Ints, first: int, block: int) -> int:
    """Return the lane after the last one that waits for lane `first`, where a block of lanes that share experts and a
    CP group begin, through blocks tied together by CP groups; `sizes`: [lane] -> lanes of its CP group."""
    end, lane = first + block, first
    while lane < end:
        lane += sizes[lane]
        end = max(end, (lane + block - 1) // block * block)
    return end


@inlined
def _experts_s(tokens: Floats, block: int, terms: Floats, imbalance: float) -> float:
    """Return the seconds of the experts of the slowest block for these [lane] tokens, in whole blocks."""
    slowest_s = 0.0
    for start in range(0, len(tokens), block):
        total = most = 0.0
        for lane in range(start, start + block):
            total += tokens[lane]
            most = max(most, tokens[lane])
        mean = total / block
        routed = max(most, imbalance * mean)
        seconds = terms[CONSTANT] + terms[PER_MEAN] * mean
        slowest_s = max(slowest_s, seconds + terms[PER_ROUTED] * routed)
    return slowest_s
