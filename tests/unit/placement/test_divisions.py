"""Divisions: tiles come as soon as what they need can be there, each has its share of work, and rings stay rings."""

from collections import Counter
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from dynamic_cp.placement.divisions import COMMON, LinkRates, Schedule, divided
from dynamic_cp.placement.transport import ACROSS, INSIDE, fetches_of, messages_of
from dynamic_cp.types import CAUSAL, Lambda, Placement
from dynamic_cp.types.placement import Lanes
from tests.placements import random_lanes, random_placement, random_samples

SEEDS = range(120)
CONTENT = LinkRates(1.0, 1.0, 1.0, 1.0, 0.0)
"""A token takes a second on every link."""


class Drawn(NamedTuple):
    """What is divided, and how."""

    placement: Placement
    work: np.ndarray
    lanes: Lanes
    rates: LinkRates
    schedule: Schedule

    def divided(self) -> Placement:
        return divided(*self)


def drawn(seed: int) -> Drawn:
    random = np.random.default_rng(seed)
    samples, lanes = random_samples(random), random_lanes(random)
    placement = random_placement(random, samples, lanes.number, 5, CAUSAL, Lambda(1, 4))
    shares = random.integers(1, 5, random.integers(1, 6)).astype(float).tolist()
    if len(shares) > 1 and seed % 3 == 0:
        shares[0] = 0.0
    rates = LinkRates(*random.choice([1.0, 2.0, 4.0], 4).tolist(), float(random.choice([0.0, 0.5, 8.0])))
    schedule = Schedule(tuple(shares), rotates=bool(seed % 2))
    return Drawn(placement, random.integers(1, 50, len(placement.tiles)), lanes, rates, schedule)


def needs_of(placement: Placement) -> list[set[tuple[int, int]]]:
    """Return [tile] -> (kind, home) of what its lane does not hold."""
    return [
        {(kind, home) for kind, home in enumerate((row, column)) if placement.homes[home, 3] != lane}
        for row, column, lane, _ in placement.tiles.tolist()
    ]


def test_tiles_stay_where_they_are_and_those_that_need_nothing_come_first() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        one = drawn(seed)
        found = one.divided()
        assert found.homes is one.placement.homes
        assert found.layer_masks == one.placement.layer_masks
        assert len(found.layer_masks) == 2
        assert np.array_equal(found.tiles[:, :3], one.placement.tiles[:, :3])
        assert found.tiles.dtype == np.int32
        division = found.tiles[:, 3]
        assert 0 <= division.min() <= division.max() < len(one.schedule.shares)
        needs = np.array([*map(len, needs_of(found))])
        assert not division[needs == 0].any()
        if one.schedule.shares[0] == 0.0:
            assert division[needs > 0].all(), "only what needs nothing"
            seen["left to what needs nothing"] += bool((needs > 0).any())
        seen["needs nothing"] += int((needs == 0).sum())
        seen["later"] += int((division > 0).sum())
        seen["all divisions"] += len(set(division.tolist())) == len(one.schedule.shares) > 1
    for what in ("left to what needs nothing", "needs nothing", "later", "all divisions"):
        assert seen[what] > 20, what


def fetching(
    homes: list[tuple[int, int]], tiles: list[tuple[int, int, int]], work: list[int] | None = None
) -> tuple[Placement, np.ndarray]:
    """Return a placement of homes of so many tokens on lanes, its (row, column, lane), and what each computes."""
    ends = np.cumsum([tokens for tokens, _ in homes]).tolist()
    all_homes = [(0, end - tokens, end, lane) for end, (tokens, lane) in zip(ends, homes, strict=True)]
    placement = Placement(np.array(all_homes, np.int32), np.array([(*tile, 7) for tile in tiles], np.int32))
    return placement, np.array(work or [1] * len(tiles), np.int64)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule((1.0, 2.0, 1.0)), [25, 50, 25]),
        (Schedule((0.0, 1.0, 4.0)), [0, 20, 80]),
        (Schedule((30.0, 30.0, 30.0, 10.0)), [30, 30, 30, 10]),
        (Schedule.of(3), [42, 42, 16]),
        (Schedule.of(1), [100]),
    ],
)
def test_many_equal_tiles_are_shared_out_exactly(schedule: Schedule, expected: list[int]) -> None:
    """Lane 1 computes a tile with each of 100 homes that come one by one, and a large one that needs nothing."""
    placement, work = fetching(
        [*[(2, 0)] * 100, (5, 1)], [(100, 100, 1), *((100, home, 1) for home in range(100))], [999] + [1] * 100
    )
    division = divided(placement, work, Lanes(2, 0, 1), CONTENT, schedule).tiles[:, 3]
    assert division[0] == 0
    assert np.bincount(division[1:], minlength=len(expected)).tolist() == expected


