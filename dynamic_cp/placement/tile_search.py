"""Moves tiles between parts: those of one row, or of one column, that a part computes.

All tiles of a row on a part need its queries there, all of a column its keys. So tiles move by *lines* (a row or a
column): all that a part has of it, or only the *glad* ones, each of which saves bytes (the other part has its crossing
line, and nobody else here needs it). First parts above their cap of work are relieved at the least bytes per pair; then
lines move where that saves bytes and keeps the caps. The busiest part counts, not the sum. So a byte has a price at the
part that needs it, which follows, from round to round, that part's needs over the mean, as for wires of a chip
(PathFinder, McMurchie and Ebeling, FPGA 1995).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending
from dynamic_cp.placement.token_graph import Caps, TokenGraph

_LEAST = 0.5
"""Bytes, at their prices, that a move has to save."""
_LEAST_PRICE, _MOST_PRICE = 0.5, 4.0
"""Least and highest price of a byte, for a part that needs at most, or at least, this many times the mean."""


class TileState(NamedTuple):
    """Where vertices and tiles are, and what follows from it.

    Attributes:
        users: [2, vertex, part] reasons for the part to have its queries (0) or keys (1): tiles, home.
        prices: [part] of a byte that it needs.
    """

    homes: Ints
    lanes: Ints
    users: Ints
    tokens: Floats
    work: Floats
    prices: Floats


class Line(NamedTuple):
    """What moving the tiles that a part has of a row or column would do: [part] bytes saved by moving all of them
    there, at the prices of the parts, and [1] their touched pairs; the same, each [part], for the glad ones alone."""

    bytes: Floats
    work: Floats
    glad_bytes: Floats
    glad_work: Floats


class Limits(NamedTuple):
    """Which tiles of a line move: those that save `least_bytes`, until `enough_work` pairs moved, at most
    `most_work`."""

    least_bytes: float
    enough_work: float
    most_work: float


@compiled
def state_of(graph: TokenGraph, homes: Ints, lanes: Ints, num_parts: int) -> TileState:
    """Return the state with these parts of vertices and tiles."""
    users = np.zeros((2, len(homes), num_parts), np.int64)
    tokens, work = np.zeros(num_parts), np.zeros(num_parts)
    for vertex in range(len(homes)):
        users[:, vertex, homes[vertex]] += 1
        tokens[homes[vertex]] += graph.tokens[vertex]
    for tile in range(len(lanes)):
        for side in range(2):
            users[side, graph.ends[side, tile], lanes[tile]] += 1
        work[lanes[tile]] += graph.work[tile]
    return TileState(homes, lanes, users, tokens, work, np.ones(num_parts))


@compiled
def transfers(graph: TokenGraph, state: TileState) -> tuple[Floats, Floats]:
    """Return [part] -> bytes that it needs from others, and that others need from it, each block once for each part."""
    num_parts = len(state.work)
    needed, given = np.zeros(num_parts), np.zeros(num_parts)
    for side in range(2):
        for vertex in range(len(state.homes)):
            home = state.homes[vertex]
            for part in range(num_parts):
                if part != home and state.users[side, vertex, part]:
                    needed[part] += graph.net_bytes[side, vertex]
                    given[home] += graph.net_bytes[side, vertex]
    return needed, given


@compiled
def _follow_needs(graph: TokenGraph, state: TileState) -> None:
    """Move prices half way to each part's needs over the mean."""
    needed, _ = transfers(graph, state)
    num_parts = len(needed)
    mean = max(needed.sum() / num_parts, 1.0)
    for part in range(num_parts):
        price = min(max(needed[part] / mean, _LEAST_PRICE), _MOST_PRICE)
        state.prices[part] = 0.5 * (state.prices[part] + price)


