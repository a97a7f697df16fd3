"""Relays: what crosses comes once to a node, from it to all who use it, and each lane of the node fetches its share."""

from collections import Counter, defaultdict
from itertools import chain

import numpy as np
import pytest

from dynamic_cp.placement.programme import programmes_of
from dynamic_cp.placement.transport import ACROSS, INSIDE, fetches_of, messages_of
from dynamic_cp.types import Placement
from dynamic_cp.types.placement import COLUMN, ROW, Lanes
from tests.placements import random_lanes, random_placement, random_samples

SEEDS = range(120)

Thing = tuple[int, int, int]
"""A node, a kind, and a home of another node that lanes of it use."""


def drawn(seed: int) -> tuple[Placement, Lanes, np.ndarray]:
    """Return a placement, its lanes, and a number for each home by which relays take turns."""
    random = np.random.default_rng(seed)
    samples, lanes = random_samples(random), random_lanes(random)
    placement = random_placement(random, samples, lanes.number, int(random.integers(1, 5)))
    placement.tiles[:, 2] -= placement.tiles[:, 2] % int(random.integers(1, 4))  # some lanes compute nothing
    return placement, lanes, random.integers(0, 20, len(placement.homes))


def uses_of(placement: Placement) -> dict[tuple[int, int, int], list[int]]:
    """Return (lane, kind, home) -> divisions of the tiles that need it, of all that a lane does not hold."""
    uses = defaultdict(list)
    for row, column, lane, division in placement.tiles.tolist():
        for kind, home in ((ROW, row), (COLUMN, column)):
            if placement.homes[home, 3] != lane:
                uses[lane, kind, home].append(division)
    return uses


def crossing(placement: Placement, lanes: Lanes) -> dict[Thing, dict[int, list[int]]]:
    """Return what each node needs of other nodes: who uses it, and in which divisions."""
    found: dict[Thing, dict[int, list[int]]] = defaultdict(dict)
    for (lane, kind, home), divisions in uses_of(placement).items():
        if node_of(lane, lanes) != node_of(placement.homes[home, 3], lanes):
            found[node_of(lane, lanes), kind, home][lane] = divisions
    return found


def node_of(lane: int, lanes: Lanes) -> int:
    return int(lanes.first + lane) // lanes.of_node


def relays_of(placement: Placement, lanes: Lanes, order: np.ndarray | None = None) -> dict[Thing, int]:
    """Return which lane fetches what of other nodes."""
    fetches = fetches_of(placement, lanes, order)
    return {
        (node_of(lane, lanes), kind, home): lane
        for lane, kind, home, _, crosses, *_ in zip(*(column.tolist() for column in fetches), strict=True)
        if crosses
    }


def tokens_of(placement: Placement) -> list[int]:
    return np.diff(placement.homes[:, 1:3])[:, 0].tolist()


