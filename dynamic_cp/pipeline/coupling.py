"""Lanes that share experts wait for each other in every layer: the barriers and durations of their blocks.

An operation has one barrier over the union of the CP groups and the EP blocks that overlap. What it takes is the
longest of its lanes, which compute apart, and then the experts (`pricing/experts.py`): the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.pricing.table import PER_MEAN, PER_ROUTED, PriceTable
from dynamic_cp.pricing.terms import CONSTANT


@compiled
def couple_lanes(grid: Grid, tokens: Floats, table: PriceTable, vp_size: int) -> None:
    """Let lanes of a micro-batch that share experts wait for each other, in place: `sizes` and `chunk_ns` of `grid`.

    Args:
        grid: durations of every lane for itself.
        tokens: [micro-batch, lane] padded tokens of a rank.
        table: how many lanes share experts, and what these cost.
        vp_size: model chunks of a stage.
    """
    # An array is taken out of its tuple once: compiled code counts references.
    sizes, chunk_ns, block, terms = grid.sizes, grid.chunk_ns, table.expert_lanes, table.expert_terms
    num_rows, num_lanes = sizes.shape
    for row in range(num_rows):
        first = 0
        while first < num_lanes:
            end = _end_of_tied(sizes[row], first, block)
            for direction in range(2):
                longest_ns = chunk_ns[direction, row, first]
                for lane in range(first + 1, end):
                    longest_ns = max(longest_ns, chunk_ns[direction, row, lane])
                # Rounded up: no bound that leaves the rounding of lanes out has to know of this one.
                experts_s = _experts_s(tokens[row, first:end], block, terms[direction], table.imbalance)
                longest_ns += int(np.ceil(experts_s / vp_size * 1e9))
                for lane in range(first, end):
                    chunk_ns[direction, row, lane] = longest_ns
            for lane in range(first, end):
                sizes[row, lane] = end - first
            first = end


@inlined
def _end_of_tied(sizes: Ints, first: int, block: int) -> int:
    """Return the lane after the last that waits for lane `first`: behind all blocks that groups of CP tie to its own.

    Args:
        sizes: [lane] -> lanes of its CP group.
        first: where a block and a group begin.
        block: lanes that share experts.
    """
    end, lane = first + block, first
    while lane < end:
        lane += sizes[lane]
        end = max(end, (lane + block - 1) // block * block)
    return end


@inlined
def _experts_s(tokens: Floats, block: int, terms: Floats, imbalance: float) -> float:
    """Return what the experts of the slowest block take for these [lane] tokens, in whole blocks."""
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
