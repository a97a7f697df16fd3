"""Moves rows between parts: a vertex with the tiles of its queries, or two vertices in exchange. The cost is the bytes
of keys that each part needs besides its own, and what it holds above its caps. Queries stay where they are, except for
*pushed* rows: their queries go to the keys, since few others need these."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import draw, next_state, total_of
from dynamic_cp.placement.token_graph import Caps, PartLoads, TokenGraph

_NUM_PARTNERS = 8
"""Vertices of the wanted part that are tried in exchange."""


class Prices(NamedTuple):
    """Bytes that one more token, or one more touched pair, above the caps is worth."""

    token: float
    pair: float


class _Rows(NamedTuple):
    """The state of the search: [vertex] touched pairs that move with it, 1 if its queries go to the keys, and its part;
    [vertex, part] `_users_of_keys`; what each part holds."""

    graph: TokenGraph
    vertex_work: Floats
    pushed: Ints
    parts: Ints
    users: Ints
    held: PartLoads
    caps: Caps
    prices: Prices


@compiled
def pushed_rows(graph: TokenGraph, num_parts: int) -> Ints:
    """Return [vertex] -> 1 if its queries go to the keys: fetching keys that few others need would cost more."""
    tokens = total_of(graph.tokens)
    pushed = np.zeros(len(graph.tokens), np.int64)
    for vertex in range(len(pushed)):
        alone_bytes, document_tokens = 0.0, 0.0
        for place in range(graph.starts[0, vertex], graph.starts[0, vertex + 1]):
            key = graph.ends[1, graph.members[0, place]]
            users = graph.starts[1, key + 1] - graph.starts[1, key]
            alone_bytes += graph.net_bytes[1, key] / users
            document_tokens += graph.tokens[key]
        num_others = min(np.ceil(num_parts * document_tokens / max(tokens, 1)), num_parts - 1)
        pushed[vertex] = alone_bytes > graph.net_bytes[0, vertex] * max(num_others, 1)
    return pushed


@compiled
def work_of_vertices(graph: TokenGraph, pushed: Ints) -> Floats:
    """Return [vertex] -> touched pairs of the tiles that go where it goes."""
    work = np.zeros(len(graph.tokens))
    for tile in range(len(graph.work)):
        work[graph.ends[pushed[graph.ends[0, tile]], tile]] += graph.work[tile]
    return work


@compiled
def improve_rows(
    graph: TokenGraph, vertex_work: Floats, pushed: Ints, parts: Ints, caps: Caps, prices: Prices,
    num_sweeps: int, seed: int,
) -> None:  # fmt: skip
    """Change `parts` [vertex] where that saves bytes, until nothing does or for `num_sweeps` sweeps."""
    num_vertices, num_parts = len(parts), len(caps.tokens)
    users = _users_of_keys(graph, pushed, parts, num_parts)
    held = _held_by(graph, vertex_work, parts, num_parts)
    rows = _Rows(graph, vertex_work, pushed, parts, users, held, caps, prices)
    state = next_state(np.uint64(88172645463325252 + seed * 7919000021))
    saved = np.empty(num_parts)
    for sweep in range(num_sweeps):
        num_changes = 0
        for place in range(num_vertices):
            vertex = place
            if sweep > 0:
                state = next_state(state)
                vertex = draw(state, num_vertices)
            here = parts[vertex]
            _saved_by_moving(graph, pushed[vertex], vertex, here, users, saved)
            best, most, wanted, wanted_most = here, 0.5, here, 0.5
            for part in range(num_parts):
                if part == here:
                    continue
                relief = _relief(here, part, graph.tokens[vertex], vertex_work[vertex], held, caps, prices)
                if saved[part] + relief > most:
                    best, most = part, saved[part] + relief
                if saved[part] > wanted_most:
                    wanted, wanted_most = part, saved[part]
            if best != here:
                _move(graph, vertex_work, pushed[vertex], vertex, best, parts, users, held)
                num_changes += 1
                continue
            if wanted != here:
                state, is_exchanged = _exchange(rows, vertex, wanted, wanted_most, saved, state)
                num_changes += is_exchanged
        if num_changes == 0 and sweep > 1:
            break


@compiled
def _exchange(rows: _Rows, vertex: int, wanted: int, most: float, saved: Floats, state: int) -> tuple[int, bool]:
    """Exchange `vertex` with a random one of the part `wanted`, if that saves bytes; return (state of the generator,
    whether two were exchanged). `most`: bytes that moving `vertex` saves; `saved`: scratch."""
    graph, vertex_work, pushed, parts, users, held, caps, prices = rows
    here = parts[vertex]
    for _ in range(_NUM_PARTNERS):
        state = next_state(state)
        other = draw(state, len(parts))
        if parts[other] != wanted:
            continue
        relief = _relief(
            here, wanted, graph.tokens[vertex] - graph.tokens[other], vertex_work[vertex] - vertex_work[other],
            held, caps, prices,
        )  # fmt: skip
        if most + relief <= 0.5:
            continue
        _move(graph, vertex_work, pushed[vertex], vertex, wanted, parts, users, held)
        _saved_by_moving(graph, pushed[other], other, wanted, users, saved)
        if most + saved[here] + relief > 0.5:
            _move(graph, vertex_work, pushed[other], other, here, parts, users, held)
            return state, True
        _move(graph, vertex_work, pushed[vertex], vertex, here, parts, users, held)
    return state, False


@compiled
def _held_by(graph: TokenGraph, vertex_work: Floats, parts: Ints, num_parts: int) -> PartLoads:
    held = PartLoads(np.zeros(num_parts), np.zeros(num_parts))
    for vertex in range(len(parts)):
        held.tokens[parts[vertex]] += graph.tokens[vertex]
        held.work[parts[vertex]] += vertex_work[vertex]
    return held


@compiled
def _users_of_keys(graph: TokenGraph, pushed: Ints, parts: Ints, num_parts: int) -> Ints:
    """Return [vertex, part] -> reasons for the part to have its keys: each row there that sees them, and its home."""
    users = np.zeros((len(parts), num_parts), np.int64)
    for vertex in range(len(parts)):
        users[vertex, parts[vertex]] += 1
    for tile in range(len(graph.work)):
        row = graph.ends[0, tile]
        if not pushed[row]:
            users[graph.ends[1, tile], parts[row]] += 1
    return users


@compiled
def _saved_by_moving(graph: TokenGraph, is_pushed: int, vertex: int, here: int, users: Ints, saved: Floats) -> None:
    """Fill `saved` [part] with the bytes that moving a vertex there saves."""
    saved[:] = 0.0
    left = 0.0
    sees_itself = False
    if not is_pushed:
        for place in range(graph.starts[0, vertex], graph.starts[0, vertex + 1]):
            key = graph.ends[1, graph.members[0, place]]
            sees_itself |= key == vertex
            size = graph.net_bytes[1, key]
            if users[key, here] == (2 if key == vertex else 1):
                left += size
            for part in range(len(saved)):
                if users[key, part] == 0:
                    saved[part] -= size
    if not sees_itself:  # its keys move all the same
        size = graph.net_bytes[1, vertex]
        if users[vertex, here] == 1:
            left += size
        for part in range(len(saved)):
            if users[vertex, part] == 0:
                saved[part] -= size
    saved += left


@compiled
def _relief(
    here: int, there: int, more_tokens: float, more_work: float, held: PartLoads, caps: Caps, prices: Prices
) -> float:
    """Return the price of what moving so much from one part to another takes away above the caps, in bytes."""
    tokens, work = held
    before = max(0.0, tokens[here] - caps.tokens[here]) + max(0.0, tokens[there] - caps.tokens[there])
    after = max(0.0, tokens[here] - more_tokens - caps.tokens[here]) + max(
        0.0, tokens[there] + more_tokens - caps.tokens[there]
    )
    before_work = max(0.0, work[here] - caps.work[here]) + max(0.0, work[there] - caps.work[there])
    after_work = max(0.0, work[here] - more_work - caps.work[here]) + max(
        0.0, work[there] + more_work - caps.work[there]
    )
    return prices.token * (before - after) + prices.pair * (before_work - after_work)  # type: ignore[no-any-return]


@compiled
def _move(
    graph: TokenGraph,
    vertex_work: Floats,
    is_pushed: int,
    vertex: int,
    there: int,
    parts: Ints,
    users: Ints,
    held: PartLoads,
) -> None:
    here = parts[vertex]
    users[vertex, here] -= 1
    users[vertex, there] += 1
    if not is_pushed:
        for place in range(graph.starts[0, vertex], graph.starts[0, vertex + 1]):
            key = graph.ends[1, graph.members[0, place]]
            users[key, here] -= 1
            users[key, there] += 1
    held.tokens[here] -= graph.tokens[vertex]
    held.tokens[there] += graph.tokens[vertex]
    held.work[here] -= vertex_work[vertex]
    held.work[there] += vertex_work[vertex]
    parts[vertex] = there
