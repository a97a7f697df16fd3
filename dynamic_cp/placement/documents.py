"""Where a search begins: whole documents in parts where they fit, the others split over few parts.

A *part* is a node, or a lane of one node. Each has a cap of tokens and one of work, in touched pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.order import ascending
from dynamic_cp.placement.token_graph import Graph


class Caps(NamedTuple):
    """What parts may hold.

    Attributes:
        tokens, work: [part].
    """

    tokens: Floats
    work: Floats


class Held(NamedTuple):
    """What parts hold so far.

    Attributes:
        tokens, work: [part].
    """

    tokens: Floats
    work: Floats


@compiled
def place_documents(graph: Graph, vertex_work: Floats, caps: Caps, is_spread: bool) -> Ints:
    """Return [vertex] -> part.

    Args:
        graph: vertices and tiles.
        vertex_work: [vertex] what is computed where it lies.
        caps: of the parts.
        is_spread: how a document is split: its heaviest vertices first, each to the emptiest of its parts; otherwise
            one stretch of it after the other.
    """
    num_vertices, num_parts = len(graph.tokens), len(caps.tokens)
    parts = np.empty(num_vertices, np.int64)
    held = Held(np.zeros(num_parts), np.zeros(num_parts))
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
def emptiest(more_tokens: float, more_work: float, held: Held, caps: Caps) -> tuple[int, bool]:
    """Return (the part that is least full with so much more, whether it then keeps its caps)."""
    tokens, work = held
    best, least = 0, np.inf
    for part in range(len(tokens)):
        fill = max((tokens[part] + more_tokens) / caps.tokens[part], (work[part] + more_work) / caps.work[part])
        if fill < least:
            best, least = part, fill
    return best, least <= 1.0


@compiled
def _fewest_parts(more_tokens: float, more_work: float, held: Held, caps: Caps) -> Ints:
    """Return those parts with the most room, as few as hold so much more, at least two of several."""
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
    vertices: Ints, chosen: Ints, vertex_tokens: Ints, vertex_work: Floats, held: Held, caps: Caps, parts: Ints
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
    first: int, stop: int, chosen: Ints, vertex_tokens: Ints, vertex_work: Floats, held: Held, caps: Caps, parts: Ints
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
