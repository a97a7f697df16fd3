"""Places a graph: over nodes first, since little leaves a node at a time, then over the lanes of each node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.blocks import Graph, graph_of, sorted_by
from dynamic_cp.placement.documents import Caps, place_documents
from dynamic_cp.placement.row_search import Prices, improve_rows, pushed_rows, work_of_vertices
from dynamic_cp.placement.tile_search import improve_tiles, moved_bytes, state_of

_ROUNDING = 1e-6
"""Tokens or pairs above a cap that are none."""
_LEAST_SWEEPS, _MOST_LOOKS = 4, 6_000_000
"""Sweeps over rows, of which each looks at all tiles once for each part; large graphs get few."""
_WORK_PRICE = 32.0
"""Bytes of all keys that all work above a cap is worth."""


class Effort(NamedTuple):
    """What a search may do.

    Attributes:
        num_sweeps: of the search over rows; 0: rows stay where their documents were put.
        num_rounds: of the search over tiles; 0: tiles stay with their rows.
        seed: another seed, another search.
    """

    num_sweeps: int
    num_rounds: int
    seed: int


@compiled
def place_graph(
    graph: Graph, num_lanes: int, node_lanes: int, token_tolerance: float, work_tolerance: float, effort: Effort
) -> tuple[Ints, Ints]:
    """Return ([vertex] -> lane, [tile] -> lane).

    Args:
        graph: of the micro-batch.
        num_lanes, node_lanes: of all nodes and of each; the last may have fewer.
        token_tolerance, work_tolerance: share by which a lane may hold and compute more than the mean. Nodes may use
            half of it.
        effort: of the search.
    """
    of_nodes, of_lanes = caps_of(graph, num_lanes, node_lanes, token_tolerance, work_tolerance)
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
        lanes[tiles] = node * node_lanes + part_lanes
    return homes, lanes


@compiled
def caps_of(
    graph: Graph, num_lanes: int, node_lanes: int, token_tolerance: float, work_tolerance: float
) -> tuple[Caps, Caps]:
    """Return what each node and what each lane may hold; arguments as for `place_graph`."""
    num_nodes = -(-num_lanes // node_lanes)
    tokens, work = graph.tokens.sum() / num_lanes, graph.work.sum() / num_lanes
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
def _place_over(graph: Graph, caps: Caps, effort: Effort) -> tuple[Ints, Ints]:
    """Return ([vertex] -> part, [tile] -> part): the best of several beginnings."""
    num_parts = len(caps.tokens)
    best_homes, best_lanes = np.zeros(len(graph.tokens), np.int64), np.zeros(len(graph.work), np.int64)
    if num_parts == 1 or len(graph.tokens) == 0:
        return best_homes, best_lanes
    keys_bytes = graph.net_bytes[1].sum()
    tokens = max(graph.tokens.sum(), 1)
    prices = Prices(
        (graph.net_bytes[0].sum() + keys_bytes) / tokens, _WORK_PRICE * keys_bytes / max(graph.work.sum(), 1)
    )
    looks = max(1, len(graph.work) * num_parts)
    num_sweeps = min(effort.num_sweeps, max(_LEAST_SWEEPS, _MOST_LOOKS // looks))
    pushed = pushed_rows(graph, num_parts)
    lowest = np.inf
    for start in range(4):
        is_spread = start % 2 == 0
        if start == 2:
            if pushed.max() == 0:
                break
            pushed[:] = 0
        vertex_work = work_of_vertices(graph, pushed)
        homes = place_documents(graph, vertex_work, caps, is_spread)
        if num_sweeps:
            improve_rows(graph, vertex_work, pushed, homes, caps, prices, num_sweeps, effort.seed)
        lanes = np.empty(len(graph.work), np.int64)
        for tile in range(len(lanes)):
            lanes[tile] = homes[graph.ends[pushed[graph.ends[0, tile]], tile]]
        state = state_of(graph, homes, lanes, num_parts)
        improve_tiles(graph, state, caps, effort.num_rounds)
        cost = moved_bytes(graph, state.users) + _overload(state.tokens, caps.tokens) * prices.token
        cost += _overload(state.work, caps.work) * prices.pair
        if cost < lowest:
            best_homes, best_lanes, lowest = homes, lanes, cost
    return best_homes, best_lanes


@compiled
def _overload(held: Floats, caps: Floats) -> float:
    """Return what parts hold above their caps."""
    return np.maximum(held - caps, 0.0).sum()  # type: ignore[no-any-return]


@compiled
def part_of(graph: Graph, nodes: Ints, tiles: Ints, node: int) -> tuple[Graph, Ints]:
    """Return (the graph of one node, which computes these tiles, its vertices).

    Blocks of other nodes that tiles here read are among its vertices, with no tokens: the lane where the search puts
    one passes it on.
    """
    is_used = nodes == node
    for tile in tiles:
        is_used[graph.ends[0, tile]] = True
        is_used[graph.ends[1, tile]] = True
    vertices = np.flatnonzero(is_used)
    number = np.empty(len(nodes), np.int64)
    number[vertices] = np.arange(len(vertices))
    ends = np.empty((2, len(tiles)), np.int64)
    net_bytes = np.empty((2, len(vertices)), np.int64)
    for side in range(2):
        ends[side] = number[graph.ends[side][tiles]]
        net_bytes[side] = graph.net_bytes[side][vertices]
    tokens = np.where(nodes[vertices] == node, graph.tokens[vertices], 0)
    return graph_of(tokens, graph.documents[vertices], net_bytes, ends, graph.work[tiles]), vertices
