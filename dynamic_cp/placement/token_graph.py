"""A micro-batch as a graph: vertices are blocks of tokens, a tile joins the block of its queries to that of its keys.

Long samples are cut into blocks; short ones share a vertex (a *bin*), so that the search has few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.placement.order import sorted_by
from dynamic_cp.placement.runs import Runs, Tiles, count_tiles, cut_samples, runs_of
from dynamic_cp.types.masks import Mask
from dynamic_cp.types.plan import Sample


class Graph(NamedTuple):
    """Vertices and tiles, for compiled loops. All numbers are whole.

    Attributes:
        tokens: [vertex] whose home is to be found; 0 where it is found already.
        documents: [vertex] those of one document are neighbours and in order; a bin is a document of its own.
        net_bytes: [2, vertex] what travels to and from a lane that computes with its queries (0) or its keys (1).
        ends: [2, tile] vertex of the queries and of the keys.
        work: [tile] touched pairs.
        starts, members: [2, vertex + 1] and [2, tile] the tiles of each row (0) and of each column (1).
    """

    tokens: Ints
    documents: Ints
    net_bytes: Ints
    ends: Ints
    work: Ints
    starts: Ints
    members: Ints


class Blocks(NamedTuple):
    """The blocks of a micro-batch, its tiles, and both as a graph.

    Attributes:
        order: [sample, in the order in which they are planned] -> index in the micro-batch.
        runs: of the samples, in that order.
        starts, cuts: where samples are cut, as `cut_samples` returns it.
        tiles: between the blocks.
        num_own: blocks that are vertices of their own: they come first, with the same numbers, and so do their tiles.
        num_own_tiles: tiles between those.
        bins: [block - num_own] -> vertex that it shares.
        graph: vertices, of which those from `num_own` on are bins.
    """

    order: Ints
    runs: Runs
    starts: Ints
    cuts: Ints
    tiles: Tiles
    num_own: int
    num_own_tiles: int
    bins: Ints
    graph: Graph


def blocks_of(
    samples: Sequence[Sample], block_size: int, row_bytes: int, column_bytes: int, *, share_bins: bool = True
) -> Blocks:
    """Return the blocks of `samples`.

    Args:
        samples: of one micro-batch.
        block_size: most tokens of a block.
        row_bytes: per token, of queries there and outputs back.
        column_bytes: per token, of keys and values.
        share_bins: whether samples of up to `block_size` tokens share vertices.
    """
    order = canonical_order(samples)
    runs = runs_of([samples[index] for index in order])
    starts, cuts = cut_samples(runs, block_size)
    tiles = count_tiles(runs, starts, cuts)
    num_long = int(np.searchsorted(-runs.seqlens, -block_size, side="left"))
    num_own = int(starts[num_long]) - num_long
    num_own_tiles = int(np.searchsorted(tiles.rows, num_own, side="left"))
    bins = _fill_bins(runs.seqlens[num_long:], block_size) if share_bins else np.arange(len(samples) - num_long)
    graph = _graph_of(starts, cuts, tiles, num_long, (num_own, num_own_tiles), bins, (row_bytes, column_bytes))
    return Blocks(np.array(order, np.int64), runs, starts, cuts, tiles, num_own, num_own_tiles, bins + num_own, graph)


def canonical_order(samples: Sequence[Sample]) -> list[int]:
    """Return the indexes of `samples` by descending length, mask and index: in whatever order they were given."""
    texts = [_text_of(sample.mask) for sample in samples]
    return sorted(range(len(samples)), key=lambda index: (-samples[index].seqlen, texts[index], index))


@lru_cache(maxsize=4096)
def _text_of(mask: Mask | None) -> str:
    return "" if mask is None else str(mask)


@compiled
def _fill_bins(seqlens: Ints, block_size: int) -> Ints:
    """Return [sample] -> bin of samples, descending by length: the fullest that has room for it."""
    bins = np.empty(len(seqlens), np.int64)
    room = np.empty(len(seqlens), np.int64)
    count = 0
    for sample in range(len(seqlens)):
        best = -1
        for one in range(count):
            if room[one] >= seqlens[sample] and (best < 0 or room[one] < room[best]):
                best = one
        if best < 0:
            best = count
            room[count] = block_size
            count += 1
        room[best] -= seqlens[sample]
        bins[sample] = best
    return bins


@compiled
def _graph_of(
    starts: Ints, cuts: Ints, tiles: Tiles, num_long: int, own: tuple[int, int], bins: Ints,
    token_bytes: tuple[int, int],
) -> Graph:  # fmt: skip
    """Return the graph; `own` counts vertices and tiles of long samples, `token_bytes` are of rows and columns."""
    num_own, num_own_tiles = own
    num_bins = 0
    for one in bins:
        num_bins = max(num_bins, one + 1)
    num_vertices, num_tiles = num_own + num_bins, num_own_tiles + num_bins
    tokens = np.zeros(num_vertices, np.int64)
    documents = np.empty(num_vertices, np.int64)
    ends = np.empty((2, num_tiles), np.int64)
    work = np.zeros(num_tiles, np.int64)
    for sample in range(num_long):
        for cut in range(starts[sample], starts[sample + 1] - 1):
            tokens[cut - sample] = cuts[cut + 1] - cuts[cut]
            documents[cut - sample] = sample
    for tile in range(num_own_tiles):
        ends[0, tile], ends[1, tile], work[tile] = tiles.rows[tile], tiles.columns[tile], tiles.touched[tile]
    for one in range(num_bins):
        documents[num_own + one] = num_long + one
        ends[0, num_own_tiles + one] = ends[1, num_own_tiles + one] = num_own + one
    for short in range(len(bins)):
        cut = starts[num_long + short]
        tokens[num_own + bins[short]] += cuts[cut + 1] - cuts[cut]
        work[num_own_tiles + bins[short]] += tiles.touched[num_own_tiles + short]
    net_bytes = np.empty((2, num_vertices), np.int64)
    for vertex in range(num_vertices):
        net_bytes[0, vertex], net_bytes[1, vertex] = tokens[vertex] * token_bytes[0], tokens[vertex] * token_bytes[1]
    return graph_of(tokens, documents, net_bytes, ends, work)


@compiled
def graph_of(tokens: Ints, documents: Ints, net_bytes: Ints, ends: Ints, work: Ints) -> Graph:
    """Return the graph of these vertices and tiles."""
    num_vertices, num_tiles = len(tokens), len(work)
    starts = np.empty((2, num_vertices + 1), np.int64)
    members = np.empty((2, num_tiles), np.int64)
    for side in range(2):
        order, firsts = sorted_by(ends[side], num_vertices)
        for tile in range(num_tiles):
            members[side, tile] = order[tile]
        for vertex in range(num_vertices + 1):
            starts[side, vertex] = firsts[vertex]
    return Graph(tokens, documents, net_bytes, ends, work, starts, members)
