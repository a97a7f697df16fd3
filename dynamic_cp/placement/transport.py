"""What the lanes of a placement fetch and give back, over which link, and in which division.

A lane fetches the queries (a row) or the keys and values (a column) of a home that its tiles use and that another lane
holds. Transport has two phases: what several lanes of a node use crosses to that node once, to one of them, the
*relay*, which hands it to the others. On the way back the relay adds up what its node computed, and one sum crosses.
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
from dynamic_cp.placement.order import ascending, sorted_by
from dynamic_cp.types import Placement

ROW, COLUMN = 0, 1
"""What of a home is fetched: queries with all that belongs to them, or keys and values."""
ACROSS, INSIDE, COLLECT, DELIVER = range(4)
"""The rounds of a division, in their order."""
NUM_ROUNDS = 4


class Fetches(NamedTuple):
    """All that lanes use and do not hold, one entry for each lane, kind and home, in this order.

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


def fetches_of(placement: Placement, first_lane: int, node_lanes: int, order: Ints | None = None) -> Fetches:
    """Return what every lane of a placement fetches.

    Args:
        first_lane: of the bucket; decides where nodes begin.
        node_lanes: lanes of a node.
        order: [home] a number by which the lanes of a node take turns as relays; None: 0, 1, 2, ...
    """
    homes = np.ascontiguousarray(placement.homes, np.int64)
    tiles = np.ascontiguousarray(placement.tiles, np.int64)
    in_order = np.arange(len(homes)) if order is None else order
    return fetches_used(homes[:, 3], *_used(homes, tiles), first_lane, node_lanes, in_order)


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


def fetches_used(holder: Ints, used: Ints, divisions: Ints, first_lane: int, node_lanes: int, order: Ints) -> Fetches:
    """Return what every lane fetches, from what it uses and does not hold.

    Args:
        holder: [home] the lane that holds it.
        used: (lane * 2 + kind) * number of homes + home, for all that is used, also several times; divisions: in which.
        first_lane, node_lanes, order: as in `fetches_of`.
    """
    return Fetches(*_fetches(np.ascontiguousarray(holder), used, divisions, first_lane, node_lanes, order))


