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
from dynamic_cp.types import Placement

ROW, COLUMN = 0, 1
"""What of a home is fetched: queries with all that belongs to them, or keys and values."""
ACROSS, INSIDE, COLLECT, DELIVER = range(4)
"""The rounds of a division, in their order."""


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


def fetches_of(placement: Placement, first_lane: int, node_lanes: int) -> Fetches:
    """Return what every lane of a placement fetches.

    Args:
        first_lane: of the bucket; decides where nodes begin.
        node_lanes: lanes of a node.
    """
    homes, tiles = placement.homes.astype(np.int64), placement.tiles.astype(np.int64)
    lane, division = tiles[:, 2], tiles[:, 3]
    used = np.concatenate([(lane * 2 + kind) * len(homes) + tiles[:, kind] for kind in (ROW, COLUMN)])
    remote = np.concatenate([homes[tiles[:, kind], 3] != lane for kind in (ROW, COLUMN)])
    return fetches_used(homes[:, 3], used[remote], np.concatenate([division, division])[remote], first_lane, node_lanes)


def fetches_used(holder: Ints, used: Ints, divisions: Ints, first_lane: int, node_lanes: int) -> Fetches:
    """Return what every lane fetches, from what it uses and does not hold.

    Args:
        holder: [home] the lane that holds it.
        used: (lane * 2 + kind) * number of homes + home, for all that is used, also several times; divisions: in which.
        first_lane, node_lanes: as in `fetches_of`.
    """
    num_homes = len(holder)
    keys, first, last = _grouped(used, divisions)
    user, home = keys // num_homes // 2, keys % num_homes
    kind = keys // num_homes % 2
    node, holder_node = (first_lane + user) // node_lanes, (first_lane + holder[home]) // node_lanes
    source, crosses = holder[home].copy(), node != holder_node
    if crosses.any():
        of_node = (node * 2 + kind) * num_homes + home
        # The relay is who needs it first; among equals another one for each home, so that they share the work.
        order = np.lexsort(((user + home) % node_lanes, first, of_node))
        order = order[crosses[order]]
        begins = np.flatnonzero(np.diff(of_node[order], prepend=-1))
        relay = np.repeat(order[begins], np.diff(begins, append=len(order)))
        source[order] = np.where(order == relay, source[order], user[relay])
        crosses[order] = order == relay
        np.maximum.at(last, relay, last[order])
    return Fetches(user, kind, home, source, crosses.astype(np.int64), first, last)


def _grouped(keys: Ints, divisions: Ints) -> tuple[Ints, Ints, Ints]:
    """Return different `keys`, ascending, with the least and the largest division of each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    if not len(begins):
        return ordered, ordered, ordered
    of_key = divisions[order]
    return ordered[begins], np.minimum.reduceat(of_key, begins), np.maximum.reduceat(of_key, begins)


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
    division = np.zeros(len(tiles), np.int64)
    if num_divisions == 1:
        return division
    num_homes = len(holder)
    used = np.concatenate([(tiles[:, 2] * 2 + kind) * num_homes + tiles[:, kind] for kind in (ROW, COLUMN)])
    remote = np.concatenate([holder[tiles[:, kind]] != tiles[:, 2] for kind in (ROW, COLUMN)])
    keys = np.unique(used[remote])
    lane, kind, home = keys // num_homes // 2, keys // num_homes % 2, keys % num_homes
    num_bytes = tokens[home] * bytes_per_token[kind]
    crosses = lane // node_lanes != holder[home] // node_lanes
    order = np.lexsort((keys, -num_bytes, ~crosses))
    chosen = _least_busy(lane[order], holder[home[order]], num_bytes[order], crosses[order], num_divisions, num_lanes)
    of_fetch = np.empty(len(keys), np.int64)
    of_fetch[order] = chosen
    place = np.minimum(np.searchsorted(keys, used), max(len(keys) - 1, 0))
    needed = np.where(remote, of_fetch[place] if len(keys) else 0, 0)
    return np.maximum(needed[: len(tiles)], needed[len(tiles) :])


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
    fetch_round = np.where(fetches.crosses, ACROSS, INSIDE)
    back_round = np.where(fetches.crosses, DELIVER, COLLECT)
    of_home = tokens[fetches.home]
    division = np.concatenate([fetches.first, fetches.last])
    when = np.concatenate([fetch_round, back_round])
    sender = np.concatenate([fetches.source, fetches.lane])
    receiver = np.concatenate([fetches.lane, fetches.source])
    num_bytes = np.concatenate([of_home * there[fetches.kind], of_home * back[fetches.kind]])
    num_lanes = int(max(sender.max(initial=0), receiver.max(initial=0))) + 1
    key = ((division * 4 + when) * num_lanes + sender) * num_lanes + receiver
    order = np.argsort(key, kind="stable")
    order = order[num_bytes[order] > 0]
    begins = np.flatnonzero(np.diff(key[order], prepend=-1))
    if not len(begins):
        none = np.zeros(0, np.int64)
        return Messages(none, none, none, none, np.zeros(0))
    one = order[begins]
    sums = np.add.reduceat(num_bytes[order], begins)
    return Messages(division[one], when[one], sender[one], receiver[one], sums)
