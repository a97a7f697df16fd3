"""The division of each tile: as soon as its inputs can be there, with even work per division.

Fetches are put on links one after the other, as in an open shop: a link takes the next thing that its sender can send,
in an order in which much work waits for little. So every tile has a time from which on it can be computed. Divisions
cut that time into parts of equal work; what later ones fetch travels while earlier ones compute. Tiles that fetch
nothing are in the first: it has to wait for its own fetches anyway, and meanwhile later ones fetch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.loops import ascending, pop, sift_down, sorted_by
from dynamic_cp.types import Placement
from dynamic_cp.types.placement import DIVISION, HOLDER, LANE, START, STOP, Lanes

_LAST_SHARE = 0.4
"""Share of the last division, where the others have 1: what it gives back travels while nothing computes."""
_MOST_LOOKS = 64
"""Things that a link looks at, of which it takes the first whose sender is free."""


class LinkRates(NamedTuple):
    """Rates of fetching: bytes of a token of queries and of keys, bandwidths of a lane's links in its node and to other
    nodes, and the latency of a round of transfers."""

    row_bytes: float
    column_bytes: float
    inside_bytes_per_s: float
    across_bytes_per_s: float
    latency_s: float


COMMON = LinkRates(1.0, 1.0, 4.0, 1.0, 0.0)
"""Where nothing is known of the links: those of a node are some times as fast."""


class Schedule(NamedTuple):
    """How tiles come into divisions.

    Attributes:
        shares: [division] of the work that waits for a fetch. The last has less, as nothing hides what it gives back.
        rotates: fetch from neighbours first, as in a ring, queries before keys; False: first what most work waits for.
    """

    shares: tuple[float, ...]
    rotates: bool = False

    @classmethod
    def of(cls, num_divisions: int) -> Schedule:
        """Return a schedule that divides evenly, but for the last division."""
        return cls((*(1.0,) * (num_divisions - 1), _LAST_SHARE))


def divided(placement: Placement, work: Ints, lanes: Lanes, rates: LinkRates, schedule: Schedule) -> Placement:
    """Return `placement` with its tiles in new divisions; `work`: [tile] what it computes, such as touched pairs."""
    tiles = placement.tiles.copy()
    tiles[:, DIVISION] = 0
    if len(schedule.shares) > 1 and len(tiles):
        homes, until = np.ascontiguousarray(placement.homes, np.int64), np.cumsum(schedule.shares)
        tiles[:, DIVISION] = _divisions(
            homes, tiles.astype(np.int64), work.astype(np.float64), lanes, rates, until / until[-1], schedule.rotates
        )
    return Placement(placement.homes, tiles, placement.layer_masks)


class _Fetched(NamedTuple):
    """What lanes fetch, inside a node for each lane, from other nodes (`crosses`) once for all lanes of a node: [thing]
    receiver, kind and home, and the work of all tiles that need it. `of_side`: [queries or keys, tile] -> thing; -1:
    none is fetched."""

    receiver: Ints
    kind: Ints
    home: Ints
    crosses: Ints
    work: Floats
    of_side: Ints


@compiled
def _divisions(
    homes: Ints, tiles: Ints, work: Floats, lanes: Lanes, rates: LinkRates, until: Floats, rotates: bool
) -> Ints:
    """Return the division of each tile; `until`: [division] share of the waiting work up to its end."""
    fetched = _fetched_of(homes, tiles, work, lanes)
    there_s = _arrivals(homes, fetched, lanes, rates, rotates)
    ready_s = np.zeros(len(tiles))
    remote_work = 0.0
    for tile in range(len(tiles)):
        for side in range(2):
            thing = fetched.of_side[side, tile]
            if thing >= 0:
                ready_s[tile] = max(ready_s[tile], there_s[thing])
        if ready_s[tile] > 0.0:
            remote_work += work[tile]
    # A division begins with the first tile after those before have their share.
    division = np.zeros(len(tiles), np.int64)
    now, done, end_s = 0, 0.0, 0.0
    for tile in ascending(ready_s):
        if ready_s[tile] <= 0.0:
            continue
        while now < len(until) - 1 and done >= until[now] * remote_work and ready_s[tile] > end_s:
            now += 1
        division[tile] = now
        done += work[tile]
        end_s = ready_s[tile]
    return division


@compiled
def _fetched_of(homes: Ints, tiles: Ints, work: Floats, lanes: Lanes) -> _Fetched:
    """Return what the lanes of tiles do not hold."""
    side, tile, home, receiver, crosses = _used_elsewhere(homes, tiles, lanes)
    in_order, _ = sorted_by(home, len(homes))
    in_order = in_order[sorted_by(crosses[in_order] * 2 + side[in_order], 4)[0]]
    in_order = in_order[sorted_by(receiver[in_order], lanes.number)[0]]
    of_side = np.full((2, len(tiles)), -1)
    users, work_of = np.empty(len(in_order), np.int64), np.zeros(len(in_order))
    thing, before = -1, -1
    for use in in_order:
        if (
            before < 0
            or home[use] != home[before]
            or receiver[use] != receiver[before]
            or side[use] != side[before]
            or crosses[use] != crosses[before]
        ):
            thing += 1
            users[thing] = use
        of_side[side[use], tile[use]] = thing
        work_of[thing] += work[tile[use]]
        before = use
    users = users[: thing + 1]
    return _Fetched(receiver[users], side[users], home[users], crosses[users], work_of[: thing + 1].copy(), of_side)


@compiled
def _used_elsewhere(homes: Ints, tiles: Ints, lanes: Lanes) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return, for each use of a home held elsewhere, (ROW or COLUMN, tile, home, fetching lane, 1 if from another
    node)."""
    most = 2 * len(tiles)
    sides, users, used = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    receivers, crosses = np.empty(most, np.int64), np.empty(most, np.int64)
    count = 0
    for side in range(2):
        for tile in range(len(tiles)):
            home, lane = tiles[tile, side], tiles[tile, LANE]
            holder = homes[home, HOLDER]
            if holder != lane:
                node = (lanes.first + lane) // lanes.of_node
                sides[count], users[count], used[count] = side, tile, home
                crosses[count] = 1 if (lanes.first + holder) // lanes.of_node != node else 0
                # The lanes of a node fetch together from another node.
                receivers[count] = max(node * lanes.of_node - lanes.first, 0) if crosses[count] else lane
                count += 1
    return sides[:count], users[:count], used[:count], receivers[:count], crosses[:count]