@compiled
def improve_tiles(graph: TokenGraph, state: TileState, caps: Caps, num_rounds: int) -> None:
    """Change `state` until no part is above its cap of work and no move saves bytes, or for `num_rounds` rounds."""
    num_vertices, num_parts = len(state.homes), len(caps.work)
    line = Line(np.empty(num_parts), np.empty(1), np.empty(num_parts), np.empty(num_parts))
    ratios = np.empty(2 * num_vertices)
    for _ in range(num_rounds):
        num_moves = 0
        _follow_needs(graph, state)
        for part in range(num_parts):
            if state.work[part] > caps.work[part]:
                num_moves += _relieve(graph, state, caps, part, line, ratios)
        for side in range(2):
            for vertex in range(num_vertices):
                num_moves += _improve_line(graph, state, caps, side, vertex, line)
        num_moves += _improve_homes(graph, state, caps)
        if num_moves == 0:
            break


@compiled
def _weigh_line(
    graph: TokenGraph, state: TileState, side: int, vertex: int, here: int, least: float, line: Line
) -> None:
    """Fill in what moving the tiles of a line away from a part would do; tiles that save `least` bytes are glad."""
    line.glad_bytes[:] = 0.0
    line.bytes[:] = 0.0
    line.glad_work[:] = 0.0
    count, work = 0, 0.0
    for place in range(graph.starts[side, vertex], graph.starts[side, vertex + 1]):
        tile = graph.members[side, place]
        if state.lanes[tile] != here:
            continue
        count += 1
        work += graph.work[tile]
        crossing = graph.ends[1 - side, tile]
        size = graph.net_bytes[1 - side, crossing]
        left = size * state.prices[here] if state.users[1 - side, crossing, here] == 1 else 0.0
        for part in range(len(line.bytes)):
            gain = left if state.users[1 - side, crossing, part] else left - size * state.prices[part]
            line.bytes[part] += gain
            if gain >= least:
                line.glad_bytes[part] += gain
                line.glad_work[part] += graph.work[tile]
    size = graph.net_bytes[side, vertex]
    left = size * state.prices[here] if state.users[side, vertex, here] == count else 0.0  # no other need of the line
    for part in range(len(line.bytes)):
        arriving = 0.0 if state.users[side, vertex, part] else size * state.prices[part]
        line.bytes[part] += left - arriving
        line.glad_bytes[part] += (left if line.glad_work[part] == work else 0.0) - arriving
    line.work[0] = work


@compiled
def _move_line(
    graph: TokenGraph, state: TileState, side: int, vertex: int, here: int, there: int, limits: Limits
) -> float:
    """Move tiles of a line within `limits`; return the touched pairs that moved."""
    least, excess, room = limits
    moved = 0.0
    for place in range(graph.starts[side, vertex], graph.starts[side, vertex + 1]):
        tile = graph.members[side, place]
        if state.lanes[tile] != here:
            continue
        crossing = graph.ends[1 - side, tile]
        size = graph.net_bytes[1 - side, crossing]
        gain = (size * state.prices[here] if state.users[1 - side, crossing, here] == 1 else 0.0) - (
            0.0 if state.users[1 - side, crossing, there] else size * state.prices[there]
        )
        if gain < least or moved >= excess or moved + graph.work[tile] > room:
            continue
        state.lanes[tile] = there
        for one in range(2):
            state.users[one, graph.ends[one, tile], here] -= 1
            state.users[one, graph.ends[one, tile], there] += 1
        moved += graph.work[tile]
    state.work[here] -= moved
    state.work[there] += moved
    return moved


@compiled
def _improve_line(graph: TokenGraph, state: TileState, caps: Caps, side: int, vertex: int, line: Line) -> int:
    """Move the tiles of a line from each part that has some to where it saves most; return the number of moves."""
    num_moves = 0
    num_parts = len(caps.work)
    for here in range(num_parts):
        if state.users[side, vertex, here] - (state.homes[vertex] == here) <= 0:
            continue
        _weigh_line(graph, state, side, vertex, here, _LEAST, line)
        best, most, least = here, _LEAST, -np.inf
        for part in range(num_parts):
            if part == here:
                continue
            room = caps.work[part] - state.work[part]
            if line.bytes[part] > most and line.work[0] <= room:
                best, most, least = part, line.bytes[part], -np.inf
            if line.glad_bytes[part] > most and line.glad_work[part] <= room:
                best, most, least = part, line.glad_bytes[part], _LEAST
        if best != here:
            _move_line(graph, state, side, vertex, here, best, Limits(least, np.inf, np.inf))
            num_moves += 1
    return num_moves


