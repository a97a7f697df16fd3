"""What the lanes of a placement fetch and give back, over which link, and in which division.

A lane fetches the queries (a row) or the keys and values (a column) of a home that its tiles use and that another lane
holds. Transport has two phases: what lanes of a node use of another node crosses once, to one lane of the node, the
*relay*, which hands it to all that use it, whether it is one of them or not. On the way back the relay adds up what its
node computed, and one sum crosses.
Without this, placed attention loses to a ring where documents are long (with a prototype, the best modelled total fell
by a factor of 1.1 to 2.0 on causal data).

A programme has rounds of transfers, four in each division: `ACROSS` (fetch from other nodes), `INSIDE` (fetch from
lanes of the node, relays among them), `COLLECT` (give back inside the node) and `DELIVER` (give back to other nodes).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.lanes import Lanes
from dynamic_cp.placement.order import sorted_by
from dynamic_cp.placement.relays import crossing_groups, relays_by_load, relays_by_order
from dynamic_cp.types import Placement

ROW, COLUMN = 0, 1
"""What of a home is fetched: queries with all that belongs to them, or keys and values."""
ACROSS, INSIDE, COLLECT, DELIVER = range(4)
"""The rounds of a division, in their order."""
NUM_ROUNDS = 4


class Fetches(NamedTuple):
    """All that lanes use and do not hold, or hand on, one entry for each lane, kind and home, in this order.

    Attributes:
        lane, kind, home: who fetches what.
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
    """Return what every lane of a placement fetches.

    Args:
        lanes: of the placement.
        order: [home] a number by which the lanes that use it take turns as relays; None: who has least to fetch is one.
    """
    homes = np.ascontiguousarray(placement.homes, np.int64)
    tiles = np.ascontiguousarray(placement.tiles, np.int64)
    return fetches_used(homes[:, 3], homes[:, 2] - homes[:, 1], *_used(homes, tiles), lanes, order)


@compiled
def _used(homes: Ints, tiles: Ints) -> tuple[Ints, Ints]:
    """Return what tiles use that their lane does not hold, as `fetches_used` takes it, and in which division."""
    used, divisions = np.empty(2 * len(tiles), np.int64), np.empty(2 * len(tiles), np.int64)
    count = 0
    for kind in range(2):
        for tile in range(len(tiles)):
            home, lane = tiles[tile, kind], tiles[tile, 2]
            if homes[home, 3] != lane:
                used[count] = (lane * 2 + kind) * len(homes) + home
                divisions[count] = tiles[tile, 3]
                count += 1
    return used[:count].copy(), divisions[:count].copy()


def fetches_used(
    holder: Ints, tokens: Ints, used: Ints, divisions: Ints, lanes: Lanes, order: Ints | None = None
) -> Fetches:
    """Return what every lane fetches, from what it uses and does not hold.

    Args:
        holder, tokens: [home] the lane that holds it, and how many tokens it has.
        used: (lane * 2 + kind) * number of homes + home, for all that is used, also several times; divisions: in which.
        lanes, order: as in `fetches_of`.
    """
    order = np.zeros(0, np.int64) if order is None else order
    return Fetches(*_fetches(np.ascontiguousarray(holder), tokens, used, divisions, lanes, order))


