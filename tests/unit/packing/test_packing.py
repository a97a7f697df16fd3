"""What all packers share: which CP sizes are allowed, how much they hold, and the orders of rows."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.packing.durations import bucket_ns, durations_of, padded_seqlen, sample_ns
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.pricing.allowed import allowed_cp_sizes, capacity_tokens
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import duration_ns
from dynamic_cp.types import PlanOptions, Topology
from tests.unit.support import problem_of, tiny_cost_model


def test_allowed_cp_sizes():
    def allowed(**sizes):
        options = PlanOptions(max_tokens_per_rank=8, cp_comm_types=("p2p",), **sizes)
        return allowed_cp_sizes(Topology(num_lanes=6), options)

    assert allowed() == (1, 2, 4)
    assert allowed(min_cp_size=2, max_cp_size=2) == (2,)
    with pytest.raises(InvalidInputError, match=r"max_cp_size is 8.*6 lanes has 4"):
        allowed(max_cp_size=8)
    with pytest.raises(InvalidInputError, match=r"min_cp_size is 4.*is 2"):
        allowed(min_cp_size=4, max_cp_size=2)


def test_a_full_bucket_stays_within_the_limit_and_one_more_token_does_not():
    for cp_size, tp_size, limit in itertools.product((1, 2, 4), (1, 2, 3, 4), range(1, 40)):
        topology = Topology(num_lanes=4, tp_size=tp_size, sequence_parallel=True)
        capacity = capacity_tokens(cp_size, topology, PlanOptions(max_tokens_per_rank=limit, cp_comm_types=("p2p",)))
        if capacity:
            assert sum(padded_seqlens([capacity], cp_size, tp_size)) // cp_size <= limit
        assert sum(padded_seqlens([capacity + 1], cp_size, tp_size)) // cp_size > limit


def test_the_price_table_and_the_limits_agree_on_capacities():
    topology = Topology(num_lanes=6, tp_size=3, sequence_parallel=True)
    model = tiny_cost_model(topology, max_tokens_per_rank=100, min_cp_size=2)
    assert model.table.capacities.tolist() == [0, *(capacity_tokens(cp, topology, model.options) for cp in (2, 4))]


@pytest.mark.parametrize("exchanges", [("p2p",), ("all_gather",), ("p2p", "all_gather", "a2a")])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_durations_are_the_price_of_a_group_across_nodes_where_there_is_one(exchanges, pp_size):
    rng = random.Random(5)
    topology = Topology(num_lanes=8, ranks_per_node=2, pp_size=pp_size)
    model = CostModel(problem_of(topology, cp_comm_types=exchanges))
    assert model.table.slowest_s_per_token > 0
    durations = durations_of(model.table, 8)
    for k in range(4):
        for _ in range(30):
            lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
            tokens, squares = float(sum(lengths)), float(sum(n * n for n in lengths))
            link = 1 if k >= 2 else 0
            assert bucket_ns(durations, k, tokens, squares) == pytest.approx(
                duration_ns(model.table, k, link, tokens, squares), abs=1
            )


def test_the_duration_of_a_sample_is_infinite_where_it_does_not_fit():
    durations = durations_of(tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=10).table, 4)
    assert [padded_seqlen(13, durations.multiples[k]) for k in range(3)] == [13, 16, 16]
    assert np.isinf(sample_ns(durations, 0, 11, 1.0))
    assert sample_ns(durations, 1, 20, 1.0) == bucket_ns(durations, 1, 20.0, 400.0)
    assert np.isinf(sample_ns(durations, 1, 21, 1.0))
