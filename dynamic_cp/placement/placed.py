"""Makes a placement's arrays from the lanes of blocks and tiles, and evens out tokens.

Linear layers pay for every token that the fullest lane holds above the mean. So blocks are cut where a lane holds too
much, and a lane that holds less gets the piece. Short samples move first, with their tiles, which costs nothing. Of
longer ones a piece moves, and its tiles stay: its queries travel, within the node as long as there is room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending, first_not_below, sorted_by
from dynamic_cp.placement.runs import Tiles, count_tiles
from dynamic_cp.placement.token_graph import TokenBlocks
from dynamic_cp.types.placement import SAMPLE, PlacementProblem

_GRAIN = 16
"""Pieces are cut to multiples of this many tokens, if lanes have room for several."""


class Pieces(NamedTuple):
    """Parts of blocks, ascending by (block, start): [piece] its block, its tokens in that block, and its home."""

    blocks: Ints
    starts: Ints
    stops: Ints
    lanes: Ints


@compiled
def even_out(
    sizes: Ints, lanes: Ints, short_work: Floats, lane_work: Floats, node_lanes: int, most_tokens: int, most_work: float
) -> Pieces:
    """Return homes of which no lane has more than `most_tokens`; changes `lanes` and `lane_work`.

    Example:
        Two lanes, at most 5 tokens; lane 0 holds a block of 6 tokens and a short sample of 2, lane 1 a block of 2. The
        short sample moves. Then lane 0 still has one too many: the last token of its block moves.

        >>> lanes, lane_work = np.array([0, 0, 1]), np.array([9.0, 1.0])
        >>> pieces = even_out(np.array([6, 2, 2]), lanes, np.array([-1.0, 3.0, -1.0]), lane_work, 2, 5, 10.0)
        >>> list(zip(pieces.blocks.tolist(), pieces.starts.tolist(), pieces.stops.tolist(), pieces.lanes.tolist()))
        [(0, 0, 5, 0), (0, 5, 6, 1), (1, 0, 2, 1), (2, 0, 2, 1)]

    Args:
        sizes, lanes: [block] tokens and home.
        short_work: [block] touched pairs of a short sample, which is one block with one tile; -1: the block is not one.
        lane_work, most_work: [lane] touched pairs, and the most with which a lane takes short samples.
    """
    num_blocks, num_lanes = len(sizes), len(lane_work)
    held = np.zeros(num_lanes, np.int64)
    for block in range(num_blocks):
        held[lanes[block]] += sizes[block]
    left = sizes.copy()
    cut = np.empty((4 * num_lanes + num_blocks, 4), np.int64)  # a cut ends a block, an excess or a room
    count = 0
    by_lane, first = sorted_by(lanes, num_lanes)
    for step in range(4):
        is_cutting, width = step >= 2, num_lanes if step % 2 else node_lanes
        for lane in ascending(-held.astype(np.float64)):
            low = lane // width * width
            high = min(low + width, num_lanes)
            own = by_lane[first[lane] : first[lane + 1]]
            while held[lane] > most_tokens:
                there = low + np.argmin(held[low:high])
                excess, room = held[lane] - most_tokens, most_tokens - held[there]
                if room <= 0:
                    break
                limits = excess, room, most_work - lane_work[there]
                block = _short_to_move(own, lane, lanes, left, sizes, short_work, limits)
                if block >= 0:
                    size = sizes[block]
                    lanes[block] = there
                    lane_work[lane] -= short_work[block]
                    lane_work[there] += short_work[block]
                elif not is_cutting:
                    break
                else:
                    block = _largest(own, lane, lanes, left)
                    size = _size_of_cut(excess, room, left[block])
                    left[block] -= size
                    cut[count] = (block, left[block], left[block] + size, there)
                    count += 1
                held[lane] -= size
                held[there] += size
    return _pieces(lanes, left, cut[:count])


@compiled
def _short_to_move(
    own: Ints, lane: int, lanes: Ints, left: Ints, sizes: Ints, short_work: Floats, limits: tuple[int, int, float]
) -> int:
    """Return the short sample of a lane whose size is nearest to the lane's excess, among those that fit; -1: none.
    `limits`: (excess tokens of the lane, tokens and touched pairs for which there is room elsewhere)."""
    excess, room, free_work = limits
    best, least = -1, 0
    for block in own:
        is_whole = lanes[block] == lane and left[block] == sizes[block]
        if is_whole and 0 <= short_work[block] <= free_work and sizes[block] <= room:
            away = abs(sizes[block] - excess)
            if best < 0 or away < least:
                best, least = block, away
    return best


@compiled
def _size_of_cut(excess: int, room: int, left: int) -> int:
    """Return the tokens to cut off what is left of a block, for a lane with this excess and another with this room."""
    grain = _GRAIN if room >= 2 * _GRAIN else 1
    return min(-(-excess // grain) * grain, room // grain * grain, left)


@compiled
def _largest(own: Ints, lane: int, lanes: Ints, left: Ints) -> int:
    """Return the block on a lane of which most is left."""
    best = -1
    for block in own:
        if lanes[block] == lane and (best < 0 or left[block] > left[best]):
            best = block
    return best


@compiled
def _pieces(lanes: Ints, left: Ints, cut: Ints) -> Pieces:
    """Return what is left of blocks, and what was cut off, in order; `cut`: [piece, (block, start, stop, lane)]."""
    num_blocks = len(lanes)
    pieces = np.empty((num_blocks + len(cut), 4), np.int64)
    num_pieces = 0
    by_block, first = sorted_by(cut[:, 0], num_blocks)
    for block in range(num_blocks):
        if left[block]:
            pieces[num_pieces] = (block, 0, left[block], lanes[block])
            num_pieces += 1
        for place in range(first[block + 1] - 1, first[block] - 1, -1):  # the last one cut lies first
            pieces[num_pieces] = cut[by_block[place]]
            num_pieces += 1
    blocks, starts = pieces[:num_pieces, 0].copy(), pieces[:num_pieces, 1].copy()
    return Pieces(blocks, starts, pieces[:num_pieces, 2].copy(), pieces[:num_pieces, 3].copy())


Int32s = NDArray[np.int32]


class Placed(NamedTuple):
    """Which lane holds which tokens of a micro-batch, and which lane computes which tile.

    Attributes:
        homes: int32 [home, 4]: index of the sample in the micro-batch, first token, token behind the last, lane;
            ascending by (sample, first token). The homes of a sample tile it.
        tiles: int32 [tile, 3]: home of the queries, home of the keys, lane; ascending by (queries, keys). Each pair of
            homes between which the mask allows a pair of tokens is there once, and no others.
        pairs, touched: int64 [tile]: pairs that the mask allows, and those that a kernel computes (`runs.SUB_TILE`).
    """

    homes: Int32s
    tiles: Int32s
    pairs: Ints
    touched: Ints


def placed_of(
    blocks: TokenBlocks, homes: Ints, lanes: Ints, problem: PlacementProblem, *, is_even: bool = True
) -> Placed:
    """Return the placement with the vertices of `blocks` at `homes` [vertex] and its graph's tiles at `lanes` [tile];
    `is_even`: blocks are cut until no lane holds too much for `problem`."""
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


def _in_order_of_samples(blocks: TokenBlocks, tile_lanes: Ints, pieces: Pieces) -> Placed:
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
    """Return [tile between pieces] -> the lane of the tile in `old` that it was cut from; `blocks`: [piece] ->
    block."""
    lanes = np.empty(len(tiles.rows), np.int64)
    num_blocks = blocks[-1] + 1
    firsts = np.zeros(num_blocks + 1, np.int64)
    for tile in range(len(old.rows)):
        firsts[old.rows[tile] + 1] = tile + 1
    for tile in range(len(lanes)):
        row, column = blocks[tiles.rows[tile]], blocks[tiles.columns[tile]]
        lanes[tile] = old_lanes[first_not_below(old.columns, firsts[row], firsts[row + 1], column)]
    return lanes
