"""Ways to place a micro-batch, by name, and the few settings of them among which simulation chooses. A graph is placed
over nodes first, so that little leaves a node, then over the lanes of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending, sorted_by, total_of
from dynamic_cp.placement.placed import Placed, placed_of
from dynamic_cp.placement.row_search import Prices, improve_rows, pushed_rows, work_of_vertices
from dynamic_cp.placement.runs import SUB_TILE
from dynamic_cp.placement.tile_search import TileState, improve_tiles, state_of, transfers
from dynamic_cp.placement.token_graph import (
    Caps,
    PartLoads,
    TokenBlocks,
    TokenGraph,
    blocks_of,
    emptiest,
    graph_of,
    place_documents,
)
from dynamic_cp.types.counts import MAX_COUNT, largest_power_of_two
from dynamic_cp.types.placement import PlacementProblem
from dynamic_cp.types.plan import Sample

_ROUNDING = 1e-6
"""Tokens or pairs above a cap that count as none."""
_MANY_LOOKS = 1_000_000
"""Tiles times nodes, above which a search takes fewer starts, sweeps and rounds: it looks at each pair."""
_NUM_IMPROVED = 2
"""Beginnings that the search over tiles improves: those that cost least."""
_WORK_PRICE = 32.0
"""Price of all work above the caps, in units of the bytes of all keys."""


class PlacementEffort(NamedTuple):
    """What a search may do: the number of beginnings (1 to 4), of sweeps over rows (0: rows stay where their documents
    were put) and of rounds over tiles (0: tiles stay with their rows), and the seed of random choices."""

    num_starts: int
    num_sweeps: int
    num_rounds: int
    seed: int


@compiled
def place_graph(
    graph: TokenGraph,
    num_lanes: int,
    node_lanes: int,
    token_tolerance: float,
    work_tolerance: float,
    effort: PlacementEffort,
) -> tuple[Ints, Ints]:
    """Return ([vertex] -> lane, [tile] -> lane); the last node may have fewer lanes than `node_lanes`. Tolerances are
    shares by which a lane may exceed the mean; a node gets half."""
    of_nodes, of_lanes = caps_of(graph, num_lanes, node_lanes, token_tolerance, work_tolerance)
    if len(graph.work) * len(of_nodes.tokens) > _MANY_LOOKS:
        effort = PlacementEffort(1, min(effort.num_sweeps, 4), min(effort.num_rounds, 1), effort.seed)
    nodes, tile_nodes = _place_over(graph, of_nodes, effort)
    if node_lanes == 1:
        return nodes, tile_nodes
    homes, lanes = np.empty_like(nodes), np.empty_like(tile_nodes)
    by_node, first_tiles = sorted_by(tile_nodes, len(of_nodes.tokens))
    for node in range(len(of_nodes.tokens)):
        tiles = by_node[first_tiles[node] : first_tiles[node + 1]]
        part, vertices = part_of(graph, nodes, tiles, node)
        first, stop = node * node_lanes, min((node + 1) * node_lanes, num_lanes)
        caps = Caps(of_lanes.tokens[first:stop], of_lanes.work[first:stop])
        part_homes, part_lanes = _place_over(part, caps, effort)
        for place in range(len(vertices)):
            if nodes[vertices[place]] == node:
                homes[vertices[place]] = node * node_lanes + part_homes[place]
        for place in range(len(tiles)):
            lanes[tiles[place]] = node * node_lanes + part_lanes[place]
    return homes, lanes


@compiled
def caps_of(
    graph: TokenGraph, num_lanes: int, node_lanes: int, token_tolerance: float, work_tolerance: float
) -> tuple[Caps, Caps]:
    """Return what each node and what each lane may hold; arguments as of `place_graph`."""
    num_nodes = -(-num_lanes // node_lanes)
    tokens, work = total_of(graph.tokens) / num_lanes, total_of(graph.work) / num_lanes
    of_nodes = Caps(np.empty(num_nodes), np.empty(num_nodes))
    of_lanes = Caps(np.empty(num_lanes), np.empty(num_lanes))
    for node in range(num_nodes):
        count = min(node_lanes, num_lanes - node * node_lanes)
        of_nodes.tokens[node] = count * tokens * (1.0 + token_tolerance / 2.0) + _ROUNDING
        of_nodes.work[node] = count * work * (1.0 + work_tolerance / 2.0) + _ROUNDING
    for lane in range(num_lanes):
        of_lanes.tokens[lane] = tokens * (1.0 + token_tolerance) + _ROUNDING
        of_lanes.work[lane] = work * (1.0 + work_tolerance) + _ROUNDING
    return of_nodes, of_lanes


@compiled
def _place_over(graph: TokenGraph, caps: Caps, effort: PlacementEffort) -> tuple[Ints, Ints]:
    """Return ([vertex] -> part, [tile] -> part): the best of several beginnings."""
    num_parts = len(caps.tokens)
    best_homes, best_lanes = np.zeros(len(graph.tokens), np.int64), np.zeros(len(graph.work), np.int64)
    if num_parts == 1 or len(graph.tokens) == 0:
        return best_homes, best_lanes
    prices = _prices_of(graph)
    starts, costs = _beginnings(graph, caps, prices, effort)
    num_vertices = len(graph.tokens)
    lowest, before, num_improved = np.inf, -1, 0
    for start in ascending(costs):
        if costs[start] == np.inf or num_improved == _NUM_IMPROVED:
            break
        if before >= 0 and (starts[start] == starts[before]).all():
            continue
        before = start
        num_improved += 1
        homes, lanes = starts[start, :num_vertices].copy(), starts[start, num_vertices:].copy()
        state = state_of(graph, homes, lanes, num_parts)
        improve_tiles(graph, state, caps, effort.num_rounds)
        cost = _cost(graph, state, caps, prices)
        if cost < lowest:
            best_homes, best_lanes, lowest = homes, lanes, cost
    return best_homes, best_lanes


@compiled
def _prices_of(graph: TokenGraph) -> Prices:
    """Return the prices of tokens and work above the caps."""
    keys_bytes = total_of(graph.net_bytes[1])
    return Prices(
        (total_of(graph.net_bytes[0]) + keys_bytes) / max(total_of(graph.tokens), 1),
        _WORK_PRICE * keys_bytes / max(total_of(graph.work), 1),
    )


@compiled
def _beginnings(graph: TokenGraph, caps: Caps, prices: Prices, effort: PlacementEffort) -> tuple[Ints, Floats]:
    """Return ([beginning] -> part of each vertex, then of each tile; [beginning] -> its cost, inf if there is none).
    Every other one spreads documents; the last two push no rows."""
    num_parts, num_vertices = len(caps.tokens), len(graph.tokens)
    pushed = pushed_rows(graph, num_parts)
    starts = np.empty((effort.num_starts, num_vertices + len(graph.work)), np.int64)
    costs = np.full(effort.num_starts, np.inf)
    for start in range(effort.num_starts):
        is_spread = start % 2 == 0
        if start == 2:
            if total_of(pushed) == 0:
                break
            pushed = np.zeros_like(pushed)
        vertex_work = work_of_vertices(graph, pushed)
        homes = place_documents(graph, vertex_work, caps, is_spread)
        if effort.num_sweeps:
            improve_rows(graph, vertex_work, pushed, homes, caps, prices, effort.num_sweeps, effort.seed)
        lanes = np.empty(len(graph.work), np.int64)
        for tile in range(len(lanes)):
            lanes[tile] = homes[graph.ends[pushed[graph.ends[0, tile]], tile]]
        starts[start, :num_vertices], starts[start, num_vertices:] = homes, lanes
        costs[start] = _cost(graph, state_of(graph, homes, lanes, num_parts), caps, prices)
    return starts, costs


@compiled
def _cost(graph: TokenGraph, state: TileState, caps: Caps, prices: Prices) -> float:
    """Return the cost of a placement in bytes: half of what travels, half of it again if all were as busy as the
    busiest, and the prices of what parts hold above their caps."""
    needed, given = transfers(graph, state)
    cost = 0.5 * needed.sum() + 0.25 * len(needed) * (needed.max() + given.max())
    cost += _overload(state.tokens, caps.tokens) * prices.token + _overload(state.work, caps.work) * prices.pair
    return cost  # type: ignore[no-any-return]


@compiled
def _overload(held: Floats, caps: Floats) -> float:
    """Return what parts hold above their caps."""
    total = 0.0
    for part in range(len(held)):
        total += max(0.0, held[part] - caps[part])
    return total


@compiled
def part_of(graph: TokenGraph, nodes: Ints, tiles: Ints, node: int) -> tuple[TokenGraph, Ints]:
    """Return (the graph of one node, which computes these tiles, its vertices). Blocks of other nodes that the tiles
    read are among its vertices, without tokens: the lane where the search puts one passes it on."""
    is_used = np.zeros(len(nodes), np.int64)
    for tile in tiles:
        is_used[graph.ends[0, tile]] = is_used[graph.ends[1, tile]] = 1
    vertices, number = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
    count = 0
    for vertex in range(len(nodes)):
        if is_used[vertex] or nodes[vertex] == node:
            vertices[count], number[vertex] = vertex, count
            count += 1
    vertices = vertices[:count]
    tokens, documents = np.zeros(count, np.int64), np.empty(count, np.int64)
    net_bytes = np.empty((2, count), np.int64)
    for place in range(count):
        vertex = vertices[place]
        documents[place] = graph.documents[vertex]
        net_bytes[0, place], net_bytes[1, place] = graph.net_bytes[0, vertex], graph.net_bytes[1, vertex]
        if nodes[vertex] == node:
            tokens[place] = graph.tokens[vertex]
    ends, work = np.empty((2, len(tiles)), np.int64), np.empty(len(tiles), np.int64)
    for place in range(len(tiles)):
        ends[0, place], ends[1, place] = number[graph.ends[0, tiles[place]]], number[graph.ends[1, tiles[place]]]
        work[place] = graph.work[tiles[place]]
    return graph_of(tokens, documents, net_bytes, ends, work), vertices


_NUM_STARTS = 4
_NUM_SWEEPS = 20
_NUM_ROUNDS = 3


def place_whole(samples: Sequence[Sample], problem: PlacementProblem) -> Placed:
    """Return whole samples on lanes, longest first, each on the lane that is least full: nothing travels."""
    blocks = blocks_of(samples, MAX_COUNT, problem.row_bytes, problem.column_bytes, share_bins=False)
    lanes = _least_full(blocks.graph.tokens, blocks.graph.work.astype(np.float64), problem.num_lanes)
    return placed_of(blocks, lanes, lanes, problem, is_even=False)


def place_zigzag(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return blocks dealt to lanes 0, 1, ..., K - 1, K - 1, ..., 0 and so on; a tile is where its queries are."""
    return _zigzag(_blocks(samples, problem, block_size), problem)


