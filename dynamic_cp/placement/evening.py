"""Makes tokens come out even: cuts blocks where a lane holds too much, and gives the piece to a lane that holds less.

Linear layers pay for every token that the fullest lane holds above the mean, so this is done to the end, while the
search only tries. First short samples move with their tiles, which costs nothing. Of the others a piece moves, and what
is computed stays where it is: the piece's queries travel, within the node as long as there is room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.order import ascending, sorted_by

_GRAIN = 16
"""Pieces are cut to multiples of so many tokens where that is little against what a lane may hold."""


class Pieces(NamedTuple):
    """Parts of blocks, ascending by (block, start).

    Attributes:
        blocks, starts, stops: [piece] of which block, and from which to before which of its tokens.
        lanes: [piece] its home.
    """

    blocks: Ints
    starts: Ints
    stops: Ints
    lanes: Ints


@compiled
def even_out(
    sizes: Ints, lanes: Ints, short_work: Floats, lane_work: Floats, node_lanes: int, most_tokens: int, most_work: float
) -> Pieces:
    """Return homes of which no lane has more than `most_tokens`.

    Example:
        Two lanes, at most 5 tokens; lane 0 holds a block of 6 tokens and a short sample of 2, lane 1 a block of 2. The
        short sample moves. Then lane 0 still has one too many: the last token of its block moves.

        >>> lanes, lane_work = np.array([0, 0, 1]), np.array([9.0, 1.0])
        >>> pieces = even_out(np.array([6, 2, 2]), lanes, np.array([-1.0, 3.0, -1.0]), lane_work, 2, 5, 10.0)
        >>> list(zip(pieces.blocks.tolist(), pieces.starts.tolist(), pieces.stops.tolist(), pieces.lanes.tolist()))
        [(0, 0, 5, 0), (0, 5, 6, 1), (1, 0, 2, 1), (2, 0, 2, 1)]

    Args:
        sizes: [block] tokens.
        lanes: [block] home; changed where a short sample moves.
        short_work: [block] touched pairs of a short sample, which is one block with one tile; -1: it is another.
        lane_work: [lane] touched pairs; changed where a short sample moves.
        node_lanes: lanes of a node.
        most_tokens: of a lane; at least the mean.
        most_work: of a lane that short samples move to, in touched pairs.
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
    """Return the short sample on a lane that is nearest to what it has too much, among those that fit; -1: none.

    Args:
        limits: (tokens that the lane has too much, tokens and touched pairs for which there is room elsewhere).
    """
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
    """Return tokens to cut off what is left of a block, for a lane with this excess and another with this room."""
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