@compiled
def _fetches(
    holder: Ints, tokens: Ints, used: Ints, divisions: Ints, lanes: Lanes, order: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Return the columns of `fetches_used`; no `order`: relays by load."""
    num_homes = len(holder)
    by_home, _ = sorted_by(used % num_homes, num_homes)
    by_user, _ = sorted_by(used[by_home] // num_homes, 2 * lanes.number)
    columns = np.empty((7, len(used)), np.int64)
    user, kind, home, source, crosses, first, last = columns
    count = 0
    for place in by_user:
        key, division = used[by_home[place]], divisions[by_home[place]]
        if (
            count
            and user[count - 1] == key // num_homes // 2
            and (kind[count - 1] == key // num_homes % 2 and home[count - 1] == key % num_homes)
        ):
            first[count - 1] = min(first[count - 1], division)
            last[count - 1] = max(last[count - 1], division)
            continue
        user[count], kind[count], home[count] = key // num_homes // 2, key // num_homes % 2, key % num_homes
        source[count], first[count], last[count] = holder[home[count]], division, division
        there = (lanes.first + source[count]) // lanes.of_node
        crosses[count] = (lanes.first + user[count]) // lanes.of_node != there
        count += 1
    group, firsts = crossing_groups(user[:count], kind[:count] * num_homes + home[:count], crosses[:count], lanes)
    if len(order):
        order_of = order[home[:count]]
        relays = relays_by_order(user[:count], first[:count], order_of, group, len(firsts), lanes.of_node)
    else:
        needed = tokens[home[:count]]
        relays = relays_by_load(user[:count], kind[:count], first[:count], needed, group, firsts, lanes)
    # One entry of each group is that of its relay, whose divisions are those of all.
    of_relay = np.full(len(firsts), -1)
    for fetch in range(count):
        if group[fetch] >= 0 and user[fetch] == relays[group[fetch]]:
            of_relay[group[fetch]] = fetch
    found = np.empty((7, count + len(firsts)), np.int64)
    found[:, :count] = columns[:, :count]
    num_found = count
    for one in range(len(firsts)):
        if of_relay[one] < 0:
            found[:, num_found] = columns[:, firsts[one]]
            found[0, num_found] = relays[one]
            of_relay[one] = num_found
            num_found += 1
    for fetch in range(count):
        if group[fetch] >= 0:
            relay = of_relay[group[fetch]]
            found[5, relay] = min(found[5, relay], first[fetch])
            found[6, relay] = max(found[6, relay], last[fetch])
            if fetch != relay:
                found[3, fetch], found[4, fetch] = found[0, relay], 0
    in_order, _ = sorted_by(found[2, :num_found], num_homes)
    in_order = in_order[sorted_by(found[0, in_order] * 2 + found[1, in_order], 2 * lanes.number)[0]]
    found = found[:, in_order]
    return (
        found[0].copy(), found[1].copy(), found[2].copy(), found[3].copy(), found[4].copy(), found[5].copy(),
        found[6].copy(),
    )  # fmt: skip


class Messages(NamedTuple):
    """Bytes of all transfers between two lanes in one round, in the order of rounds, senders and receivers.

    Attributes:
        division, round: when; round is one of ACROSS .. DELIVER.
        sender, receiver: lanes of the bucket.
        num_bytes: of one direction of one layer.
    """

    division: Ints
    round: Ints
    sender: Ints
    receiver: Ints
    num_bytes: Floats


def messages_of(fetches: Fetches, tokens: Ints, there: Floats, back: Floats) -> Messages:
    """Return the transfers of `fetches`.

    Args:
        tokens: of each home.
        there, back: bytes per token of a fetched (row, column), and of what is given back for one.
    """
    return Messages(*_messages(fetches, tokens, there, back))


@compiled
def _messages(fetches: Fetches, tokens: Ints, there: Floats, back: Floats) -> tuple[Ints, Ints, Ints, Ints, Floats]:
    """Return the columns of `messages_of`."""
    num_fetches, num_lanes, num_divisions = len(fetches.lane), 0, 0
    for fetch in range(num_fetches):
        num_lanes = max(num_lanes, max(fetches.lane[fetch], fetches.source[fetch]) + 1)
        num_divisions = max(num_divisions, fetches.last[fetch] + 1)
    # First all that is fetched, then all that is given back.
    slot, sender = np.empty(2 * num_fetches, np.int64), np.empty(2 * num_fetches, np.int64)
    receiver, num_bytes = np.empty(2 * num_fetches, np.int64), np.empty(2 * num_fetches)
    count = 0
    for is_back in range(2):
        for fetch in range(num_fetches):
            kind, crosses = fetches.kind[fetch], fetches.crosses[fetch]
            taken = tokens[fetches.home[fetch]] * (back[kind] if is_back else there[kind])
            if not taken > 0.0:
                continue
            if is_back:
                slot[count] = fetches.last[fetch] * NUM_ROUNDS + (DELIVER if crosses else COLLECT)
                sender[count], receiver[count] = fetches.lane[fetch], fetches.source[fetch]
            else:
                slot[count] = fetches.first[fetch] * NUM_ROUNDS + (ACROSS if crosses else INSIDE)
                sender[count], receiver[count] = fetches.source[fetch], fetches.lane[fetch]
            num_bytes[count] = taken
            count += 1
    order, _ = sorted_by(receiver[:count], num_lanes)
    order = order[sorted_by(sender[order], num_lanes)[0]]
    order = order[sorted_by(slot[order], NUM_ROUNDS * num_divisions)[0]]
    found = np.empty((4, count), np.int64)
    sums = np.empty(count)
    last = -1
    for entry in order:
        if (
            last >= 0
            and slot[entry] == NUM_ROUNDS * found[0, last] + found[1, last]
            and (sender[entry] == found[2, last] and receiver[entry] == found[3, last])
        ):
            sums[last] += num_bytes[entry]
            continue
        last += 1
        found[0, last], found[1, last] = slot[entry] // NUM_ROUNDS, slot[entry] % NUM_ROUNDS
        found[2, last], found[3, last], sums[last] = sender[entry], receiver[entry], num_bytes[entry]
    last += 1
    return (
        found[0, :last].copy(),
        found[1, :last].copy(),
        found[2, :last].copy(),
        found[3, :last].copy(),
        sums[:last].copy(),
    )