def place_greedily(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return whole documents where they fit, the others split over few nodes and lanes; no search follows."""
    return _greedy(_blocks(samples, problem, block_size), problem)


def search_placement(
    samples: Sequence[Sample], problem: PlacementProblem, block_size: int, *, moves_rows: bool = True
) -> Placed:
    """Return the result of a local search over rows (with `moves_rows`), then over tiles, from a greedy beginning."""
    return (_search if moves_rows else _search_tiles)(_blocks(samples, problem, block_size), problem)


class Maker(NamedTuple):
    """A way to place a micro-batch: its name with the tokens of a block, and its function, which may take a seed."""

    name: str
    make: Callable[..., Placed]
    takes_seed: bool = False

    def __call__(self, seed: int = 0) -> Placed:
        return self.make(seed) if self.takes_seed else self.make()


def candidates(samples: Sequence[Sample], problem: PlacementProblem) -> Iterator[Maker]:
    """Yield ways to place, the quickest first, then best guess first; simulation says what is best. Blocks have an
    eighth, a quarter or half of a lane's tokens, rounded down to powers of two, at least a sub-tile's. Work is as even
    as the problem's tolerance, more even, or less (fewer bytes, best under sparse masks)."""
    mean = max(1, sum(sample.seqlen for sample in samples) // problem.num_lanes)
    eighth, quarter, half = (max(SUB_TILE, largest_power_of_two(max(1, mean // parts))) for parts in (8, 4, 2))
    uneven, even = (replace(problem, work_tolerance=times * problem.work_tolerance) for times in (4.0, 0.3))

    @lru_cache
    def blocks(block_size: int) -> TokenBlocks:
        return _blocks(samples, problem, block_size)

    # In small batches several of these are the same.
    for name, way, size, of_work in dict.fromkeys(
        (
            ("greedy", _greedy, half, problem),
            ("search", _search, quarter, uneven),
            ("tiles", _search_tiles, half, problem),
            ("zigzag", _zigzag, quarter, problem),
            ("search", _search, eighth, uneven),
            ("search", _search, quarter, even),
            ("search", _search, eighth, problem),
            ("search", _search, half, uneven),
            ("search", _search, quarter, problem),
            ("search", _search, half, problem),
        )
    ):
        yield Maker(f"{name} {size}", partial(way, blocks(size), of_work), takes_seed=way is _search)
    yield Maker("documents", partial(place_whole, samples, problem))


def _blocks(samples: Sequence[Sample], problem: PlacementProblem, block_size: int) -> TokenBlocks:
    return blocks_of(samples, block_size, problem.row_bytes, problem.column_bytes)


def _zigzag(blocks: TokenBlocks, problem: PlacementProblem) -> Placed:
    graph = blocks.graph
    turns = np.arange(len(graph.tokens)) % (2 * problem.num_lanes)
    homes = np.minimum(turns, 2 * problem.num_lanes - 1 - turns)
    return placed_of(blocks, homes, homes[graph.ends[0]], problem)


def _greedy(blocks: TokenBlocks, problem: PlacementProblem) -> Placed:
    return _placed(blocks, problem, PlacementEffort(_NUM_STARTS, 0, 0, 0))


def _search_tiles(blocks: TokenBlocks, problem: PlacementProblem) -> Placed:
    return _placed(blocks, problem, PlacementEffort(_NUM_STARTS, 0, _NUM_ROUNDS, 0))


def _search(blocks: TokenBlocks, problem: PlacementProblem, seed: int = 0) -> Placed:
    return _placed(blocks, problem, PlacementEffort(_NUM_STARTS, _NUM_SWEEPS, _NUM_ROUNDS, seed))


def _placed(blocks: TokenBlocks, problem: PlacementProblem, effort: PlacementEffort) -> Placed:
    homes, lanes = place_graph(
        blocks.graph, problem.num_lanes, problem.node_lanes, problem.token_tolerance, problem.work_tolerance, effort
    )
    return placed_of(blocks, homes, lanes, problem)


@compiled
def _least_full(sample_tokens: Ints, sample_work: Floats, num_lanes: int) -> Ints:
    """Return [sample] -> lane; samples are descending by length."""
    lanes = np.empty(len(sample_tokens), np.int64)
    held = PartLoads(np.zeros(num_lanes), np.zeros(num_lanes))
    caps = Caps(np.full(num_lanes, float(sample_tokens.sum())), np.full(num_lanes, sample_work.sum()))
    for sample in range(len(lanes)):
        lane, _ = emptiest(float(sample_tokens[sample]), sample_work[sample], held, caps)
        lanes[sample] = lane
        held.tokens[lane] += sample_tokens[sample]
        held.work[lane] += sample_work[sample]
    return lanes