@compiled
def _relieve(graph: TokenGraph, state: TileState, caps: Caps, here: int, line: Line, ratios: Floats) -> int:
    """Move tiles from a part above its cap at the least bytes per touched pair; return the number of moves."""
    num_vertices = len(state.homes)
    num_moves, num_lines = 0, 0
    lines = np.empty(2 * num_vertices, np.int64)
    for number in range(2 * num_vertices):
        ratio, there, _ = _cheapest_relief(graph, state, caps, number, here, line)
        if there >= 0:
            lines[num_lines], ratios[num_lines] = number, ratio
            num_lines += 1
    for place in ascending(ratios[:num_lines]):
        excess = state.work[here] - caps.work[here]
        if excess <= 0.0:
            break
        ratio, there, least = _cheapest_relief(graph, state, caps, lines[place], here, line)
        if there < 0 or ratio > ratios[place] + abs(ratios[place]):
            continue  # what made it cheap has moved
        room = caps.work[there] - state.work[there]
        side, vertex = lines[place] // num_vertices, lines[place] % num_vertices
        if _move_line(graph, state, side, vertex, here, there, Limits(least, excess, room)) > 0.0:
            num_moves += 1
    return num_moves


@compiled
def _cheapest_relief(
    graph: TokenGraph, state: TileState, caps: Caps, number: int, here: int, line: Line
) -> tuple[float, int, float]:
    """Return (bytes per touched pair, part or -1, what a tile has to save) of the best move of a line from a part;
    `number` counts lines, rows first."""
    side, vertex = number // len(state.homes), number % len(state.homes)
    if state.users[side, vertex, here] - (state.homes[vertex] == here) <= 0:
        return np.inf, -1, 0.0
    _weigh_line(graph, state, side, vertex, here, 0.0, line)
    excess = state.work[here] - caps.work[here]
    best, lowest, least = -1, np.inf, 0.0
    for part in range(len(caps.work)):
        room = caps.work[part] - state.work[part]
        if part == here or room <= 0.0:
            continue
        if line.glad_work[part] > 0.0:
            ratio = -line.glad_bytes[part] / min(line.glad_work[part], excess, room)
            if ratio < lowest:
                best, lowest, least = part, ratio, 0.0
        if line.work[0] > 0.0:
            ratio = -line.bytes[part] / min(line.work[0], excess, room)
            if ratio < lowest:
                best, lowest, least = part, ratio, -np.inf
    return lowest, best, least


@compiled
def _improve_homes(graph: TokenGraph, state: TileState, caps: Caps) -> int:
    """Move homes, without tiles, to where more of their tiles are, as far as tokens allow; return how many moved."""
    num_moves = 0
    for vertex in range(len(state.homes)):
        here = state.homes[vertex]
        left = 0
        for side in range(2):
            if state.users[side, vertex, here] == 1:
                left += graph.net_bytes[side, vertex]
        if left == 0:
            continue
        best, most = -1, _LEAST
        for part in range(len(caps.tokens)):
            if part == here or state.tokens[part] + graph.tokens[vertex] > caps.tokens[part]:
                continue
            gain = left
            for side in range(2):
                if state.users[side, vertex, part] == 0:
                    gain -= graph.net_bytes[side, vertex]
            if gain > most:
                best, most = part, gain
        if best >= 0:
            state.users[:, vertex, here] -= 1
            state.users[:, vertex, best] += 1
            state.tokens[here] -= graph.tokens[vertex]
            state.tokens[best] += graph.tokens[vertex]
            state.homes[vertex] = best
            num_moves += 1
    return num_moves
