"""Seconds of placed attention, lane by lane: kernels of its tiles, and transfers that they do not hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Bools, Floats, Ints
from dynamic_cp.loops import first_not_below, sorted_by
from dynamic_cp.mechanisms.mechanism import LaneSeconds
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.placement.cuts import placement_under
from dynamic_cp.placement.divisions import LinkRates
from dynamic_cp.placement.legal import tiles_between
from dynamic_cp.placement.runs import Tiles
from dynamic_cp.placement.sent import TokenBytes, lane_ends_s
from dynamic_cp.placement.transport import fetches_of
from dynamic_cp.types import CAUSAL, Causal, Full, Lambda, Placement, Sample
from dynamic_cp.types.placement import COLUMN, DIVISION, LANE, ROW, SAMPLE, Lanes


def placed_seconds(stage: StageAttention, placement: Placement, samples: Sequence[Sample], lanes: Lanes) -> LaneSeconds:
    """Return the seconds of attention on every lane, exposed transfers included. Layers with and without a window run
    different programmes, whose times add up lane by lane."""
    total = np.zeros((2, 2, lanes.number))
    for kind in stage.kinds:
        total += _placed_seconds(kind, placement_under(placement, samples, kind.mask, lanes), samples, lanes)
    return LaneSeconds(*total)


def _placed_seconds(
    stage: StageAttention, placement: Placement, samples: Sequence[Sample], lanes: Lanes
) -> LaneSeconds:
    tokens = placement.tokens_of_homes
    fetches = fetches_of(placement, lanes)
    attention_s, of_token = _kernel_seconds(stage, placement, samples, lanes.number), token_bytes(stage)
    messages = [of_token.messages(fetches, tokens, backward=bool(direction)) for direction in range(2)]
    ends_s = [
        lane_ends_s(sent, kernels_s, stage.latency_s, *stage.bandwidths)
        for sent, kernels_s in zip(messages, attention_s, strict=True)
    ]
    received = [np.bincount(sent.receiver, minlength=lanes.number) for sent in messages]
    return LaneSeconds(np.array(ends_s), stage.host_s(0, np.array(received, np.float64)))


def kernel_seconds(stage: StageAttention, placement: Placement, samples: Sequence[Sample], lanes: Lanes) -> Floats:
    """Return [forward or backward, lane] seconds of kernels."""
    total = np.zeros((2, lanes.number))
    for kind in stage.kinds:
        own = placement_under(placement, samples, kind.mask, lanes)
        total += _kernel_seconds(kind, own, samples, lanes.number).sum(axis=1)
    return total


def _kernel_seconds(stage: StageAttention, placement: Placement, samples: Sequence[Sample], num_lanes: int) -> Floats:
    """Return [forward or backward, division, lane] seconds of kernels."""
    tiles = np.ascontiguousarray(placement.tiles, np.int64)
    tokens = placement.tokens_of_homes
    work = work_of_tiles(placement, samples, stage.mask)
    return _attention_s(*work, tiles, tokens, *kernel_rates(stage), placement.num_divisions, num_lanes)


def kernel_rates(stage: StageAttention) -> tuple[Floats, Floats]:
    """Return `rates` and `overheads_s`, the last two arrays of `_attention_s`."""
    launch_s = stage.hardware.ring_step_overhead_s_per_layer
    return (
        np.array([(*side.first, *side.later) for side in stage.sides]),
        np.array([side.launches * stage.layers * launch_s for side in stage.sides]),
    )


def token_bytes(stage: StageAttention) -> TokenBytes:
    """Return the bytes that a token of a rank takes in transfers, over all layers of a stage."""
    return TokenBytes(
        query=stage.query_bytes / 2,
        kv=stage.kv_bytes,
        lse=stage.lse_bytes,
        latent=stage.latent_bytes,
        narrow_kv=stage.narrow_kv_bytes,
    )


def link_rates(stage: StageAttention) -> LinkRates:
    """Return the rates of fetching over all layers of a stage, by which tiles get their divisions."""
    return LinkRates(stage.query_bytes, stage.kv_bytes, *stage.bandwidths, stage.latency_s)


class TileWork(NamedTuple):
    """What kernels compute for each tile: work, as squared tokens of a sample with the mask of the layers, and 1 if
    queries and keys are the same tokens under a causal mask (or a window no shorter than the sample), which have
    another kernel."""

    squared_tokens: Floats
    is_square: Ints


def work_of_tiles(placement: Placement, samples: Sequence[Sample], mask: Causal | Full | Lambda) -> TileWork:
    """Return the work of all tiles of a placement; `mask` is that of samples that bring none."""
    tiles = np.ascontiguousarray(placement.tiles, np.int64)
    wanted = tiles_between(placement, samples, mask)
    is_causal = np.array([sample.mask_in(mask) == CAUSAL for sample in samples])
    homes_causal = is_causal[placement.homes[:, SAMPLE]]
    work, is_square = _work(tiles, wanted, homes_causal)
    return TileWork(work / mask.pairs_per_token2, is_square)


@compiled
def _work(tiles: Ints, wanted: Tiles, is_causal: Bools) -> tuple[Ints, Ints]:
    """Return ([tile] pairs that its kernel computes, [tile] 1 if that is the kernel of causal squares); `wanted` has
    the same tiles in their order, with their pairs; `is_causal`: [home] whether its sample is."""
    work, is_square = np.empty(len(tiles), np.int64), np.empty(len(tiles), np.int64)
    place = 0
    for tile in range(len(tiles)):
        row, column = tiles[tile, ROW], tiles[tile, COLUMN]
        if place == len(tiles) or wanted.rows[place] != row or wanted.columns[place] != column:
            first = first_not_below(wanted.rows, 0, len(tiles), row)
            place = first_not_below(
                wanted.columns, first, first_not_below(wanted.rows, first, len(tiles), row + 1), column
            )
        # Kernels on causal squares are rated by allowed pairs; all others compute whole kernel tiles.
        is_square[tile] = row == column and is_causal[row]
        work[tile] = wanted.pairs[place] if is_square[tile] else wanted.touched[place]
        place += 1
    return work, is_square


@compiled
def _attention_s(
    squared_tokens: Floats, is_square: Ints, tiles: Ints, tokens: Ints, rates: Floats, overheads_s: Floats,
    num_divisions: int, num_lanes: int,
) -> Floats:  # fmt: skip
    """Return [direction, division, lane] seconds: kernels of the squares, and one for all other tiles of each row.

    Args:
        tiles: [tile, (home of the queries, home of the keys, lane, division)]; `TileWork` has their work.
        rates: [direction, (seconds per squared token, extra tokens) of kernels of squares, and of the others].
        overheads_s: [direction] of each division with kernels, but the first.
    """
    seconds = np.zeros((2, num_divisions, num_lanes))
    is_launched = np.zeros((num_divisions, num_lanes), np.bool_)
    # A row pays once for being short, in however many tiles its keys are.
    row_before = np.full((num_divisions, num_lanes), -1)
    is_first = np.zeros(len(tiles), np.bool_)
    by_row, _ = sorted_by(tiles[:, ROW], len(tokens))
    for tile in by_row:
        row, lane, division = tiles[tile, ROW], tiles[tile, LANE], tiles[tile, DIVISION]
        is_launched[division, lane] = True
        if not is_square[tile] and row_before[division, lane] != row:
            is_first[tile] = True
            row_before[division, lane] = row
    for tile in range(len(tiles)):
        row, lane, division = tiles[tile, ROW], tiles[tile, LANE], tiles[tile, DIVISION]
        short = float(tokens[row]) if is_square[tile] or is_first[tile] else 0.0
        for direction in range(2):
            kernel = 0 if is_square[tile] else 2
            seconds[direction, division, lane] += tile_s(rates[direction], kernel, squared_tokens[tile], short)
    add_launches(seconds, is_launched, overheads_s)
    return seconds


@compiled
def tile_s(rates: Floats, kernel: int, squared_tokens: float, short_tokens: float) -> float:
    """Return the seconds of a tile; `rates` are of one direction, `kernel` is 0 for squares and 2 for others,
    `short_tokens` are of its row if this tile pays for the row's shortness, else 0."""
    return float(rates[kernel] * (squared_tokens + rates[kernel + 1] * short_tokens))


@compiled
def add_launches(seconds: Floats, is_launched: Bools, overheads_s: Floats) -> None:
    """Add the overhead of each division with kernels; a lane's first is free, as the layer pays its launches."""
    num_divisions, num_lanes = is_launched.shape
    for lane in range(num_lanes):
        num_before = 0
        for division in range(num_divisions):
            if is_launched[division, lane]:
                if num_before:
                    for direction in range(2):
                        seconds[direction, division, lane] += overheads_s[direction]
                num_before += 1
