"""The WLB-like packer, against its description in plain Python, and the orders of rows that are simulated."""

from __future__ import annotations

import random

import pytest

from benchmarks.peers.wlb import SWEEP, packings_like_wlb
from dynamic_cp.packing.durations import durations_of
from dynamic_cp.packing.judge import ORDERS, grid_of_packing, in_orders, least_ns, makespan_ns
from dynamic_cp.packing.static import pack_balanced
from dynamic_cp.types import Topology
from tests.unit.packing.packings import check_packing, contents, deep_cost_model, descending
from tests.unit.support import causal, tiny_cost_model


def buckets_by_hand(seqlens, model, k, num_buckets):
    """Return the lengths in every bucket, descending by workload; None when a sample fits neither choice."""
    table = model.table
    terms = table.terms[table.first_option[k, table.links[k, 0]]].sum(axis=0)
    buckets = [(0.0, 0, []) for _ in range(num_buckets)]
    for seqlen in seqlens.tolist():
        length = -(-seqlen // table.multiples[k]) * table.multiples[k]
        for key in (0, 1):  # least workload, fewest tokens
            at = min(range(num_buckets), key=lambda one, key=key: (buckets[one][key], one))
            if buckets[at][1] + length <= table.capacities[k]:
                break
        else:
            return None
        work, tokens, inside = buckets[at]
        buckets[at] = (work + (terms[1] * length + terms[2] * length * length), tokens + length, [*inside, seqlen])
    return [inside for work, _, inside in sorted(buckets, key=lambda one: -one[0])]


@pytest.mark.parametrize("num_lanes", [4, 7])
def test_samples_go_to_the_least_workload_else_to_the_fewest_tokens(num_lanes):
    rng = random.Random(num_lanes)
    model = tiny_cost_model(Topology(num_lanes=num_lanes), max_tokens_per_rank=64)
    durations, num_grown, num_packings = durations_of(model.table, num_lanes), 0, 0
    for _ in range(60):
        k = rng.randrange(3)
        seqlens = descending(rng.randint(1, rng.choice([9, 64 << k])) for _ in range(rng.randint(1, 40)))
        blocks = num_lanes >> k
        packings = [*packings_like_wlb(causal(seqlens), model, k)]
        assert 1 <= len(packings) <= len(SWEEP)
        for packing in packings:
            check_packing(packing, seqlens, durations, num_lanes)
            expected = buckets_by_hand(seqlens, model, k, blocks * packing.num_rows)
            assert [bucket for row in contents(packing, seqlens) for bucket in row] == [one for one in expected if one]
        fewest = packings[0].num_rows
        num_grown += fewest > 1 and buckets_by_hand(seqlens, model, k, blocks * (fewest - 1)) is None
        num_packings += len(packings)
    assert num_grown > 3, "some numbers of rows had to grow until all samples fit"
    assert num_packings > 100


@pytest.mark.parametrize(("pp_size", "vp_size"), [(1, 1), (2, 1), (4, 2)])
def test_orders_are_simulated_exactly_and_none_is_below_the_least(pp_size, vp_size):
    model = deep_cost_model(Topology(num_lanes=4, pp_size=pp_size, vp_size=vp_size), max_tokens_per_rank=256)
    rng = random.Random(pp_size)
    close = 0
    for _ in range(30):
        seqlens = descending(rng.randint(1, 200) for _ in range(rng.randint(1, 30)))
        packing = pack_balanced(causal(seqlens), durations_of(model.table, 4), 0, 4, rng.randint(8, 12))
        orders = [*in_orders(causal(seqlens), packing, model)]
        assert [order for _, order, _ in orders] == (["as packed"] if pp_size == 1 else [*ORDERS])
        least = least_ns(grid_of_packing(causal(seqlens), packing, model), model)
        for found_ns, _, one in orders:
            assert found_ns == makespan_ns(causal(seqlens), one, model)
            assert least <= found_ns
        fastest = min(found_ns for found_ns, _, _ in orders)
        assert [*in_orders(causal(seqlens), packing, model, best_ns=least)] == []
        assert len([*in_orders(causal(seqlens), packing, model, best_ns=fastest + 1)]) == len(orders)
        close += least > 0.5 * fastest
    assert close > 10, "the bound excludes something"