@compiled
def _fetches(
    holder: Ints, used: Ints, divisions: Ints, first_lane: int, node_lanes: int, order: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Return the columns of `fetches_used`."""
    num_homes = len(holder)
    num_lanes = 0
    for index in range(len(used)):
        num_lanes = max(num_lanes, used[index] // num_homes // 2 + 1)
    by_home, _ = sorted_by(used % num_homes, num_homes)
    by_user, _ = sorted_by(used[by_home] // num_homes, 2 * num_lanes)
    columns = np.empty((7, len(used)), np.int64)
    user, kind, home, source, crosses, first, last = columns
    # The relay is who needs it first; among equals another one for each home, so that they share the work.
    relays = np.full(((first_lane + num_lanes) // node_lanes + 1, 2 * num_homes), -1)
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
        crosses[count] = (first_lane + user[count]) // node_lanes != (first_lane + source[count]) // node_lanes
        count += 1
    for fetch in range(count):
        if crosses[fetch]:
            node, thing = (first_lane + user[fetch]) // node_lanes, kind[fetch] * num_homes + home[fetch]
            best = relays[node, thing]
            turn = order[home[fetch]]
            if best < 0 or (first[fetch], (user[fetch] + turn) % node_lanes) < (
                first[best], (user[best] + turn) % node_lanes
            ):  # fmt: skip
                relays[node, thing] = fetch
    for fetch in range(count):
        if crosses[fetch]:
            relay = relays[(first_lane + user[fetch]) // node_lanes, kind[fetch] * num_homes + home[fetch]]
            if relay != fetch:
                source[fetch], crosses[fetch] = user[relay], 0
                last[relay] = max(last[relay], last[fetch])
    return (
        user[:count].copy(), kind[:count].copy(), home[:count].copy(), source[:count].copy(), crosses[:count].copy(),
        first[:count].copy(), last[:count].copy(),
    )  # fmt: skip


def divide(
    holder: Ints,
    tokens: Ints,
    tiles: Ints,
    bytes_per_token: Floats,
    num_divisions: int,
    num_lanes: int,
    node_lanes: int,
) -> Ints:
    """Return the division of each tile: division 0 fetches nothing, the others little from and to any one lane.

    Each fetch goes to the division in which its sender and its receiver have least to do, the largest first, as in an
    open shop: so that no lane waits for one that serves many at once. A tile is in the division in which all that it
    needs is there. With one division everything is in it.

    Args:
        holder, tokens: [home] the lane that holds it, and its tokens.
        tiles: [tile, (home of the queries, home of the keys, lane, ...)].
        bytes_per_token: of a fetched (row, column).
        num_lanes: of the bucket, whose first lane begins a node; node_lanes: of a node.
    """
    if num_divisions == 1:
        return np.zeros(len(tiles), np.int64)
    contiguous = np.ascontiguousarray(holder), np.ascontiguousarray(tokens), np.ascontiguousarray(tiles)
    return _divisions(*contiguous, bytes_per_token, num_divisions, num_lanes, node_lanes)


@compiled
def _divisions(
    holder: Ints, tokens: Ints, tiles: Ints, bytes_per_token: Floats, num_divisions: int, num_lanes: int,
    node_lanes: int,
) -> Ints:  # fmt: skip
    """Return what `divide` does, for two divisions or more."""
    num_homes, num_tiles = len(holder), len(tiles)
    group, home = np.empty(2 * num_tiles, np.int64), np.empty(2 * num_tiles, np.int64)
    of_tile = np.empty(2 * num_tiles, np.int64)
    count = 0
    for kind in range(2):
        for tile in range(num_tiles):
            if holder[tiles[tile, kind]] != tiles[tile, 2]:
                group[count], home[count] = tiles[tile, 2] * 2 + kind, tiles[tile, kind]
                of_tile[count] = tile
                count += 1
    in_order, _ = sorted_by(home[:count], num_homes)
    in_order = in_order[sorted_by(group[in_order], 2 * num_lanes)[0]]
    # Who fetches which home is counted once, in however many tiles.
    fetch_of = np.empty(count, np.int64)
    receivers, senders = np.empty(count, np.int64), np.empty(count, np.int64)
    num_bytes, crosses = np.empty(count), np.empty(count, np.int64)
    num_fetches, before = 0, -1
    for entry in in_order:
        if before < 0 or group[entry] != group[before] or home[entry] != home[before]:
            receivers[num_fetches], senders[num_fetches] = group[entry] // 2, holder[home[entry]]
            num_bytes[num_fetches] = tokens[home[entry]] * bytes_per_token[group[entry] % 2]
            is_inside = receivers[num_fetches] // node_lanes == senders[num_fetches] // node_lanes
            crosses[num_fetches] = 0 if is_inside else 1
            num_fetches += 1
        fetch_of[entry] = num_fetches - 1
        before = entry
    order = ascending(-num_bytes[:num_fetches])
    order = order[sorted_by(1 - crosses[order], 2)[0]]
    chosen = _least_busy(receivers[order], senders[order], num_bytes[order], crosses[order], num_divisions, num_lanes)
    of_fetch = np.empty(num_fetches, np.int64)
    for place in range(num_fetches):
        of_fetch[order[place]] = chosen[place]
    division = np.zeros(num_tiles, np.int64)
    for entry in range(count):
        tile = of_tile[entry]
        division[tile] = max(division[tile], of_fetch[fetch_of[entry]])
    return division


@compiled
def _least_busy(
    receivers: Ints, senders: Ints, num_bytes: Floats, crosses: Ints, num_divisions: int, num_lanes: int
) -> Ints:
    """Return the division, from 1 on, of each fetch in turn; links inside a node and to other nodes count apart."""
    sent = np.zeros((2, num_lanes, num_divisions))
    received = np.zeros((2, num_lanes, num_divisions))
    chosen = np.empty(len(receivers), np.int64)
    for fetch in range(len(receivers)):
        link = 1 if crosses[fetch] else 0
        sender, receiver = senders[fetch], receivers[fetch]
        best, least, least_sum = 1, np.inf, np.inf
        for division in range(1, num_divisions):
            there, here = sent[link, sender, division], received[link, receiver, division]
            most = max(there, here)
            if most < least or (most == least and there + here < least_sum):
                best, least, least_sum = division, most, there + here
        chosen[fetch] = best
        sent[link, sender, best] += num_bytes[fetch]
        received[link, receiver, best] += num_bytes[fetch]
    return chosen


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
