"""A placement as the arrays that the rest of the planner reads, made from the lanes of blocks and tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.placement.evening import Pieces, even_out
from dynamic_cp.placement.order import first_not_below
from dynamic_cp.placement.problem import PlacementProblem
from dynamic_cp.placement.runs import Tiles, count_tiles
from dynamic_cp.placement.token_graph import Blocks
from dynamic_cp.types.placement import SAMPLE

Int32s = NDArray[np.int32]


class Placed(NamedTuple):
    """Which lane holds which tokens of a micro-batch, and which lane computes which tile.

    Attributes:
        homes: int32 [home, 4]: index of the sample in the micro-batch, first token, token behind the last, lane;
            ascending by (sample, first token). The homes of a sample tile it.
        tiles: int32 [tile, 3]: home of the queries, home of the keys, lane; ascending by (queries, keys). All pairs of
            homes are there between which the mask allows any pair, each once, and no others.
        pairs, touched: int64 [tile]: pairs that the mask allows, and those that a kernel computes (`runs.SUB_TILE`).
    """

    homes: Int32s
    tiles: Int32s
    pairs: Ints
    touched: Ints


def placed_of(blocks: Blocks, homes: Ints, lanes: Ints, problem: PlacementProblem, *, is_even: bool = True) -> Placed:
    """Return the placement in which the vertices of `blocks` are at `homes`, and its graph's tiles at `lanes`.

    Args:
        blocks: of the micro-batch.
        homes, lanes: [vertex] -> lane, [tile of the graph] -> lane.
        problem: says how even tokens have to be.
        is_even: leave it at that where lanes hold too much: blocks are cut until none does.
    """
    graph, num_own_tiles = blocks.graph, blocks.num_own_tiles
    block_lanes = np.concatenate([homes[: blocks.num_own], homes[blocks.bins]])
    block_sizes = np.diff(blocks.cuts)
    block_sizes = np.delete(block_sizes, blocks.starts[1:-1] - 1)
    bin_tiles = num_own_tiles + blocks.bins - blocks.num_own
    tile_lanes = np.concatenate([lanes[:num_own_tiles], lanes[bin_tiles]])
    short_work = np.full(len(block_lanes), -1.0)
    # A short sample moves with its tile only if both are on one lane.
    is_with_tile = homes[blocks.bins] == lanes[bin_tiles]
    short_work[blocks.num_own :] = np.where(is_with_tile, blocks.tiles.touched[num_own_tiles:], -1.0)
    lane_work = np.bincount(lanes, graph.work, problem.num_lanes).astype(np.float64)
    most_tokens = problem.most_tokens(int(block_sizes.sum())) if is_even else int(block_sizes.sum())
    most_work = (1.0 + problem.work_tolerance) * float(lane_work.mean())
    before = block_lanes.copy()
    pieces = even_out(block_sizes, block_lanes, short_work, lane_work, problem.node_lanes, most_tokens, most_work)
    moved = np.flatnonzero(before != block_lanes)
    tile_lanes[num_own_tiles + moved - blocks.num_own] = block_lanes[moved]
    return _in_order_of_samples(blocks, tile_lanes, pieces)


def _in_order_of_samples(blocks: Blocks, tile_lanes: Ints, pieces: Pieces) -> Placed:
    """Return homes and tiles, with samples counted as in the micro-batch."""
    starts, cuts, samples = _cut_again(blocks.starts, blocks.cuts, pieces)
    tiles = blocks.tiles
    if len(pieces.blocks) != len(blocks.cuts) - len(blocks.order):
        tiles = count_tiles(blocks.runs, starts, cuts)
        tile_lanes = _inherited(blocks.tiles, tile_lanes, pieces.blocks, tiles)
    first_tokens = cuts[np.arange(len(samples)) + samples]
    stops = cuts[np.arange(len(samples)) + samples + 1]
    homes = np.stack([blocks.order[samples], first_tokens, stops, pieces.lanes], axis=1).astype(np.int32)
    by_sample = np.argsort(homes[:, SAMPLE], kind="stable")
    number = np.empty(len(homes), np.int64)
    number[by_sample] = np.arange(len(homes))
    found = np.stack([number[tiles.rows], number[tiles.columns], tile_lanes], axis=1)
    by_row = np.argsort(found[:, 0], kind="stable")
    return Placed(homes[by_sample], found[by_row].astype(np.int32), tiles.pairs[by_row], tiles.touched[by_row])


@compiled
def _cut_again(starts: Ints, cuts: Ints, pieces: Pieces) -> tuple[Ints, Ints, Ints]:
    """Return (starts and cuts as `cut_samples` does, but where pieces begin, and [piece] -> sample)."""
    num_pieces, num_samples = len(pieces.blocks), len(starts) - 1
    new_starts = np.zeros(num_samples + 1, np.int64)
    new_cuts = np.empty(num_pieces + num_samples, np.int64)
    samples = np.empty(num_pieces, np.int64)
    piece = 0
    for sample in range(num_samples):
        while piece < num_pieces and pieces.blocks[piece] + sample < starts[sample + 1] - 1:
            new_cuts[piece + sample] = cuts[pieces.blocks[piece] + sample] + pieces.starts[piece]
            samples[piece] = sample
            piece += 1
        new_cuts[piece + sample] = cuts[starts[sample + 1] - 1]
        new_starts[sample + 1] = piece + sample + 1
    return new_starts, new_cuts, samples


@compiled
def _inherited(old: Tiles, old_lanes: Ints, blocks: Ints, tiles: Tiles) -> Ints:
    """Return [tile] -> the lane of the tile that it was cut from.

    Args:
        old, old_lanes: tiles between blocks, and their lanes.
        blocks: [piece] -> block.
        tiles: between pieces.
    """
    lanes = np.empty(len(tiles.rows), np.int64)
    num_blocks = blocks[-1] + 1
    firsts = np.zeros(num_blocks + 1, np.int64)
    for tile in range(len(old.rows)):
        firsts[old.rows[tile] + 1] = tile + 1
    for tile in range(len(lanes)):
        row, column = blocks[tiles.rows[tile]], blocks[tiles.columns[tile]]
        lanes[tile] = old_lanes[first_not_below(old.columns, firsts[row], firsts[row + 1], column)]
    return lanes
