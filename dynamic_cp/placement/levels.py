"""Places a graph: over nodes first, since little leaves a node at a time, then over the lanes of each node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.blocks import Graph, graph_of
from dynamic_cp.placement.documents import Caps, place_documents
from dynamic_cp.placement.row_search import Prices, improve_rows, pushed_rows, work_of_vertices
from dynamic_cp.placement.tile_search import improve_tiles, moved_bytes, state_of

_NUM_SWEEPS = 20
_NUM_ROUNDS = 6
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
    num_nodes = -(-num_lanes // node_lanes)
    lanes_of = np.full(num_nodes, node_lanes)
    lanes_of[num_nodes - 1] = num_lanes - (num_nodes - 1) * node_lanes
    tokens, work = graph.tokens.sum() / num_lanes, graph.work.sum() / num_lanes
    caps = Caps(
        lanes_of * (tokens * (1 + token_tolerance / 2)) + 1e-6, lanes_of * (work * (1 + work_tolerance / 2)) + 1e-6
    )
    nodes, tile_nodes = _place_over(graph, caps, effort)
    if node_lanes == 1:
        return nodes, tile_nodes
    homes, lanes = np.empty_like(nodes), np.empty_like(tile_nodes)
    for node in range(num_nodes):
        part, vertices, tiles = _part_of(graph, nodes, tile_nodes, node)
        count = lanes_of[node]
        caps = Caps(
            np.full(count, tokens * (1 + token_tolerance) + 1e-6), np.full(count, work * (1 + work_tolerance) + 1e-6)
        )
        part_homes, part_lanes = _place_over(part, caps, effort)
        for place in range(len(vertices)):
            if nodes[vertices[place]] == node:
                homes[vertices[place]] = node * node_lanes + part_homes[place]
        lanes[tiles] = node * node_lanes + part_lanes
    return homes, lanes


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
        if effort.num_sweeps:
            improve_rows(graph, vertex_work, pushed, homes, caps, prices, effort.num_sweeps, effort.seed)
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
def _part_of(graph: Graph, nodes: Ints, tile_nodes: Ints, node: int) -> tuple[Graph, Ints, Ints]:
    """Return (the graph of one node, its vertices, its tiles).

    Blocks of other nodes that tiles here read are among its vertices, with no tokens: the lane where the search puts
    one passes it on.
    """
    tiles = np.flatnonzero(tile_nodes == node)
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
    return graph_of(tokens, graph.documents[vertices], net_bytes, ends, graph.work[tiles]), vertices, tiles