@pytest.mark.parametrize("takes_turns", [False, True])
def test_what_crosses_comes_once_to_a_node_and_from_its_relay_to_all_others(takes_turns: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        placement, lanes, order = drawn(seed)
        fetches = fetches_of(placement, lanes, order if takes_turns else None)
        entries = [*zip(*(column.tolist() for column in fetches), strict=True)]
        found = {entry[:3]: entry[3:] for entry in entries}
        assert [entry[:3] for entry in entries] == sorted(found), "in order, and nothing twice"
        uses, needed = uses_of(placement), crossing(placement, lanes)
        assert uses.keys() <= found.keys()
        relays = relays_of(placement, lanes, order if takes_turns else None)
        assert relays.keys() == needed.keys()
        assert int(fetches.crosses.sum()) == len(needed), "once for each node"
        for (lane, kind, home), (source, crosses, first, last) in found.items():
            assert 0 <= lane < lanes.number
            thing, holder = (node_of(lane, lanes), kind, home), placement.homes[home, 3]
            divisions = uses.get((lane, kind, home), [])
            if thing not in needed:
                assert (source, crosses) == (holder, 0)
                seen["inside"] += 1
            elif lane == relays[thing]:
                assert (source, crosses) == (holder, 1)
                seen["from the relay"] += len(needed[thing].keys() - {lane})
                seen["wider than its own use"] += bool(divisions) and (first, last) != (min(divisions), max(divisions))
                seen["relay that uses nothing"] += not divisions
                divisions = [*chain(*needed[thing].values())]
            else:
                assert (source, crosses) == (relays[thing], 0)
            assert (first, last) == (min(divisions), max(divisions)), "of its own tiles, or of those of its node"
        num_nodes = node_of(lanes.number - 1, lanes) - node_of(0, lanes) + 1
        seen["begins inside a node"] += bool(needed and lanes.first % lanes.of_node)
        seen["ends inside a node"] += bool(needed and (lanes.first + lanes.number) % lanes.of_node)
        seen["one lane per node"] += bool(needed and lanes.of_node == 1)
        seen["one node"] += num_nodes == 1
    assert (seen["relay that uses nothing"] > 0) == (not takes_turns), "lanes in turn are users"
    for what in ("inside", "from the relay", "wider than its own use"):
        assert seen[what] > 40, what
    for what in ("begins inside a node", "ends inside a node", "one lane per node", "one node"):
        assert seen[what] > 8, what


def test_relays_are_those_of_the_rule() -> None:
    """In plain words: largest first, each to the lane with least, of equals the one with least in all."""
    num_relays = 0
    for seed in SEEDS:
        placement, lanes, _ = drawn(seed)
        needed, tokens = crossing(placement, lanes), tokens_of(placement)
        begins = {thing: min(chain(*users.values())) for thing, users in needed.items()}
        fetched: Counter[tuple[int, int, int]] = Counter()
        in_all: Counter[int] = Counter()
        expected = {}
        for thing in sorted(needed, key=lambda thing: (begins[thing], -tokens[thing[2]], thing)):
            node, kind, home = thing
            best = min(
                (10 * fetched[begins[thing], kind, lane] + (0 if lane in needed[thing] else 3 * tokens[home]),
                 sum(fetched[begins[thing], one, lane] for one in (ROW, COLUMN)), in_all[lane], lane)
                for lane in range(lanes.number) if node_of(lane, lanes) == node
            )  # fmt: skip
            expected[thing] = best[-1]
            fetched[begins[thing], kind, best[-1]] += tokens[home]
            in_all[best[-1]] += tokens[home]
        assert relays_of(placement, lanes) == expected
        num_relays += len(expected)
    assert num_relays > 1000


def uneven(sizes: list[int], users: list[list[int]]) -> Placement:
    """Return a placement where lane 0 holds homes of these sizes, and users of each hold one token behind them."""
    ends = np.cumsum(sizes).tolist()
    homes = [(0, end - size, end, 0) for size, end in zip(sizes, ends, strict=True)]
    holders = sorted({*chain(*users)})
    homes += [(0, ends[-1] + place, ends[-1] + place + 1, lane) for place, lane in enumerate(holders)]
    tiles = [
        (len(sizes) + holders.index(lane), column, lane, 0)
        for column, of_column in enumerate(users)
        for lane in of_column
    ]
    return Placement(np.array(homes, np.int32), np.array(tiles, np.int32))


def across(placement: Placement, lanes: Lanes, order: np.ndarray | None = None) -> list[int]:
    """Return the tokens that each lane fetches from other nodes, and what messages say of them."""
    fetches = fetches_of(placement, lanes, order)
    tokens = np.array(tokens_of(placement))
    messages = messages_of(fetches, tokens, np.ones(2), np.ones(2))
    chosen = messages.round == ACROSS
    received = np.bincount(messages.receiver[chosen], messages.num_bytes[chosen], lanes.number).astype(int)
    own = fetches.crosses == 1
    assert received.tolist() == np.bincount(fetches.lane[own], tokens[fetches.home[own]], lanes.number).tolist()
    return received.tolist()


def test_a_lane_that_only_hands_on_has_room_for_it_and_computes_nothing() -> None:
    lanes = Lanes(4, 0, 2)
    placement = uneven([10, 10], [[2], [2]])
    user, relay = programmes_of(placement, (), lanes)[2:]
    assert (user.buffer_tokens, relay.buffer_tokens) == ((0, 20), (0, 10))
    assert [len(tiles) for tiles in relay.tiles] == [0]
    (fetched,) = (one for one in relay.held if one.kind == COLUMN)
    assert fetched.sample == -1, "it knows no sample of it"
    (inside,) = (one for one in relay.exchanges if one.round == INSIDE)
    assert [lane for lane, _ in inside.sends] == [2]
    assert not inside.receives


def test_uneven_need_is_evened_out() -> None:
    """One lane of each of two nodes computes all tiles, and would fetch all; homes are few, of any size."""
    lanes = Lanes(8, 0, 4)
    by_load = in_turn = 0
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        placement = random_placement(random, random_samples(random), lanes.number, 1)
        placement.tiles[:, 2] &= 4
        by_load += max(across(placement, lanes))
        in_turn += max(across(placement, lanes, np.arange(len(placement.homes))))
    assert in_turn / 4 < by_load < 0.6 * in_turn
