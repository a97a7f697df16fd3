"""What the lanes of a placement fetch and give back, over which link, and in which division.

A lane fetches the queries (a row) or the keys and values (a column) of a home that its tiles use and that another lane
holds. What lanes of a node use of another node crosses once, to one lane of the node, the *relay*, which hands it to
all that use it; on the way back the relay adds up what its node computed, and one sum crosses. Without this, placed
attention loses to a ring where documents are long (with a prototype, the best modelled total fell by a factor of 1.1 to
2.0 on causal data). The relay is in turn one of the lanes that use a home, or the lane of the node with least to fetch,
so that all NICs of a node have as much to do.

A programme has four rounds of transfers in each division: `ACROSS` (fetch from other nodes), `INSIDE` (fetch from lanes
of the node, relays among them), `COLLECT` (give back inside the node) and `DELIVER` (give back to other nodes).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending, sorted_by
from dynamic_cp.types import Placement
from dynamic_cp.types.placement import DIVISION, HOLDER, LANE, START, STOP, Lanes

_WHOLE, _HANDED_ON = 10, 3
"""Costs of fetching from another node, and of handing on inside the node, which is some times as fast."""


@compiled
def crossing_groups(lane: Ints, thing: Ints, crosses: Ints, lanes: Lanes) -> tuple[Ints, Ints]:
    """Return ([fetch] -> group of the fetches of one thing by one node, -1 if it does not cross; [group] a fetch);
    arguments: [fetch] who fetches what, and 1 if it is held in another node."""
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
    """Return [group] -> the lane that needs it first; several take turns by `order` [fetch]."""
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
    """Return [group] -> the lane of its node that has least to fetch of its kind in its division, the largest group
    first; ties go to the lane with least of both kinds in that division, then in all. `first`: [fetch] the division
    from which on it is needed; `group`, `firsts`: of `crossing_groups`."""
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
    """Return ([group] the division in which it is needed first; groups in the order of these, the largest first). The
    fetches of group g are uses[starts[g + 1] : starts[g + 2]]."""
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


ACROSS, INSIDE, COLLECT, DELIVER = range(4)
"""The rounds of a division, in their order."""
NUM_ROUNDS = 4


class Fetches(NamedTuple):
    """All that lanes use and do not hold, or hand on, one entry for each lane, kind and home, in this order.

    Attributes:
        lane, kind, home: who fetches what: ROW, queries with all that belongs to them, or COLUMN, keys and values.
        source: the lane that it is fetched from and given back to: the holder or a relay.
        crosses: whether the source is in another node.
        first, last: divisions in which it is fetched and given back; a relay's are those of its whole node.
    """

    lane: Ints
    kind: Ints
    home: Ints
    source: Ints
    crosses: Ints
    first: Ints
    last: Ints


def fetches_of(placement: Placement, lanes: Lanes, order: Ints | None = None) -> Fetches:
    """Return what every lane of a placement fetches; `order`: [home] a number by which the lanes that use it take turns
    as relays; None: the lane with least to fetch."""
    homes = np.ascontiguousarray(placement.homes, np.int64)
    tiles = np.ascontiguousarray(placement.tiles, np.int64)
    return fetches_used(homes[:, HOLDER], homes[:, STOP] - homes[:, START], *_used(homes, tiles), lanes, order)


@compiled
def _used(homes: Ints, tiles: Ints) -> tuple[Ints, Ints]:
    """Return what tiles use that their lane does not hold, as `fetches_used` takes it, and in which division."""
    used, divisions = np.empty(2 * len(tiles), np.int64), np.empty(2 * len(tiles), np.int64)
    count = 0
    for kind in range(2):
        for tile in range(len(tiles)):
            home, lane = tiles[tile, kind], tiles[tile, LANE]
            if homes[home, HOLDER] != lane:
                used[count] = (lane * 2 + kind) * len(homes) + home
                divisions[count] = tiles[tile, DIVISION]
                count += 1
    return used[:count].copy(), divisions[:count].copy()


def fetches_used(
    holder: Ints, tokens: Ints, used: Ints, divisions: Ints, lanes: Lanes, order: Ints | None = None
) -> Fetches:
    """Return what every lane fetches, from the holder and tokens of each home, and for every use (lane * 2 + kind) *
    number of homes + home (`used`) and its division; `order` as in `fetches_of`."""
    order = np.zeros(0, np.int64) if order is None else order
    return _fetches(np.ascontiguousarray(holder), tokens, used, divisions, lanes, order)


@compiled
def _fetches(holder: Ints, tokens: Ints, used: Ints, divisions: Ints, lanes: Lanes, order: Ints) -> Fetches:
    """Return `fetches_used`; an empty `order`: relays by load."""
    num_homes = len(holder)
    direct = _direct_fetches(holder, used, divisions, lanes)
    lane, kind, home, _, crosses, first, _ = direct
    group, firsts = crossing_groups(lane, kind * num_homes + home, crosses, lanes)
    if len(order):
        relays = relays_by_order(lane, first, order[home], group, len(firsts), lanes.of_node)
    else:
        relays = relays_by_load(lane, kind, first, tokens[home], group, firsts, lanes)
    fetches = _through_relays(direct, group, firsts, relays)
    in_order, _ = sorted_by(fetches.home, num_homes)
    in_order = in_order[sorted_by((fetches.lane * 2 + fetches.kind)[in_order], 2 * lanes.number)[0]]
    return _taken(fetches, in_order)


@compiled
def _direct_fetches(holder: Ints, used: Ints, divisions: Ints, lanes: Lanes) -> Fetches:
    """Return one entry for each lane, kind and home that it uses, fetched from the holder."""
    num_homes, most = len(holder), len(used)
    by_home, _ = sorted_by(used % num_homes, num_homes)
    by_user, _ = sorted_by(used[by_home] // num_homes, 2 * lanes.number)
    lane, kind, home = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    source, crosses = np.empty(most, np.int64), np.empty(most, np.int64)
    first, last = np.empty(most, np.int64), np.empty(most, np.int64)
    count, before = 0, -1
    for place in by_user:
        key, division = used[by_home[place]], divisions[by_home[place]]
        if key == before:
            first[count - 1] = min(first[count - 1], division)
            last[count - 1] = max(last[count - 1], division)
            continue
        before = key
        user, home[count] = key // num_homes, key % num_homes
        lane[count], kind[count] = user // 2, user % 2
        source[count], first[count], last[count] = holder[home[count]], division, division
        there = (lanes.first + source[count]) // lanes.of_node
        crosses[count] = (lanes.first + lane[count]) // lanes.of_node != there
        count += 1
    return _taken(Fetches(lane, kind, home, source, crosses, first, last), np.arange(count))


@compiled
def _through_relays(direct: Fetches, group: Ints, firsts: Ints, relays: Ints) -> Fetches:
    """Return `direct`, but with the lanes of a node fetching from its relay ([group] -> lane), whose divisions are
    those of all. A relay that does not use what it hands on has an entry, too, behind all others."""
    count = len(direct.lane)
    of_relay = np.full(len(firsts), -1)
    for fetch in range(count):
        if group[fetch] >= 0 and direct.lane[fetch] == relays[group[fetch]]:
            of_relay[group[fetch]] = fetch
    absent = np.flatnonzero(of_relay < 0)
    fetches = _taken(direct, np.concatenate((np.arange(count), firsts[absent])))
    fetches.lane[count:] = relays[absent]
    of_relay[absent] = count + np.arange(len(absent))
    for fetch in range(count):
        if group[fetch] >= 0:
            relay = of_relay[group[fetch]]
            fetches.first[relay] = min(fetches.first[relay], direct.first[fetch])
            fetches.last[relay] = max(fetches.last[relay], direct.last[fetch])
            if fetch != relay:
                fetches.source[fetch], fetches.crosses[fetch] = fetches.lane[relay], 0
    return fetches


@compiled
def _taken(fetches: Fetches, entries: Ints) -> Fetches:
    lane, kind, home, source, crosses, first, last = fetches
    return Fetches(
        lane[entries], kind[entries], home[entries], source[entries], crosses[entries], first[entries], last[entries]
    )


class Messages(NamedTuple):
    """Bytes of all transfers between two lanes in one round (ACROSS .. DELIVER), in the order of rounds, senders and
    receivers; num_bytes are of one direction of one layer."""

    division: Ints
    round: Ints
    sender: Ints
    receiver: Ints
    num_bytes: Floats


def messages_of(fetches: Fetches, tokens: Ints, there: Floats, back: Floats) -> Messages:
    """Return the transfers of `fetches`; `tokens`: of each home; `there`, `back`: bytes per token of a fetched (row,
    column), and of what is given back for one."""
    return _messages(fetches, tokens, there, back)


@compiled
def _messages(fetches: Fetches, tokens: Ints, there: Floats, back: Floats) -> Messages:
    """Return `messages_of`: transfers of one round between the same lanes become one message."""
    slot, sender, receiver, num_bytes = _transfers(fetches, tokens, there, back)
    num_lanes = num_slots = 0
    for transfer in range(len(slot)):
        num_lanes = max(num_lanes, max(sender[transfer], receiver[transfer]) + 1)
        num_slots = max(num_slots, slot[transfer] + 1)
    order, _ = sorted_by(receiver, num_lanes)
    order = order[sorted_by(sender[order], num_lanes)[0]]
    order = order[sorted_by(slot[order], num_slots)[0]]
    begins, sums = np.empty(len(order), np.int64), np.empty(len(order))
    count, before = 0, -1
    for transfer in order:
        is_same = before >= 0 and slot[transfer] == slot[before]
        if is_same and sender[transfer] == sender[before] and receiver[transfer] == receiver[before]:
            sums[count - 1] += num_bytes[transfer]
        else:
            begins[count], sums[count] = transfer, num_bytes[transfer]
            count += 1
        before = transfer
    begins = begins[:count]
    division, round_ = slot[begins] // NUM_ROUNDS, slot[begins] % NUM_ROUNDS
    return Messages(division, round_, sender[begins], receiver[begins], sums[:count].copy())


@compiled
def _transfers(fetches: Fetches, tokens: Ints, there: Floats, back: Floats) -> tuple[Ints, Ints, Ints, Floats]:
    """Return (NUM_ROUNDS * division + round, sender, receiver, bytes) of all fetching, then of all giving back."""
    lane, all_kinds, home, source, all_cross, first, last = fetches
    most = 2 * len(lane)
    slot, num_bytes = np.empty(most, np.int64), np.empty(most)
    sender, receiver = np.empty(most, np.int64), np.empty(most, np.int64)
    count = 0
    for is_back in range(2):
        for fetch in range(len(lane)):
            kind, crosses = all_kinds[fetch], all_cross[fetch]
            taken = tokens[home[fetch]] * (back[kind] if is_back else there[kind])
            if not taken > 0.0:
                continue
            if is_back:
                slot[count] = last[fetch] * NUM_ROUNDS + (DELIVER if crosses else COLLECT)
                sender[count], receiver[count] = lane[fetch], source[fetch]
            else:
                slot[count] = first[fetch] * NUM_ROUNDS + (ACROSS if crosses else INSIDE)
                sender[count], receiver[count] = source[fetch], lane[fetch]
            num_bytes[count] = taken
            count += 1
    return slot[:count], sender[:count], receiver[:count], num_bytes[:count]
