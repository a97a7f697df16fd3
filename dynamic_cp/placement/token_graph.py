"""A micro-batch as a graph, and where a search of its placement begins.

Vertices are blocks of tokens, a tile joins the block of its queries to that of its keys. Long samples are cut into
blocks; short ones share a vertex (a *bin*). A search begins with whole documents in parts where they fit, and the
others split over few parts. A *part* is a node, or a lane of one node, with caps of tokens and of touched pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending, sorted_by
from dynamic_cp.placement.runs import RowRuns, Tiles, count_tiles, cut_samples, runs_of
from dynamic_cp.types.masks import Mask
from dynamic_cp.types.plan import Sample


class TokenGraph(NamedTuple):
    """Vertices and tiles, for compiled loops. All numbers are whole.

    Attributes:
        tokens: [vertex] to place; 0 for a block of another node.
        documents: [vertex] vertices of a document are neighbours and in order; a bin is a document of its own.
        net_bytes: [2, vertex] bytes to and from a lane that computes with its queries (0) or its keys (1).
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


class TokenBlocks(NamedTuple):
    """The blocks of a micro-batch, its tiles, and both as a graph.

    Attributes:
        order: [sample, in the order in which they are planned] -> index in the micro-batch; `runs` are in that order.
        starts, cuts: where samples are cut, as of `cut_samples`.
        num_own, num_own_tiles: blocks that are vertices of their own, and tiles between them; both come first.
        bins: [block - num_own] -> vertex that it shares; vertices from `num_own` on are bins.
    """

    order: Ints
    runs: RowRuns
    starts: Ints
    cuts: Ints
    tiles: Tiles
    num_own: int
    num_own_tiles: int
    bins: Ints
    graph: TokenGraph


def blocks_of(
    samples: Sequence[Sample], block_size: int, row_bytes: int, column_bytes: int, *, share_bins: bool = True
) -> TokenBlocks:
    """Return the blocks of the samples of one micro-batch, of at most `block_size` tokens; `row_bytes` are of a
    token's queries there and outputs back, `column_bytes` of its keys and values; `share_bins`: short samples share
    vertices."""
    order = canonical_order(samples)
    runs = runs_of([samples[index] for index in order])
    starts, cuts = cut_samples(runs, block_size)
    tiles = count_tiles(runs, starts, cuts)
    num_long = int(np.searchsorted(-runs.seqlens, -block_size, side="left"))
    num_own = int(starts[num_long]) - num_long
    num_own_tiles = int(np.searchsorted(tiles.rows, num_own, side="left"))
    bins = _fill_bins(runs.seqlens[num_long:], block_size) if share_bins else np.arange(len(samples) - num_long)
    graph = _graph_of(starts, cuts, tiles, num_long, (num_own, num_own_tiles), bins, (row_bytes, column_bytes))
    return TokenBlocks(
        np.array(order, np.int64), runs, starts, cuts, tiles, num_own, num_own_tiles, bins + num_own, graph
    )


def canonical_order(samples: Sequence[Sample]) -> list[int]:
    """Return the indexes of `samples` by descending length, mask and index, the same for any order of the samples."""
    texts = [_text_of(sample.mask) for sample in samples]
    return sorted(range(len(samples)), key=lambda index: (-samples[index].seqlen, texts[index], index))


@lru_cache(maxsize=4096)
def _text_of(mask: Mask | None) -> str:
    return "" if mask is None else str(mask)


@compiled
def _fill_bins(seqlens: Ints, block_size: int) -> Ints:
    """Return [sample] -> bin, for samples descending by length: the fullest bin that has room."""
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
) -> TokenGraph:  # fmt: skip
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
def graph_of(tokens: Ints, documents: Ints, net_bytes: Ints, ends: Ints, work: Ints) -> TokenGraph:
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
    return TokenGraph(tokens, documents, net_bytes, ends, work, starts, members)


class Caps(NamedTuple):
    """What parts may hold, each [part]."""

    tokens: Floats
    work: Floats


class PartLoads(NamedTuple):
    """What parts hold so far, each [part]."""

    tokens: Floats
    work: Floats


