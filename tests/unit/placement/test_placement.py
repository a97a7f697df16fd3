"""Placements are legal, even, the same everywhere; their bytes are counted as a program of loops counts them."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.blocks.metric import traffic_of
from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.placement.placed import Placed
from dynamic_cp.placement.portfolio import candidates, place_greedily, place_whole, place_zigzag, search_placement
from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, Lambda, Mask, Sample
from dynamic_cp.types.placement import PlacementProblem
from tests.unit.placement.instances import assert_legal, random_problem, random_samples

RULES = ("causal", "full", "lambda:64,1024", "causal_blockwise:256,2", "shared_question:4x0.2")
EIGHT_LANES = PlacementProblem(num_lanes=8, node_lanes=4, row_bytes=4096, column_bytes=1024)


def samples_of(seqlens: list[int], rule: str) -> list[Sample]:
    mask_of = parse_mask_rule(rule)
    return [Sample(sample_id=number, seqlen=size, mask=mask_of(size)) for number, size in enumerate(seqlens)]


def mixed(seed: int, rule: str, num_tokens: int = 24000) -> list[Sample]:
    """Return samples of very different lengths, and one of a token."""
    rng = random.Random(seed)
    seqlens = [1]
    while sum(seqlens) < num_tokens:
        seqlens.append(min(num_tokens - sum(seqlens), round(rng.lognormvariate(6.5, 1.4)) + 1))
    return samples_of(seqlens, rule)


@settings(max_examples=100)
@given(st.integers(0, 10**9))
def test_every_way_to_place_any_masks_on_any_lanes_is_legal(seed: int) -> None:
    rng = random.Random(seed)
    samples, problem = random_samples(rng), random_problem(rng)
    block_size = rng.choice([128, 256, 300])
    way = rng.randint(0, 4)
    if way == 0:
        placed = place_whole(samples, problem)
        assert len(placed.homes) == len(samples)
    elif way == 1:
        placed = place_zigzag(samples, problem, block_size)
    elif way == 2:
        placed = place_greedily(samples, problem, block_size)
    else:
        placed = search_placement(samples, problem, block_size, moves_rows=way == 3)
    assert_legal(placed, samples, problem)
    if way:
        num_tokens = sum(sample.seqlen for sample in samples)
        held = np.bincount(placed.homes[:, 3], placed.homes[:, 2] - placed.homes[:, 1], problem.num_lanes)
        assert held.max() <= max(
            -(-num_tokens // problem.num_lanes), (1 + problem.token_tolerance) * num_tokens / problem.num_lanes
        )
    assert traffic_of(placed, problem) == traffic_by_loops(placed, problem)


def made(samples: list[Sample], problem: PlacementProblem) -> list[Placed]:
    """Return all candidates, with the first seed."""
    return [make() for make in candidates(samples, problem)]


def traffic_by_loops(placed: Placed, problem: PlacementProblem) -> tuple[int, int, int, float, float]:
    direct, multicast, inside = set(), set(), set()
    for row, column, lane in placed.tiles.tolist():
        for kind, home in enumerate((row, column)):
            owner = placed.homes[home, 3]
            if owner // problem.node_lanes != lane // problem.node_lanes:
                direct.add((kind, home, lane))
                multicast.add((kind, home, lane // problem.node_lanes))
            elif owner != lane:
                inside.add((kind, home, lane))
    sizes = (placed.homes[:, 2] - placed.homes[:, 1]).tolist()
    token_bytes = (problem.row_bytes, problem.column_bytes)
    sums = [sum(token_bytes[kind] * sizes[home] for kind, home, _ in users) for users in (direct, multicast, inside)]
    work, tokens = [0] * problem.num_lanes, [0] * problem.num_lanes
    for (_, _, lane), pairs in zip(placed.tiles.tolist(), placed.touched.tolist(), strict=True):
        work[lane] += pairs
    for (_, _, _, lane), size in zip(placed.homes.tolist(), sizes, strict=True):
        tokens[lane] += size
    imbalances = [max(held) / (sum(held) / problem.num_lanes) for held in (work, tokens)]
    return (*sums, *map(pytest.approx, imbalances))  # type: ignore[return-value]


@pytest.mark.parametrize("rule", RULES)
def test_tokens_and_work_come_out_even(rule: str) -> None:
    for seed in range(3):
        makers = list(candidates(mixed(seed, rule), EIGHT_LANES))
        assert [make.name.split()[0] for make in makers] == [
            *("greedy", "search", "tiles", "zigzag", "search", "search", "search", "search", "search", "search"),
            "documents",
        ]
        found = [make() for make in makers]
        for placed in found[:-1]:
            assert traffic_of(placed, EIGHT_LANES).token_imbalance <= 1.05
        tolerances = (None, 0.4, 0.1, None, 0.4, 0.03, 0.1, 0.4, 0.1, 0.1, None)
        for placed, tolerance in zip(found, tolerances, strict=True):
            if tolerance is None:
                continue
            mean = placed.touched.sum() / EIGHT_LANES.num_lanes
            a_tile = placed.touched.max() / mean  # what no move can be smaller than
            assert traffic_of(placed, EIGHT_LANES).work_imbalance <= 1.0 + tolerance + min(a_tile, 0.15)


@pytest.mark.parametrize("rule", RULES)
def test_a_search_moves_less_than_dealing_blocks(rule: str) -> None:
    samples = mixed(0, rule, 48000)
    searched, dealt = [
        traffic_of(place(samples, EIGHT_LANES, 512), EIGHT_LANES) for place in (search_placement, place_zigzag)
    ]
    assert dealt.multicast_bytes > 0
    assert searched.multicast_bytes < 0.8 * dealt.multicast_bytes
    assert searched.direct_bytes + searched.node_bytes < 0.8 * (dealt.direct_bytes + dealt.node_bytes)


def test_short_documents_stay_whole_and_nothing_travels() -> None:
    samples = samples_of([100] * 64, "causal")
    placed = search_placement(samples, EIGHT_LANES, 512)
    assert len(placed.homes) == len(placed.tiles) == 64
    assert traffic_of(placed, EIGHT_LANES)[:3] == (0, 0, 0)


def test_a_last_block_that_sees_all_sends_its_queries() -> None:
    """Otherwise the keys of half of the document would travel to its node."""
    samples = samples_of([16384], "causal_blockwise:256,2")
    placed = search_placement(samples, EIGHT_LANES, 512)
    rows = placed.tiles[placed.tiles[:, 0] == len(placed.homes) - 1]
    assert len(set(rows[:, 2].tolist()) - {placed.homes[-1, 3]}) >= 1
    assert traffic_of(placed, EIGHT_LANES).multicast_bytes < 0.25 * (16384 // 2) * EIGHT_LANES.column_bytes


def test_one_lane_holds_all() -> None:
    problem = PlacementProblem(num_lanes=1, node_lanes=8, row_bytes=1, column_bytes=1)
    for placed in made(mixed(0, "causal", 3000), problem):
        assert set(placed.homes[:, 3].tolist()) == set(placed.tiles[:, 2].tolist()) == {0}


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_samples_does_not_matter(rule: str) -> None:
    samples = mixed(1, rule, 12000)
    order = list(range(len(samples)))
    random.Random(5).shuffle(order)
    for first, second in zip(
        made(samples, EIGHT_LANES), made([samples[index] for index in order], EIGHT_LANES), strict=True
    ):
        assert described(first, samples) == described(second, [samples[index] for index in order])


def described(placed: Placed, samples: list[Sample]) -> list[tuple[object, ...]]:
    """Return homes and tiles in words in which samples have no numbers."""

    def home(number: int) -> tuple[object, ...]:
        index, start, stop, lane = placed.homes[number].tolist()
        return samples[index].seqlen, str(samples[index].mask), start, stop, lane

    tiles = [(home(row), home(column), lane) for row, column, lane in placed.tiles.tolist()]
    return sorted([*map(home, range(len(placed.homes))), *tiles], key=repr)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_lanes": 0}, "num_lanes is 0"),
        ({"node_lanes": 0}, "node_lanes is 0"),
        ({"row_bytes": 0}, "row_bytes is 0"),
        ({"token_tolerance": -0.1}, "token_tolerance is -0.1"),
        ({"work_tolerance": float("nan")}, "work_tolerance is nan"),
    ],
)
def test_a_wrong_problem_is_named(wrong: dict[str, float], message: str) -> None:
    given = {"num_lanes": 8, "node_lanes": 4, "row_bytes": 4, "column_bytes": 2}
    with pytest.raises(InvalidInputError, match=message):
        PlacementProblem(**{**given, **wrong})


def test_masks_of_samples_may_differ() -> None:
    masks: list[Mask | None] = [None, CAUSAL, FULL, Lambda(64, 200), CausalBlockwise(128, 2)]
    samples = [Sample(sample_id=number, seqlen=700, mask=mask) for number, mask in enumerate(masks)]
    problem = PlacementProblem(num_lanes=5, node_lanes=2, row_bytes=4, column_bytes=2)
    for placed in made(samples, problem):
        assert_legal(placed, samples, problem)
