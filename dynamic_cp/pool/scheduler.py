"""Evens out attention between servers: which ranges of queries leave the server that holds them, and for where.

Every server begins with the queries that it holds. One with more work than (1 + tolerance) times the mean gives ranges
away until it has that much, each time the one with most work per byte. A range of queries [start, stop) of a document
needs all keys up to `stop` at the receiver, so that nothing has to be merged:

    bytes = query_bytes * (stop - start)
          + kv_bytes * (keys of [0, stop) that the receiver neither holds nor fetches anyway)
          - kv_bytes * (keys that the giver fetched for this range alone)

Among ranges of equal work w = stop^2 - start^2, the one with stop = c * sqrt(w / (c^2 - 1)), c = 1 + kv_bytes /
query_bytes, has the fewest bytes: there the derivative of c * stop - start along constant w is 0. Other candidates end
with the keys that the receiver has, end with the range that they are cut from, or begin with it. Receivers are the
servers with most room and those that compute some of the document already. Nobody receives more than (1 + tolerance)
times the mean, so no work travels twice.

Source: DistCA (arXiv 2510.18121, section 4.2) moves items greedily by work over bytes. It takes an upper bound for the
bytes; ours are exact. Limits: all links cost the same, and the price does not see which server sends or receives most:
a weight for that changed the busiest one's bytes by -6% to +16%, and cost up to 6% more in all (docs/LOG.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending, first_not_below, sorted_by
from dynamic_cp.pool.tasks import TASKS_PER_DOCUMENT
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP

_NUM_ROOMY = 4
"""Servers with most room that are tried for a range."""
_LEAST_ROOM = 0.25
"""A server that computes some of the document is tried if it has room for this share of what could be given away."""


class Rules(NamedTuple):
    """What ranges may be, and what they cost.

    Attributes:
        tile, tolerance: ranges are cut at multiples of so many tokens; share by which servers may exceed the mean.
        query_bytes, kv_bytes: per token whose queries leave, there and back, and per token whose keys and values do.
        extra_tokens: work of each query, in keys, besides that with its keys.
    """

    tile: int
    tolerance: float
    query_bytes: float
    kv_bytes: float
    extra_tokens: float


_USER, _END, _NUM_RANGES, _NEXT = range(4)
"""Columns of users: the server, the end of the keys that it needs, its number of ranges, and the next entry."""


class _State(NamedTuple):
    """Ranges of queries as they lie now.

    Attributes:
        ranges, load: [range, (document, start, stop, server)], empty ones being gone; [server] work.
        first, after: [server] -> its first range; [range] -> the next one of its server. -1: none.
        users, first_user: [entry, (_USER, _END, _NUM_RANGES, _NEXT)], _NEXT of the last being -1; [document] -> its
            first entry.
        sizes: number of (ranges, entries).
    """

    ranges: Ints
    first: Ints
    after: Ints
    load: Floats
    users: Ints
    first_user: Ints
    sizes: Ints


class _Homes(NamedTuple):
    """[home, (document, start, stop, server)] by document and server; their servers; [document + 1] -> the first."""

    rows: Ints
    servers: Ints
    firsts: Ints


@compiled
def work_of(start: float, stop: float, extra_tokens: float) -> float:
    """Return the work of queries [start, stop) with all keys up to their own, in squared tokens."""
    return (stop - start) * (stop + start + extra_tokens)


@compiled
def schedule(homes: Ints, queries: Ints, earlier: Ints, busy: Floats, rules: Rules) -> Ints:
    """Return tasks, int64 [task, (document, start, stop, server)], that compute each of `queries` once.

    Args:
        homes: in the same form: who holds which tokens, all of each document.
        queries, earlier: in the same form: homes, or parts of them, to be computed; tasks whose keys stay.
        busy: [server] other work, in the unit of `work_of`; servers come out even with it.
    """
    num_servers = len(busy)
    num_documents = 0
    for home in range(len(homes)):
        num_documents = max(num_documents, homes[home, SAMPLE] + 1)
    by_server = homes[sorted_by(homes[:, HOLDER].copy(), num_servers)[0]]
    order, firsts = sorted_by(by_server[:, SAMPLE].copy(), num_documents)
    rows = by_server[order]
    by_document = _Homes(rows, rows[:, HOLDER].copy(), firsts)
    state = _begin(queries, earlier, num_servers, num_documents, rules)
    mean = state.load.sum() / num_servers
    level = _level(busy, mean)
    for server in range(num_servers):
        state.load[server] += min(busy[server], level)
    most = level + rules.tolerance * mean
    for giver in ascending(-state.load):
        while state.load[giver] > most and _give(giver, most, state, by_document, rules):
            pass
    ranges = state.ranges[: state.sizes[0]]
    return ranges[ranges[:, STOP] > ranges[:, START]]


@compiled
def _level(busy: Floats, mean: float) -> float:
    """Return the level up to which the least busy servers are filled when `mean` more work per server is added."""
    below = 0.0
    in_order = np.sort(busy)
    level = 0.0
    for count in range(1, len(busy) + 1):
        below += in_order[count - 1]
        level = (mean * len(busy) + below) / count
        if count == len(busy) or level <= in_order[count]:
            break
    return level


@compiled
def _begin(queries: Ints, earlier: Ints, num_servers: int, num_documents: int, rules: Rules) -> _State:
    """Return the state in which every server computes what it holds."""
    # Each gift ends a giver, fills a receiver or moves a whole range, nearly always; without room the search ends.
    most_ranges = 2 * len(queries) + 16 * num_servers + 64
    state = _State(
        np.zeros((most_ranges, 4), np.int64),
        np.full(num_servers, -1),
        np.full(most_ranges, -1),
        np.zeros(num_servers),
        np.zeros((most_ranges + len(earlier), 4), np.int64),
        np.full(num_documents, -1),
        np.zeros(2, np.int64),
    )
    for task in range(len(earlier)):
        _use_keys(earlier[task, SAMPLE], earlier[task, STOP], earlier[task, HOLDER], 0, state)
    for row in range(len(queries)):
        _add(queries[row, SAMPLE], queries[row, START], queries[row, STOP], queries[row, HOLDER], state, rules)
    return state


@compiled
def _user(document: int, server: int, state: _State) -> int:
    """Return the entry of a server among the users of a document; -1: it is none."""
    entry = state.first_user[document]
    while entry >= 0 and state.users[entry, _USER] != server:
        entry = state.users[entry, _NEXT]
    return entry  # type: ignore[no-any-return]


@compiled
def _use_keys(document: int, stop: int, server: int, num_ranges: int, state: _State) -> None:
    """Have a server need the keys of a document up to `stop`, for so many more ranges."""
    entry = _user(document, server, state)
    if entry < 0:
        entry = state.sizes[1]
        state.sizes[1] += 1
        state.users[entry] = server, 0, 0, state.first_user[document]
        state.first_user[document] = entry
    state.users[entry, _END] = max(state.users[entry, _END], stop)
    state.users[entry, _NUM_RANGES] += num_ranges


@compiled
def _absent(document: int, server: int, start: int, stop: int, homes: _Homes) -> int:
    """Return how many tokens of [start, stop) of a document a server does not hold."""
    absent = max(stop - start, 0)
    end = homes.firsts[document + 1]
    home = first_not_below(homes.servers, homes.firsts[document], end, server)
    while absent > 0 and home < end and homes.servers[home] == server:
        absent -= max(0, min(stop, homes.rows[home, STOP]) - max(start, homes.rows[home, START]))
        home += 1
    return absent


@compiled
def _neighbour(document: int, start: int, stop: int, server: int, state: _State) -> int:
    """Return a range of a server that ends where this one begins, or begins where it ends; -1: there is none."""
    one = state.first[server]
    while one >= 0:
        touches = state.ranges[one, STOP] == start or state.ranges[one, START] == stop
        if touches and state.ranges[one, SAMPLE] == document:
            return one  # type: ignore[no-any-return]
        one = state.after[one]
    return -1


@compiled
def _add(document: int, start: int, stop: int, server: int, state: _State, rules: Rules) -> None:
    """Give a server a range; one that touches it grows."""
    state.load[server] += work_of(start, stop, rules.extra_tokens)
    one = _neighbour(document, start, stop, server, state)
    if one >= 0:
        state.ranges[one, START] = min(state.ranges[one, START], start)
        state.ranges[one, STOP] = max(state.ranges[one, STOP], stop)
        _use_keys(document, stop, server, 0, state)
    else:
        _append(document, start, stop, server, state)
        _use_keys(document, stop, server, 1, state)


@compiled
def _append(document: int, start: int, stop: int, server: int, state: _State) -> None:
    one = state.sizes[0]
    state.sizes[0] += 1
    state.ranges[one] = document, start, stop, server
    state.after[one] = state.first[server]
    state.first[server] = one


@compiled
def _end_without(document: int, without: int, server: int, state: _State) -> int:
    """Return where the last range of a document on a server ends, range `without` left out; 0 if there is no other."""
    end = 0
    one = state.first[server]
    while one >= 0:
        if one != without and state.ranges[one, SAMPLE] == document:
            end = max(end, state.ranges[one, STOP])
        one = state.after[one]
    return end


@compiled
def _fill_roomiest(most: float, state: _State, roomy: Ints) -> int:
    """Fill `roomy` with the servers that have most room, descending; return how many have any."""
    count = 0
    for server in range(len(state.load)):
        if state.load[server] >= most or (count == len(roomy) and state.load[server] >= state.load[roomy[count - 1]]):
            continue
        place = min(count, len(roomy) - 1)
        while place > 0 and state.load[server] < state.load[roomy[place - 1]]:
            roomy[place] = roomy[place - 1]
            place -= 1
        roomy[place] = server
        count = min(count + 1, len(roomy))
    return count


@compiled
def _give(giver: int, most: float, state: _State, homes: _Homes, rules: Rules) -> bool:
    """Move the best range away from `giver`; False if none can be moved."""
    roomy = np.empty(_NUM_ROOMY, np.int64)
    num_roomy = _fill_roomiest(most, state, roomy)
    if num_roomy == 0 or state.sizes[0] + 2 > len(state.ranges):
        return False
    least_room = _LEAST_ROOM * min(state.load[giver] - most, most - state.load[roomy[0]])
    best, best_ratio = np.zeros(4, np.int64), 0.0  # range, start, stop, receiver
    one = state.first[giver]
    while one >= 0:
        document = state.ranges[one, SAMPLE]
        is_whole = homes.firsts[document + 1] - homes.firsts[document] == 1
        # If its document is one home, moving it saves no keys here, so its queries are a lower bound of the bytes.
        bound = (2.0 * state.ranges[one, STOP] + rules.extra_tokens) / rules.query_bytes
        if not is_whole or bound > best_ratio:
            for place in range(num_roomy):
                best_ratio = _improve(best, best_ratio, one, roomy[place], most, state, homes, rules)
            entry = state.first_user[document]
            while entry >= 0:
                receiver = state.users[entry, _USER]
                if receiver != giver and most - state.load[receiver] >= least_room:
                    best_ratio = _improve(best, best_ratio, one, receiver, most, state, homes, rules)
                entry = state.users[entry, _NEXT]
        one = state.after[one]
    if best_ratio <= 0.0:
        return False
    _move(best[0], best[1], best[2], best[3], state, rules)
    return True


@compiled
def _improve(
    best: Ints, best_ratio: float, one: int, receiver: int, most: float, state: _State, homes: _Homes, rules: Rules
) -> float:
    """Put the best part of a range for `receiver` into `best` if it beats what is there; return the better ratio."""
    document, low = state.ranges[one, SAMPLE], state.ranges[one, START]
    high, giver = state.ranges[one, STOP], state.ranges[one, HOLDER]
    room = most - state.load[receiver]
    wanted = min(state.load[giver] - most, room)
    if room <= 0.0:
        return best_ratio
    entry = _user(document, receiver, state)
    there = state.users[entry, _END] if entry >= 0 else 0
    is_full = entry >= 0 and state.users[entry, _NUM_RANGES] >= TASKS_PER_DOCUMENT
    may_split = state.users[_user(document, giver, state), _NUM_RANGES] < TASKS_PER_DOCUMENT
    is_small = work_of(low, high, rules.extra_tokens) <= wanted
    for candidate in range(1 if is_small else 4):
        start, stop = low, high
        if not is_small:
            start, stop = _cut(candidate, low, high, wanted, room, there, rules)
        moved = work_of(start, stop, rules.extra_tokens)
        if stop <= start or moved > room or (start > low and stop < high and not may_split):
            continue
        if is_full and _neighbour(document, start, stop, receiver, state) < 0:
            continue
        ratio = moved / _bytes(one, start, stop, receiver, there, state, homes, rules)
        if ratio > best_ratio:
            best_ratio = ratio
            best[:] = one, start, stop, receiver
    return best_ratio


@compiled
def _cut(candidate: int, low: int, high: int, wanted: float, room: float, there: int, rules: Rules) -> tuple[int, int]:
    """Return a part of [low, high) with at least the wanted work, or a tile less if that has no room."""
    tile, half_extra = rules.tile, rules.extra_tokens / 2
    if candidate == 0:
        end = float(high)
    elif candidate == 1:
        c = 1.0 + rules.kv_bytes / rules.query_bytes
        end = c * math.sqrt(wanted / (c * c - 1.0))
    elif candidate == 2:
        end = float(there)
    else:
        end = math.sqrt((low + half_extra) ** 2 + wanted) - half_extra
    stop = int(min(high, max(math.ceil(end / tile) * tile, low)))
    start = low
    squared = (stop + half_extra) ** 2 - wanted
    if squared > (low + half_extra) ** 2:
        start = max(low, int((math.sqrt(squared) - half_extra) // tile * tile))
    if work_of(start, stop, rules.extra_tokens) > room:
        start = min(start // tile * tile + tile, stop)
    return start, stop


@compiled
def _bytes(
    one: int, start: int, stop: int, receiver: int, there: int, state: _State, homes: _Homes, rules: Rules
) -> float:
    """Return the additional bytes when a part of a range moves, but at least 5% of those that it brings."""
    document, low, giver = state.ranges[one, SAMPLE], state.ranges[one, START], state.ranges[one, HOLDER]
    brought = (stop - start) * rules.query_bytes + _absent(document, receiver, there, stop, homes) * rules.kv_bytes
    saved = 0.0
    if homes.firsts[document + 1] - homes.firsts[document] > 1:
        end = _end_without(document, one, giver, state)
        if end < stop and state.users[_user(document, giver, state), _END] == stop:
            saved = _absent(document, giver, max(end, start if start > low else 0), stop, homes) * rules.kv_bytes
    return max(brought - saved, 0.05 * brought)


@compiled
def _move(one: int, start: int, stop: int, receiver: int, state: _State, rules: Rules) -> None:
    """Move the part [start, stop) of a range."""
    document, low = state.ranges[one, SAMPLE], state.ranges[one, START]
    high, giver = state.ranges[one, STOP], state.ranges[one, HOLDER]
    entry = _user(document, giver, state)
    state.load[giver] -= work_of(start, stop, rules.extra_tokens)
    if start > low:
        state.ranges[one, STOP] = start
        if stop < high:
            _append(document, stop, high, giver, state)
            state.users[entry, _NUM_RANGES] += 1
    elif stop < high:
        state.ranges[one, START] = stop
    else:
        _unlink(one, giver, state)
        state.users[entry, _NUM_RANGES] -= 1
    state.users[entry, _END] = _end_without(document, -1, giver, state)
    _add(document, start, stop, receiver, state, rules)


@compiled
def _unlink(one: int, server: int, state: _State) -> None:
    """Take a range off its server."""
    state.ranges[one, STOP] = state.ranges[one, START]
    if state.first[server] == one:
        state.first[server] = state.after[one]
        return
    before = state.first[server]
    while state.after[before] != one:
        before = state.after[before]
    state.after[before] = state.after[one]