@compiled
def _arrivals(homes: Ints, fetched: _Fetched, lanes: Lanes, rates: LinkRates, rotates: bool) -> Floats:
    """Return when each thing arrives, in seconds after all links began."""
    number = len(fetched.home)
    there_s = np.zeros(number)
    sender = homes[fetched.home, HOLDER]
    num_bytes = np.empty(number)
    for thing in range(number):
        home = fetched.home[thing]
        token_bytes = rates.column_bytes if fetched.kind[thing] else rates.row_bytes
        num_bytes[thing] = token_bytes * (homes[home, STOP] - homes[home, START])
    order = _in_turn(fetched, sender, num_bytes, lanes) if rotates else ascending(-fetched.work / num_bytes)
    for crosses in range(2):
        own = order[fetched.crosses[order] == crosses]
        bytes_per_s = rates.across_bytes_per_s if crosses else rates.inside_bytes_per_s
        # What comes from another node is handed on there: two rounds more.
        latency_s = 3.0 * rates.latency_s if crosses else rates.latency_s
        queue_of = np.empty(lanes.number, np.int64)
        for lane in range(lanes.number):
            node = (lanes.first + lane) // lanes.of_node
            queue_of[lane] = max(node * lanes.of_node - lanes.first, 0) if crosses else lane
        ends_s = _through_links(queue_of, fetched.receiver[own], sender[own], num_bytes[own] / bytes_per_s)
        for place in range(len(own)):
            there_s[own[place]] = ends_s[place] + latency_s
    return there_s


@compiled
def _in_turn(fetched: _Fetched, sender: Ints, num_bytes: Floats, lanes: Lanes) -> Ints:
    """Return things in a ring's order: queries first, then by distance of the sending node, then of the lane."""
    num_nodes = (lanes.first + lanes.number - 1) // lanes.of_node + 1
    order = ascending(-num_bytes)
    nodes = (fetched.receiver + lanes.first) // lanes.of_node, (sender + lanes.first) // lanes.of_node
    order = order[sorted_by((fetched.receiver - sender)[order] % lanes.of_node, lanes.of_node)[0]]
    order = order[sorted_by((nodes[0] - nodes[1])[order] % num_nodes, num_nodes)[0]]
    return order[sorted_by(fetched.kind[order], 2)[0]]


@compiled
def _through_links(queue_of: Ints, queue: Ints, sender: Ints, needs_s: Floats) -> Floats:
    """Return when each thing came through the link of a lane. `queue_of`: [lane] -> queue from which its link takes;
    the others: [thing] its queue, the lane that sends it, and for how long."""
    number, num_lanes = len(queue), len(queue_of)
    head, following = _chained(queue, num_lanes)
    receives_s, sends_s, ends_s = np.zeros(num_lanes), np.zeros(num_lanes), np.zeros(number)
    waiting = np.arange(num_lanes)
    num_waiting = num_lanes
    while num_waiting:
        lane = waiting[0]
        first = head[queue_of[lane]]
        if first < 0:
            pop(receives_s, waiting, num_waiting)
            num_waiting -= 1
            continue
        now_s = receives_s[lane]
        chosen, behind, begins_s = first, -1, np.inf
        before, thing = -1, first
        for _ in range(_MOST_LOOKS):
            free_s = max(now_s, sends_s[sender[thing]])
            if free_s < begins_s:
                chosen, behind, begins_s = thing, before, free_s
            if begins_s <= now_s or following[thing] < 0:
                break
            before, thing = thing, following[thing]
        if behind < 0:
            head[queue_of[lane]] = following[chosen]
        else:
            following[behind] = following[chosen]
        ends_s[chosen] = receives_s[lane] = sends_s[sender[chosen]] = begins_s + needs_s[chosen]
        sift_down(receives_s, waiting, num_waiting)
    return ends_s


@compiled
def _chained(queue: Ints, num_queues: int) -> tuple[Ints, Ints]:
    """Return ([queue] its first thing, [thing] the one behind it in its queue); -1: none."""
    head, tail, following = np.full(num_queues, -1), np.full(num_queues, -1), np.full(len(queue), -1)
    for thing in range(len(queue)):
        if head[queue[thing]] < 0:
            head[queue[thing]] = thing
        else:
            following[tail[queue[thing]]] = thing
        tail[queue[thing]] = thing
    return head, following
