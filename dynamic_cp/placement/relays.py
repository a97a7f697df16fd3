"""Which lane of a node fetches what several of its lanes use from another node, and hands it on to them.

Either the lanes that use it take turns, or the lane of the node with least to fetch does it, whether it uses it or not:
so that all NICs of a node have as much to do, however unevenly its lanes need what others hold.
"""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.placement.lanes import Lanes
from dynamic_cp.placement.order import ascending, sorted_by

_WHOLE, _HANDED_ON = 10, 3
"""Fetching something from another node, and handing it on inside the node, which is some times as fast."""


@compiled
def crossing_groups(lane: Ints, thing: Ints, crosses: Ints, lanes: Lanes) -> tuple[Ints, Ints]:
    """Return ([fetch] -> group of the fetches of one thing by one node, -1 where it does not cross; [group] a fetch).

    Args:
        lane, thing: [fetch] who fetches what.
        crosses: [fetch] 1 where it is held in another node.
    """
    num_things = 0
    for one in thing:
        num_things = max(num_things, one + 1)
    crossing = np.flatnonzero(crosses)
    by_thing, _ = sorted_by(thing[crossing], num_things)
    nodes = (lane[crossing] + lanes.first) // lanes.of_node
    num_nodes = 0
    for one in nodes:
        num_nodes = max(num_nodes, one + 1)
    in_order = by_thing[sorted_by(nodes[by_thing], num_nodes)[0]]
    group, firsts = np.full(len(lane), -1), np.empty(len(crossing), np.int64)
    count, before = 0, -1
    for place in in_order:
        fetch = crossing[place]
        if before < 0 or thing[fetch] != thing[crossing[before]] or nodes[place] != nodes[before]:
            firsts[count] = fetch
            count += 1
        group[fetch] = count - 1
        before = place
    return group, firsts[:count].copy()


@compiled
def relays_by_order(lane: Ints, first: Ints, order: Ints, group: Ints, num_groups: int, node_lanes: int) -> Ints:
    """Return [group] -> the lane that needs it first; of several one after the other, by `order` [fetch]."""
    relays, best = np.full(num_groups, -1), np.full(num_groups, -1)
    for fetch in range(len(group)):
        one = group[fetch]
        if one < 0:
            continue
        now = best[one]
        if now < 0 or (first[fetch], (lane[fetch] + order[fetch]) % node_lanes) < (
            first[now], (lane[now] + order[now]) % node_lanes
        ):  # fmt: skip
            best[one], relays[one] = fetch, lane[fetch]
    return relays


@compiled
def relays_by_load(lane: Ints, kind: Ints, first: Ints, tokens: Ints, group: Ints, firsts: Ints, lanes: Lanes) -> Ints:
    """Return [group] -> the lane of its node that has least to fetch of its kind in its division, largest first.

    Of several the one with least of both kinds in that division, then in all.

    Args:
        lane, kind, first, tokens: [fetch] who needs how many tokens of what, and from which division on.
        group, firsts: of `crossing_groups`.
    """
    uses, starts = sorted_by(group + 1, len(firsts) + 1)
    begins, order = _by_division(first, tokens, firsts, uses, starts)
    load, total = np.zeros((2, lanes.number), np.int64), np.zeros(lanes.number, np.int64)
    is_user = np.zeros(lanes.number, np.bool_)
    relays = np.empty(len(firsts), np.int64)
    division = -1
    for one in order:
        if begins[one] != division:
            division = begins[one]
            load[:] = 0
        fetch = firsts[one]
        what, needed = kind[fetch], tokens[fetch]
        node = (lane[fetch] + lanes.first) // lanes.of_node
        low = max(node * lanes.of_node - lanes.first, 0)
        high = min((node + 1) * lanes.of_node - lanes.first, lanes.number)
        users = lane[uses[starts[one + 1] : starts[one + 2]]]
        is_user[users] = True
        best, least = -1, (0, 0, 0)
        for relay in range(low, high):
            own = _WHOLE * load[what, relay] + (0 if is_user[relay] else _HANDED_ON * needed)
            cost = own, load[0, relay] + load[1, relay], total[relay]
            if best < 0 or cost < least:
                best, least = relay, cost
        is_user[users] = False
        relays[one] = best
        load[what, best] += needed
        total[best] += needed
    return relays


@compiled
def _by_division(first: Ints, tokens: Ints, firsts: Ints, uses: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Return ([group] the division in which it is needed first; groups in the order of these, the largest first).

    Args:
        first, tokens, firsts: as for `relays_by_load`.
        uses, starts: the fetches of group g are uses[starts[g + 1] : starts[g + 2]].
    """
    num_groups = len(firsts)
    begins, order, largest = np.empty(num_groups, np.int64), np.empty(num_groups), 1
    for one in range(num_groups):
        begins[one] = first[firsts[one]]
        for place in range(starts[one + 1], starts[one + 2]):
            begins[one] = min(begins[one], first[uses[place]])
        largest = max(largest, tokens[firsts[one]] + 1)
    for one in range(num_groups):
        order[one] = begins[one] * float(largest) - tokens[firsts[one]]
    return begins, ascending(order)
