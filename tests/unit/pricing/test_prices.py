"""The kernels' prices: by hand, and to the bit those of the cost model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynamic_cp.arrays import Floats
from dynamic_cp.mechanisms.stage_attention import Convex, Kink, Linear
from dynamic_cp.mechanisms.transfers import lanes_in_one_node, links_of
from dynamic_cp.pricing import table as prices
from dynamic_cp.pricing.cost_model import CostModel, nanoseconds
from dynamic_cp.pricing.table import best_option, duration_ns
from dynamic_cp.types import Topology
from tests.unit.support import CURVED_HARDWARE, HOST_HARDWARE, TINY_HARDWARE, problem_of, tiny_cost_model

EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def terms_of(*numbers: float) -> Floats:
    return np.array([[[*numbers, *[0.0] * (prices.NUM_TERMS - len(numbers))]]])


def python_of(function):
    """The same function as the interpreter runs it."""
    return getattr(function, "py_func", function)


def test_seconds_by_hand():
    terms = terms_of(1, 2, 3, 38, 2, 1, 1, 1, 3, 10, 0, 1)
    # 1 + 2*5 + 3*8 = 35; the first kink is max(0, 1 + 5 - 8) = 0, the second 3 * max(0, 10 - 8) = 6.
    assert prices.price(terms, 0, 0, 5.0, 8.0) == 41
    assert prices.price(terms, 0, 0, 5.0, 1.0) == 1 + 10 + 3 + 2 * 5 + 3 * 9
    # 1 + 3*5 + 3*5 = 31, but the host takes 38.
    assert prices.price(terms, 0, 0, 0.0, 5.0) == 38


def random_convex(rng: random.Random, num_kinks: int) -> Convex:
    def line() -> Linear:
        return Linear(rng.uniform(0, 1e-3), rng.uniform(0, 1e-6), rng.uniform(-1e-9, 1e-9))

    kinks = tuple(Kink(rng.uniform(0.5, 7), line()) for _ in range(num_kinks))
    return Convex(line(), kinks, rng.choice([0.0, rng.uniform(0, 10.0)]))


def test_all_forms_of_a_price_agree():
    """Compiled, interpreted, as an array, as a formula, as a tangent; forward and backward together; lines below it."""
    rng = random.Random(3)
    num_exposed = num_waiting = 0
    for _ in range(200):
        sides = [random_convex(rng, rng.randrange(prices.NUM_KINKS + 1)) for _ in range(2)]
        terms = np.array([[prices.terms_of(side) for side in sides]])
        assert [prices.convex_of(row) for row in terms[0]] == sides
        tokens = float(rng.randrange(1, 100_000))
        squares = tokens * rng.randrange(1, 50_000)
        whole = prices.prices_of(terms[0], np.array([tokens, tokens]), np.array([squares, squares]))
        by_rows = prices.prices_of(np.repeat(terms, 3, axis=0), np.array([[tokens]]), np.array([[squares]]))
        assert (by_rows == whole).all()
        assert by_rows.shape == (3, 2)
        for column, (linear, kinks, host_s) in enumerate(sides):
            found = prices.price(terms, 0, column, tokens, squares)
            assert found == python_of(prices.price_inlined)(terms, 0, column, tokens, squares) == whole[column]
            lines = [(weight, line[0] + line[1] * tokens + line[2] * squares) for weight, line in kinks]
            by_formula = linear[0] + linear[1] * tokens + linear[2] * squares
            by_formula += sum(weight * max(0.0, exposed) for weight, exposed in lines)
            assert found == pytest.approx(max(by_formula, host_s), rel=1e-12, abs=1e-12)
            num_exposed += sum(exposed > 0 for _, exposed in lines)
            value, per_token, per_token2, has_kinks = python_of(prices.tangent)(terms, 0, column, tokens, squares)
            num_waiting += by_formula < host_s
            assert value == pytest.approx(by_formula, rel=1e-12, abs=1e-12)
            assert has_kinks == bool(kinks)
            assert per_token == pytest.approx(
                linear[1] + sum(w * k[1] for (w, k), (_, at) in zip(kinks, lines, strict=True) if at > 0)
            )
            assert per_token2 == pytest.approx(
                linear[2] + sum(w * k[2] for (w, k), (_, at) in zip(kinks, lines, strict=True) if at > 0)
            )
            grown = python_of(prices.growth_while_hidden)(terms, 0, column, tokens, tokens**2)
            assert grown == pytest.approx(linear[1] * tokens + linear[2] * tokens**2)
        both = np.array([[prices.both_ns(terms[0], 1e-7)]])
        assert both.shape == (1, 1, prices.NUM_TERMS_OF_BOTH)
        of_both = prices.price(both, 0, 0, tokens, squares)
        if not any(side.host_s for side in sides) and min(whole) > 0:
            assert of_both == pytest.approx(1e9 * (sum(whole) + 1e-7 * tokens), rel=1e-12)
        assert of_both <= 1e9 * (sum(whole) + 1e-7 * tokens) + 1e-3
    assert num_exposed > 100
    assert num_waiting > 50


def test_a_weight_of_zero_ends_the_kinks():
    assert prices.price(terms_of(1, 0, 0, 0, 0, 0, 0, 5, 5, 0, 0), 0, 0, 1.0, 1.0) == 1


@pytest.mark.parametrize(
    "hardware", [TINY_HARDWARE, CURVED_HARDWARE, HOST_HARDWARE], ids=lambda hardware: hardware.name
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kernels_and_cost_model_agree_to_the_bit(hardware, recompute):
    rng = random.Random(recompute)
    topology = Topology(num_lanes=12, pp_size=2, ranks_per_node=6)
    options = {"max_tokens_per_rank": 512, "recompute": recompute, "cp_comm_types": EXCHANGES}
    model = CostModel(problem_of(topology, hardware=hardware, **options))
    seen = set()
    for _ in range(300):
        k = rng.randrange(4)
        cp_size = 1 << k
        first_lane = rng.randrange(12 >> k) << k
        lengths = [rng.randrange(1, 4000) * 2 * cp_size for _ in range(rng.randrange(1, 5))]
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        link = int(model.table.links[k, first_lane >> k])
        option = int(best_option(model.table, k, link, float(tokens), float(squares)))
        for exchange in (None, *EXCHANGES):
            if (exchange == "a2a" and cp_size > 4) or (exchange == "a2a+p2p" and 1 < cp_size < 4):
                continue  # 4 query heads
            cost = model.cost(cp_size, first_lane, tokens, squares, exchange)
            rows = range(model.table.first_option[k, link], model.table.end_option[k, link])
            row = option
            if exchange is not None and k > 0:
                row = next(one for one in rows if model.attentions[one].cp_comm_type == exchange)
            for direction, seconds_of_model in enumerate((cost.forward_s, cost.backward_s)):
                arguments = (model.table.terms, row, direction, float(tokens), float(squares))
                assert prices.price(*arguments) == seconds_of_model
                assert python_of(prices.price)(*arguments) == seconds_of_model
            seen.add((k, link, exchange))
        best = model.cost(cp_size, first_lane, tokens, squares)
        found_ns = model.duration_ns(cp_size, first_lane, tokens, squares)
        assert found_ns == duration_ns(model.table, k, link, float(tokens), float(squares))
        assert found_ns == python_of(duration_ns)(model.table, k, link, float(tokens), float(squares))
        slowest_s = max(
            best.embedding_forward_s + best.embedding_backward_s, best.head_forward_s + best.head_backward_s
        )
        assert abs(found_ns - nanoseconds(best.forward_s + best.backward_s + slowest_s)) <= 1
        chosen = model.best_exchange(cp_size, first_lane, tokens, squares)
        assert chosen == model.attentions[option]
        assert model.row_of(cp_size, first_lane, *chosen) == option
        assert model.cost(cp_size, first_lane, tokens, squares, *chosen) == best
    # 5 choices at CP sizes 1 and 4 (both links), no hierarchy of 2 lanes, no a2a of 8.
    assert len(seen) == 5 + 4 + 2 * 5 + 4


def test_the_fastest_option_wins_and_the_first_of_equals():
    table = tiny_cost_model(Topology(num_lanes=2), cp_comm_types=("all_gather", "p2p")).table
    first = table.first_option[1, 0]
    assert table.end_option[1, 0] - first == 2
    # Long samples hide the ring's exchange; nothing hides without attention, where both cost the same.
    assert best_option(table, 1, 0, 4096.0, 4096.0**2) == first + 1
    flat = table._replace(terms=np.repeat(table.terms[first : first + 1], len(table.terms), axis=0))
    assert best_option(flat, 1, 0, 4096.0, 4096.0**2) == first


@pytest.mark.parametrize(
    ("num_lanes", "tp_size", "pp_size", "ranks_per_node"),
    [
        (1, 1, 1, 8), (64, 1, 1, 8), (12, 1, 2, 8), (12, 3, 3, 8), (7, 2, 4, 5), (33, 1, 3, 6), (16, 16, 2, 8),
        (5, 1, 1, 1),
    ],
)  # fmt: skip
def test_links_are_those_of_the_topology(num_lanes, tp_size, pp_size, ranks_per_node):
    topology = Topology(num_lanes=num_lanes, tp_size=tp_size, pp_size=pp_size, ranks_per_node=ranks_per_node)
    links = links_of(topology)
    counted = 0
    for k in range(num_lanes.bit_length()):
        expected = [int(topology.spans_nodes(block << k, 1 << k)) for block in range(num_lanes >> k)]
        assert links.of_group[k, : num_lanes >> k].tolist() == expected
        assert links.used[k] == tuple(sorted(set(expected)))
        counted += len(expected)
    assert counted >= num_lanes


@pytest.mark.parametrize(
    ("lanes", "sizes"),
    [
        (8, {"num_lanes": 64}), (4, {"num_lanes": 64, "tp_size": 2}), (1, {"num_lanes": 64, "tp_size": 8}),
        (1, {"num_lanes": 4, "tp_size": 16}), (2, {"num_lanes": 16, "ranks_per_node": 6}),
        (1, {"num_lanes": 16, "ranks_per_node": 5}),
        (4, {"num_lanes": 12, "pp_size": 2}),  # stage 1 starts in the middle of a node
        (8, {"num_lanes": 12}),
        (2, {"num_lanes": 3, "ranks_per_node": 2}),
        (8, {"num_lanes": 3}),  # groups of 8 do not exist: no group of theirs spans nodes
    ],
)  # fmt: skip
def test_the_largest_inner_group(lanes, sizes):
    topology = Topology(**sizes)
    found = lanes_in_one_node(topology)
    assert found == lanes
    assert topology.lanes_per_node % found == 0
    assert not any(topology.spans_nodes(first, found) for first in range(0, topology.num_lanes - found + 1, found))


def test_a_link_that_no_group_has_prices_as_the_other():
    table = tiny_cost_model(Topology(num_lanes=16, ranks_per_node=8)).table
    assert [table.first_option[k, 0] == table.first_option[k, 1] for k in range(5)] == [True] * 5
    split = tiny_cost_model(Topology(num_lanes=12, ranks_per_node=6)).table
    assert [split.first_option[k, 0] == split.first_option[k, 1] for k in range(4)] == [True, True, False, True]


def test_limits_of_the_table_by_hand():
    topology = Topology(num_lanes=12, tp_size=3, sequence_parallel=True)
    table = tiny_cost_model(topology, max_tokens_per_rank=100, min_cp_size=2, max_cp_size=4).table
    assert table.multiples.tolist() == [1, 4, 8, 16]
    # Tokens of a rank are even and a multiple of 3: 96 of 100. CP sizes 1 and 8 are not allowed.
    assert table.capacities.tolist() == [0, 192, 384, 0]
    assert tiny_cost_model(topology, max_tokens_per_rank=100).table.capacities.tolist() == [99, 192, 384, 768]
    assert table.rank_token_multiple == 3
