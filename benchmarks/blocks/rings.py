"""Rings, simulated step by step: plain, zigzag, double, with heads exchanged before; under any mask.

A ring of R lanes cuts every sample into 2R chunks. Keys and values of a lane reach the one that is s places further in
step s, so all keys go all the way round, whatever the mask. Kernels skip what is empty: a lane computes the sub-tiles
that the mask touches, at the rates at which placed attention computes them, and nothing where there are none.

A double ring (LoongTrain, arXiv 2406.18485) has windows of neighbours. Keys and values go round a window; those for the
next round come from the window before, and have all steps of a round to arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.blocks.setting import Setting
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.mechanisms.stage_attention import Side
from dynamic_cp.placement.runs import count_tiles, runs_of
from dynamic_cp.types import CAUSAL, IN_NODE, Sample


class Ring(NamedTuple):
    """How lanes pass on keys and values.

    Attributes:
        size: lanes that take turns; each stands for `inner` lanes that exchanged heads before.
        inner: lanes of an all-to-all, neighbours in a node.
        window: lanes of a window of a double ring; `size` for a single one.
        zigzag: whether lane i has chunks i and 2R - 1 - i, not 2i and 2i + 1.
    """

    size: int
    inner: int = 1
    window: int = 0
    zigzag: bool = True

    @property
    def steps(self) -> Ints:
        """[lane of the queries, lane of the keys] -> the step in which they meet."""
        window = self.window or self.size
        outer, inner = np.divmod(np.arange(self.size), window)
        rounds = (outer[:, None] - outer) % (self.size // window)
        return rounds * window + (inner[:, None] - inner) % window


class Chunked(NamedTuple):
    """Tiles between the chunks of samples on a ring.

    Attributes:
        queries, keys: [tile] -> the lane that holds them.
        squared_tokens: [tile] what kernels compute, as squared tokens of a causal sample.
        rows: [tile] queries.
        row: [tile] number of their chunk.
        is_causal: [tile] whether its sample is causal: one kernel computes all tiles of step 0 of such a sample.
        lane_tokens: tokens of each lane with padding: samples are padded to whole chunks.
    """

    queries: Ints
    keys: Ints
    squared_tokens: Floats
    rows: Ints
    row: Ints
    is_causal: Ints
    lane_tokens: int


def chunked(samples: Sequence[Sample], size: int, *, zigzag: bool) -> Chunked:
    """Return the tiles of samples on a ring of `size` lanes."""
    seqlens = [sample.seqlen for sample in samples]
    chunk_sizes = [-(-seqlen // (2 * size)) for seqlen in seqlens]
    cuts = [np.append(np.arange(0, seqlen, chunk), seqlen) for seqlen, chunk in zip(seqlens, chunk_sizes, strict=True)]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in cuts])])
    tiles = count_tiles(runs_of(samples), starts, np.concatenate(cuts))
    places = np.concatenate([np.arange(len(one) - 1) for one in cuts])
    sizes = np.concatenate([np.diff(one) for one in cuts])
    lanes = np.minimum(places, 2 * size - 1 - places) if zigzag else places // 2
    causal = np.repeat([(sample.mask or CAUSAL) == CAUSAL for sample in samples], [len(one) - 1 for one in cuts])
    is_causal = causal[tiles.rows]
    pairs = np.where((tiles.rows == tiles.columns) & is_causal, tiles.pairs, tiles.touched)
    return Chunked(
        queries=lanes[tiles.rows],
        keys=lanes[tiles.columns],
        squared_tokens=pairs / CAUSAL.pairs_per_token2,
        rows=sizes[tiles.rows],
        row=tiles.rows,
        is_causal=is_causal,
        lane_tokens=2 * sum(chunk_sizes),
    )


def ring_seconds(tiles: Chunked, ring: Ring, setting: Setting, first_lane: int = 0) -> tuple[float, float]:
    """Return (forward, backward) seconds until all lanes of a ring are done, all-to-alls included.

    Args:
        tiles: of its samples on that many lanes, cut as the ring does.
        ring: lanes `first_lane` and the following.
    """
    stage = setting.stage
    copies = setting.sharing.copies(ring.inner)
    num_lanes = ring.size * ring.inner
    exchanged_s = 0.0
    if ring.inner > 1:
        heads = stage.exchanged_heads(num_lanes, ring.inner, copies, IN_NODE)
        exchanged_s = heads.constant + heads.per_token * ring.size * tiles.lane_tokens
    shard_bytes = tiles.lane_tokens * copies * stage.kv_bytes / ring.inner
    nodes = (first_lane + ring.inner * np.arange(ring.size)) // setting.node_lanes
    overhead_s = stage.layers * stage.hardware.ring_step_overhead_s_per_layer
    forward_s, backward_s = (
        exchanged_s
        + _last_end_s(_step_seconds(tiles, ring, side, overhead_s), ring, side.transfers * shard_bytes, nodes, setting)
        for side in stage.sides
    )
    return forward_s, backward_s


def _step_seconds(tiles: Chunked, ring: Ring, side: Side, overhead_s: float) -> Floats:
    """Return [step, lane] seconds of kernels."""
    step = ring.steps[tiles.queries, tiles.keys]
    is_first = (step == 0) & tiles.is_causal
    # Queries pay once in a step for being few, in however many tiles their keys are.
    key = step * (int(tiles.row.max()) + 1) + tiles.row
    _, begins = np.unique(key, return_index=True)
    rows = np.zeros(len(key))
    rows[begins] = tiles.rows[begins]
    first = side.first.per_token2 * (tiles.squared_tokens + side.first.extra_tokens * rows)
    later = side.later.per_token2 * (tiles.squared_tokens + side.later.extra_tokens * rows)
    seconds = np.bincount(step * ring.size + tiles.queries, np.where(is_first, first, later), ring.size**2)
    seconds = seconds.reshape(ring.size, ring.size) / ring.inner
    seconds[1:] += np.where(seconds[1:] > 0, side.launches * overhead_s, 0.0)
    return seconds


def _last_end_s(attention_s: Floats, ring: Ring, shard_bytes: float, nodes: Ints, setting: Setting) -> float:
    """Return when the last lane is done; data for a step are sent once both its ends have begun the step before.

    Links inside a node and to other nodes work at the same time.
    """
    size, window = ring.size, ring.window or ring.size
    lanes = np.arange(size)
    outer, inner = np.divmod(lanes, window)
    neighbour = outer * window + (inner - 1) % window
    window_before = (lanes - window) % size
    latency_s, (inside, _) = setting.stage.latency_s, setting.stage.bandwidths

    def transfer_s(sender: Ints) -> Floats:
        crosses = nodes[sender] != nodes
        num_sending = ring.inner * int(np.bincount(nodes[sender], crosses).max())
        across = setting.across_bytes_per_s(max(1, num_sending))
        return latency_s + shard_bytes / np.where(crosses, across, inside)

    neighbour_s, window_s = transfer_s(neighbour), transfer_s(window_before)
    now, round_here = np.zeros(size), np.zeros(size)
    for first in range(0, size, window):
        here, next_round = round_here, round_here
        for step in range(first, first + window):
            begun = np.maximum(now, here)
            if step == first:
                next_round = np.maximum(begun, begun[window_before]) + window_s
            here = np.maximum(begun, begun[neighbour]) + neighbour_s
            now = begun + attention_s[step]
        round_here = next_round
    return float(now.max())
