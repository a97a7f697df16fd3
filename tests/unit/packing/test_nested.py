"""Packing without a pipeline: CP sizes by quota, large groups first, even lanes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.packing.durations import durations_of, sample_ns
from dynamic_cp.packing.judge import build_plan, makespan_ns, price_packing
from dynamic_cp.packing.nested import choose_cp_sizes, pack_nested
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Topology
from tests.unit.packing.packings import check_packing, contents, descending
from tests.unit.support import causal, llama_on_h100, samples_of, tiny_cost_model

NO_QUOTA = 1e18
"""Nanoseconds that no sample lasts; infinite ones are those of samples that do not fit."""


def setting(num_lanes, **options):
    model = tiny_cost_model(Topology(num_lanes=num_lanes), **{"max_tokens_per_rank": 128, **options})
    return model, durations_of(model.table, num_lanes)


def packed(lengths, num_lanes, num_rows, quota_ns=NO_QUOTA, **options):
    seqlens = descending(lengths)
    model, durations = setting(num_lanes, **options)
    result = pack_nested(causal(seqlens), durations, num_lanes, num_rows, quota_ns)
    if result is None:
        return None
    end_ns, packing = result
    check_packing(packing, seqlens, durations, num_lanes)
    return end_ns, packing, contents(packing, seqlens), makespan_ns(causal(seqlens), packing, model)


def test_a_sample_gets_the_smallest_size_that_holds_it_and_meets_the_quota():
    _, durations = setting(8)
    seqlens = descending([1000, 250, 128, 20])
    assert choose_cp_sizes(causal(seqlens), durations, 0, NO_QUOTA).tolist() == [3, 1, 0, 0]
    quota_ns = sample_ns(durations, 2, 250, 1.0)
    assert choose_cp_sizes(causal(seqlens), durations, 0, quota_ns).tolist() == [3, 2, 0, 0]
    assert choose_cp_sizes(causal(seqlens), durations, 1, NO_QUOTA).tolist() == [3, 1, 1, 1]


def test_a_larger_size_must_be_faster():
    # An exchange of 20 ms makes every group slower than one lane.
    model = tiny_cost_model(Topology(num_lanes=8), max_tokens_per_rank=128)
    durations = durations_of(model.table, 8)
    terms = durations.terms.copy()
    terms[1:, :, 0] += 20e6
    slow = durations._replace(terms=terms)
    assert choose_cp_sizes(causal(descending([128, 100])), slow, 0, 0.0).tolist() == [0, 0]
    assert choose_cp_sizes(causal(descending([128, 100])), durations, 0, 0.0).tolist() != [0, 0]


def test_one_long_sample_gets_more_lanes_and_short_ones_share():
    _, packing, rows, _ = packed([400, *[30] * 8], 4, 2)
    assert sorted(packing.log2_cp_sizes.tolist()) == [0, 0, 0, 0, 2]
    assert rows == [[[400]], [[30, 30]] * 4]


def test_a_cheap_long_sample_leaves_room_for_other_cp_sizes_in_its_row():
    _, packing, rows, _ = packed([250, 128, 120], 4, 1)
    assert rows == [[[250], [128], [120]]]
    assert packing.log2_cp_sizes[packing.bucket_of_sample].tolist() == [1, 0, 0]


def test_equal_samples_become_equal_lanes():
    for limit in (48, 128):
        _, packing, rows, _ = packed([16] * 24, 4, 2, max_tokens_per_rank=limit)
        lanes = packing.first_lanes[packing.bucket_of_sample]
        assert np.bincount(lanes).tolist() == [6] * 4
    assert rows[0] == rows[0][:1] * 4, "and the rows of all lanes are alike"


def test_no_room():
    assert packed([128] * 5, 4, 1) is None
    assert packed([128] * 5, 4, 2) is not None
    assert packed([512, 512], 4, 1) is None  # two groups of all lanes
    assert packed([512, 512], 4, 2) is not None
    assert packed([100, 100, 60, 60], 2, 2) is not None
    # The tokens of five half-full samples fit into two buckets of 128, the samples do not.
    assert packed([70] * 3, 2, 1) is None


def test_short_samples_go_to_large_buckets_when_there_is_no_room_elsewhere():
    # 512 tokens on four lanes: 385 in the group, 127 more beside it.
    _, _, rows, _ = packed([385, *[16] * 7], 4, 1)
    assert rows == [[[385, *[16] * 7]]]
    assert packed([385, *[16] * 8], 4, 1) is None


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 5, 6, 8, 12])
def test_groups_shrink_so_that_no_lane_waits(num_lanes):
    """Without a pipeline the makespan is the busiest lane's own time: it never waits inside a group."""
    rng = random.Random(num_lanes)
    looked_at, large = 0, 0
    for _ in range(60):
        longest = 128 << rng.randrange(num_lanes.bit_length())
        lengths = [int(min(longest, 1 + rng.lognormvariate(3.0, 1.5))) for _ in range(rng.randint(1, 40))]
        model, durations = setting(num_lanes)
        seqlens = descending(lengths)
        num_rows = -(-sum(lengths) // (128 * num_lanes)) + rng.randint(1, 3)
        result = pack_nested(causal(seqlens), durations, num_lanes, num_rows, rng.choice([0.0, 2e7, NO_QUOTA]))
        if result is None:
            continue
        _, packing = result
        check_packing(packing, seqlens, durations, num_lanes)
        order = samples_of(seqlens)
        plan = build_plan(order, price_packing(causal(seqlens), packing, model), model, "nested")
        check_plan(plan, order)
        busy_ns = np.zeros(num_lanes, np.int64)
        for bucket in plan.buckets:
            cost = model.bucket_cost(bucket)
            both_ns = sum(round(1e9 * one) for one in (cost.forward_s, cost.backward_s))
            busy_ns[bucket.first_lane : bucket.first_lane + bucket.cp_size] += both_ns
        assert makespan_ns(causal(seqlens), packing, model) == busy_ns.max()
        looked_at += 1
        large += packing.log2_cp_sizes.max() > 0
    assert looked_at > 40
    assert num_lanes == 1 or large > 10


def test_a_bucket_that_has_taken_samples_is_not_taken_as_if_it_had_not():
    """Where hidden exchange lets long samples share buckets, and memory then lets these buckets share others."""
    options = {"max_tokens_per_rank": 1280, "cp_comm_types": ("p2p", "a2a+p2p")}
    samples = samples_of(draw_lengths("github", 2048, 0, 131072))
    planned = plan_problem(llama_on_h100(Topology(num_lanes=128), **options), samples)
    check_plan(planned.plan)
    assert max(planned.plan.cp_histogram) == 128