def test_what_most_work_waits_for_comes_first() -> None:
    """Lane 1 fetches four homes of lane 0, of which one is short, and one is needed for two tiles."""
    homes = [(10, 0), (10, 0), (4, 0), (10, 0), (1, 1), (1, 1)]
    tiles = [(4, 0, 1), (4, 1, 1), (4, 2, 1), (4, 3, 1), (5, 3, 1)]
    for work, turns in (([5, 60, 4, 20, 20], [105, 1, 101, 61, 61]), ([50, 30, 24, 35, 35], [95, 145, 71, 1, 1])):
        # There are as many divisions as there is work: [tile] is what is computed before it comes, and 1.
        schedule = Schedule((0.0, 0.5, *(1.0,) * sum(work)))
        found = divided(*fetching(homes, tiles, work), Lanes(2, 0, 1), CONTENT, schedule)
        assert found.tiles[:, 3].tolist() == turns


@pytest.mark.parametrize(("num_nodes", "node_lanes", "first_node"), [(5, 1, 0), (1, 6, 0), (4, 2, 0), (3, 4, 2)])
def test_rings_of_equal_lanes_stay_rings(num_nodes: int, node_lanes: int, first_node: int) -> None:
    """All lanes need all keys: in each division each of them sends one block and receives one, as NICs and as lanes."""
    num_lanes = num_nodes * node_lanes
    lanes = Lanes(num_lanes, first_node * node_lanes, node_lanes)
    tiles = [(row, column, row) for row, column in product(range(num_lanes), repeat=2)]
    placement, work = fetching([(16, lane) for lane in range(num_lanes)], tiles)
    rates = LinkRates(4.0, 1.0, 1000.0, 10.0, 0.5)
    # A round for each lane of the node, then one for each other node, which brings all that its lanes hold.
    shares = (0.0, *(1.0,) * (node_lanes - 1), *(float(node_lanes),) * (num_nodes - 1))
    found = divided(placement, work, lanes, rates, Schedule(shares, rotates=True))
    messages = messages_of(fetches_of(found, lanes), np.full(num_lanes, 16), np.array([0.0, 1.0]), np.zeros(2))
    assert found.num_divisions == len(shares)
    for one in range(1, len(shares)):
        now = (messages.division == one) & (messages.round == (INSIDE if one < node_lanes else ACROSS))
        assert sorted(messages.sender[now]) == sorted(messages.receiver[now]) == list(range(num_lanes))
        assert (messages.num_bytes[now] == 16.0).all()
        behind = (lanes.first + messages.receiver[now]) - (lanes.first + messages.sender[now])
        if one < node_lanes:
            assert set((behind % node_lanes).tolist()) == {one}
        else:
            nodes = messages.receiver[now] // node_lanes - messages.sender[now] // node_lanes
            assert set((nodes % num_nodes).tolist()) == {one - node_lanes + 1}
    assert (found.tiles[:, 3] == 0).sum() == num_lanes


def test_nothing_to_fetch_is_one_division() -> None:
    nothing = Placement(np.array([(0, 0, 8, 0)], np.int32), np.zeros((0, 4), np.int32))
    assert divided(nothing, np.zeros(0, np.int64), Lanes(1, 0, 1), COMMON, Schedule.of(4)) == nothing
    local, work = fetching([(8, 0), (3, 0), (9, 1)], [(0, 0, 0), (1, 0, 0), (1, 1, 0), (2, 2, 1)])
    for node_lanes in (1, 2):
        assert not divided(local, work, Lanes(2, 1, node_lanes), COMMON, Schedule.of(4)).tiles[:, 3].any()
    for seed in SEEDS[:20]:
        one = drawn(seed)
        together = one.placement.homes.copy()
        together[:, 3] = 0
        tiles = one.placement.tiles.copy()
        tiles[:, 2] = 0
        alone = one._replace(placement=Placement(together, tiles), lanes=Lanes(1, 3, 4))
        assert not alone.divided().tiles[:, 3].any()
        assert not one._replace(schedule=Schedule((2.0,))).divided().tiles[:, 3].any()


def test_tiles_without_work_have_a_division_too() -> None:
    """What waits is no work at all, so every division has its share of it; some tiles wait nevertheless."""
    num_waiting = 0
    for seed in SEEDS:
        one = drawn(seed)
        division = one._replace(work=np.zeros_like(one.work)).divided().tiles[:, 3]
        assert 0 <= division.min() <= division.max() < len(one.schedule.shares)
        num_waiting += sum(map(bool, needs_of(one.placement)))
    assert num_waiting > 1000
