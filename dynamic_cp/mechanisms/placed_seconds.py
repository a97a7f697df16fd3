"""What placed attention takes, lane by lane: kernels of its tiles, and what of its transfers they do not hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.mechanisms.stage_attention import Side, StageAttention
from dynamic_cp.placement.legal import tiles_between
from dynamic_cp.placement.narrow import placement_under
from dynamic_cp.placement.sent import TokenBytes
from dynamic_cp.placement.times import lane_ends_s
from dynamic_cp.placement.transport import fetches_of
from dynamic_cp.types import CAUSAL, Causal, Full, Lambda, Placement, Sample


def placed_seconds(
    stage: StageAttention, placement: Placement, samples: Sequence[Sample], num_lanes: int, first_lane: int
) -> Floats:
    """Return [forward or backward, lane] seconds of attention, transfers that nothing hides among them.

    Layers with and without a window run different programmes, whose times add up lane by lane.
    """
    total = np.zeros((2, num_lanes))
    for kind in stage.kinds:
        own = placement_under(placement, kind.mask, num_lanes, kind.node_lanes)
        total += _placed_seconds(kind, own, samples, num_lanes, first_lane)
    return total


def _placed_seconds(
    stage: StageAttention, placement: Placement, samples: Sequence[Sample], num_lanes: int, first_lane: int
) -> Floats:
    tokens = (placement.homes[:, 2] - placement.homes[:, 1]).astype(np.int64)
    fetches = fetches_of(placement, first_lane, stage.node_lanes)
    attention_s, of_token = _kernel_seconds(stage, placement, samples, num_lanes), token_bytes(stage)
    ends_s = [
        lane_ends_s(
            of_token.messages(fetches, tokens, backward=bool(direction)), attention_s[direction], stage.latency_s,
            *stage.bandwidths,
        )
        for direction in range(2)
    ]  # fmt: skip
    return np.array(ends_s)


def kernel_seconds(stage: StageAttention, placement: Placement, samples: Sequence[Sample], num_lanes: int) -> Floats:
    """Return [forward or backward, lane] seconds of kernels."""
    total = np.zeros((2, num_lanes))
    for kind in stage.kinds:
        own = placement_under(placement, kind.mask, num_lanes, kind.node_lanes)
        total += _kernel_seconds(kind, own, samples, num_lanes).sum(axis=1)
    return total


def _kernel_seconds(stage: StageAttention, placement: Placement, samples: Sequence[Sample], num_lanes: int) -> Floats:
    """Return [forward or backward, division, lane] seconds of kernels."""
    homes, tiles = placement.homes.astype(np.int64), placement.tiles.astype(np.int64)
    tokens = homes[:, 2] - homes[:, 1]
    work = work_of_tiles(placement, samples, stage.mask)
    sides = [_attention_s(side, work, tiles, tokens, placement.num_divisions, num_lanes, stage) for side in stage.sides]
    return np.array(sides)


def token_bytes(stage: StageAttention) -> TokenBytes:
    """Return what a token of a rank takes on its way, all layers of a stage."""
    return TokenBytes(
        query=stage.query_bytes / 2,
        kv=stage.kv_bytes,
        lse=stage.lse_bytes,
        latent=stage.latent_bytes,
        narrow_kv=stage.narrow_kv_bytes,
    )


class TileWork(NamedTuple):
    """What kernels compute for each tile.

    Attributes:
        squared_tokens: as squared tokens of a sample with the mask of the layers.
        is_square: 1 where queries and keys are the same tokens, under a causal mask: another kernel does it. A window
            that is no shorter than the sample is one.
    """

    squared_tokens: Floats
    is_square: Ints


def work_of_tiles(placement: Placement, samples: Sequence[Sample], mask: Causal | Full | Lambda) -> TileWork:
    """Return the work of all tiles of a placement; `mask` is that of samples that bring none."""
    tiles = placement.tiles.astype(np.int64)
    wanted = tiles_between(placement, samples, mask)
    keys = wanted.rows * len(placement.homes) + wanted.columns
    place = np.searchsorted(keys, tiles[:, 0] * len(placement.homes) + tiles[:, 1])
    is_causal = np.array([(sample.mask or mask.within(sample.seqlen)) == CAUSAL for sample in samples])
    squares = (tiles[:, 0] == tiles[:, 1]) & is_causal[placement.homes[tiles[:, 0], 0]]
    # The rates of kernels on causal squares count what is allowed, all else is computed in whole kernel tiles.
    pairs = np.where(squares, wanted.pairs[place], wanted.touched[place])
    return TileWork(pairs / mask.pairs_per_token2, squares.astype(np.int64))


def _attention_s(
    side: Side, work: TileWork, tiles: Ints, tokens: Ints, num_divisions: int, num_lanes: int, stage: StageAttention
) -> Floats:
    """Return [division, lane] seconds of kernels: those of the squares, and one for all other tiles of each row."""
    first, later = side.first, side.later
    place = tiles[:, 3] * num_lanes + tiles[:, 2]
    squared = work.squared_tokens
    rows = tokens[tiles[:, 0]]
    square = first.per_token2 * (squared + first.extra_tokens * rows)
    # A row pays once for being short, in however many tiles its keys are.
    row_place = place * len(tokens) + tiles[:, 0]
    _, begins = np.unique(np.where(work.is_square, -1 - np.arange(len(tiles)), row_place), return_index=True)
    is_first = np.zeros(len(tiles), bool)
    is_first[begins] = True
    other = later.per_token2 * (squared + later.extra_tokens * rows * is_first)
    seconds = np.bincount(place, np.where(work.is_square, square, other), num_divisions * num_lanes)
    launched = np.bincount(place, minlength=num_divisions * num_lanes) > 0
    seconds = seconds.reshape(num_divisions, num_lanes)
    launches = np.cumsum(launched.reshape(num_divisions, num_lanes), axis=0) > 1
    overhead_s = side.launches * stage.layers * stage.hardware.ring_step_overhead_s_per_layer
    return seconds + overhead_s * (launches & launched.reshape(num_divisions, num_lanes))