@compiled
def place_documents(graph: TokenGraph, vertex_work: Floats, caps: Caps, is_spread: bool) -> Ints:
    """Return [vertex] -> part; `vertex_work` are touched pairs computed where it lies. `is_spread`: split documents put
    their heaviest vertices first, each into the emptiest part; False: in order."""
    num_vertices, num_parts = len(graph.tokens), len(caps.tokens)
    parts = np.empty(num_vertices, np.int64)
    held = PartLoads(np.zeros(num_parts), np.zeros(num_parts))
    firsts = _first_vertices(graph.documents)
    sizes, shares = np.zeros((2, len(firsts) - 1)), np.empty(len(firsts) - 1)
    all_tokens, all_work = 0.0, 0.0
    for part in range(num_parts):
        all_tokens += caps.tokens[part]
        all_work += caps.work[part]
    for document in range(len(shares)):
        for vertex in range(firsts[document], firsts[document + 1]):
            sizes[0, document] += graph.tokens[vertex]
            sizes[1, document] += vertex_work[vertex]
        shares[document] = -max(sizes[0, document] / all_tokens, sizes[1, document] / all_work)
    for document in ascending(shares):
        first, stop = firsts[document], firsts[document + 1]
        part, fits = emptiest(sizes[0, document], sizes[1, document], held, caps)
        if fits or stop - first == 1:
            parts[first:stop] = part
            held.tokens[part] += sizes[0, document]
            held.work[part] += sizes[1, document]
            continue
        chosen = _fewest_parts(sizes[0, document], sizes[1, document], held, caps)
        if is_spread:
            by_work = ascending(-vertex_work[first:stop])
            by_work += first
            _fill_emptiest(by_work, chosen, graph.tokens, vertex_work, held, caps, parts)
        else:
            _fill_in_order(first, stop, chosen, graph.tokens, vertex_work, held, caps, parts)
    return parts


@compiled
def _first_vertices(documents: Ints) -> Ints:
    """Return [document + 1] -> its first vertex."""
    firsts = np.empty(len(documents) + 1, np.int64)
    count = 0
    for vertex in range(len(documents)):
        if vertex == 0 or documents[vertex] != documents[vertex - 1]:
            firsts[count] = vertex
            count += 1
    firsts[count] = len(documents)
    return firsts[: count + 1]


@compiled
def emptiest(more_tokens: float, more_work: float, held: PartLoads, caps: Caps) -> tuple[int, bool]:
    """Return (the part that is least full with so much more, whether it then keeps its caps)."""
    tokens, work = held
    best, least = 0, np.inf
    for part in range(len(tokens)):
        fill = max((tokens[part] + more_tokens) / caps.tokens[part], (work[part] + more_work) / caps.work[part])
        if fill < least:
            best, least = part, fill
    return best, least <= 1.0


@compiled
def _fewest_parts(more_tokens: float, more_work: float, held: PartLoads, caps: Caps) -> Ints:
    """Return the parts with the most room, as few as hold so much more, but at least two if there are."""
    tokens, work = held
    fill = np.empty(len(tokens))
    for part in range(len(tokens)):
        fill[part] = max(tokens[part] / caps.tokens[part], work[part] / caps.work[part])
    order = ascending(fill)
    count, free_tokens, free_work = 0, 0.0, 0.0
    while count < len(order) and (count < 2 or free_tokens < more_tokens or free_work < more_work):
        part = order[count]
        free_tokens += max(0.0, caps.tokens[part] - tokens[part])
        free_work += max(0.0, caps.work[part] - work[part])
        count += 1
    return order[:count]


@compiled
def _fill_emptiest(
    vertices: Ints, chosen: Ints, vertex_tokens: Ints, vertex_work: Floats, held: PartLoads, caps: Caps, parts: Ints
) -> None:
    """Put one vertex after the other into the emptiest of the chosen parts."""
    tokens, work = held
    for vertex in vertices:
        best, least = chosen[0], np.inf
        for part in chosen:
            fill = max(
                (tokens[part] + vertex_tokens[vertex]) / caps.tokens[part],
                (work[part] + vertex_work[vertex]) / caps.work[part],
            )
            if fill < least:
                best, least = part, fill
        parts[vertex] = best
        tokens[best] += vertex_tokens[vertex]
        work[best] += vertex_work[vertex]


@compiled
def _fill_in_order(
    first: int,
    stop: int,
    chosen: Ints,
    vertex_tokens: Ints,
    vertex_work: Floats,
    held: PartLoads,
    caps: Caps,
    parts: Ints,
) -> None:
    """Fill one of the chosen parts after the other; what no longer fits goes to the emptiest."""
    tokens, work = held
    place = 0
    for vertex in range(first, stop):
        while place < len(chosen):
            part = chosen[place]
            if (
                tokens[part] + vertex_tokens[vertex] <= caps.tokens[part]
                and work[part] + vertex_work[vertex] <= caps.work[part]
            ):
                break
            place += 1
        if place == len(chosen):
            rest = np.arange(vertex, stop)
            _fill_emptiest(rest, chosen, vertex_tokens, vertex_work, held, caps, parts)
            return
        parts[vertex] = part
        tokens[part] += vertex_tokens[vertex]
        work[part] += vertex_work[vertex]
