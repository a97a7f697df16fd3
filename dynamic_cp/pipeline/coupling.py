"""Lanes that share experts wait for each other in every layer: the barriers and durations of their blocks.

An operation has one barrier over the union of the CP groups and the EP blocks that overlap. What it takes is the
longest of its lanes, which compute apart, and then the experts (`pricing/experts.py`): the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.pricing.table import PriceTable


@compiled
def couple_lanes(grid: Grid, tokens: Floats, table: PriceTable, vp_size: int) -> None:
    """Let lanes of a micro-batch that share experts wait for each other, in place: `sizes` and `chunk_ns` of `grid`.

    Args:
        grid: durations of every lane for itself.
        tokens: [micro-batch, lane] padded tokens of a rank.
        table: how many lanes share experts, and what these cost.
        vp_size: model chunks of a stage.
    """
    block = table.expert_lanes
    sizes, chunk_ns, terms = grid.sizes, grid.chunk_ns, table.expert_terms
    num_rows, num_lanes = sizes.shape
    for row in range(num_rows):
        first = 0
        while first < num_lanes:
            # All blocks that groups of CP tie to this one.
            end, lane = first + block, first
            while lane < end:
                lane += sizes[row, lane]
                end = max(end, (lane + block - 1) // block * block)
            for direction in range(2):
                experts_s = 0.0
                for start in range(first, end, block):
                    total = most = 0.0
                    for lane in range(start, start + block):
                        total += tokens[row, lane]
                        most = max(most, tokens[row, lane])
                    mean = total / block
                    routed = max(most, table.imbalance * mean)
                    experts_s = max(
                        experts_s, terms[direction, 0] + terms[direction, 1] * mean + terms[direction, 2] * routed
                    )
                longest_ns = chunk_ns[direction, row, first]
                for lane in range(first + 1, end):
                    longest_ns = max(longest_ns, chunk_ns[direction, row, lane])
                # Rounded up: no bound that leaves the rounding of lanes out has to know of this one.
                longest_ns += int(np.ceil(experts_s / vp_size * 1e9))
                for lane in range(first, end):
                    chunk_ns[direction, row, lane] = longest_ns
            for lane in range(first, end):
                sizes[row, lane] = end - first
            first = end


def waiting_groups(groups: Sequence[range], block: int) -> list[range]:
    """Return the lanes that wait for each other, block by block of `block` lanes that share experts.

    Args:
        groups: lanes of the buckets of a micro-batch, in order; they tile the lanes.
    """
    found: list[range] = []
    first = end = 0
    for group in groups:
        end = max(end, -(-group.stop // block) * block)
        if group.stop == end:
            found.append(range(first, end))
            first = end
    return found
