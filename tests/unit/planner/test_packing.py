"""Packing: limits, progress, and the shape that makes a plan good."""

from __future__ import annotations

import pytest

from dynamic_cp.baselines import min_microbatches, pack_balanced, pack_static, static_cp_size
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.packing import allowed_cp_sizes, build_plan, capacity_tokens, pack, pack_rows, pyramid
from dynamic_cp.types import PlanOptions, Topology
from dynamic_cp.validate import check_plan
from tests.unit.planner.support import samples_of, tiny_cost_model


def seqlens(rows):
    return [[[sample.seqlen for sample in bucket.samples] for bucket in row] for row in rows]


def test_allowed_cp_sizes():
    assert allowed_cp_sizes(Topology(num_lanes=6), PlanOptions(max_tokens_per_rank=8)) == (1, 2, 4)
    options = PlanOptions(max_tokens_per_rank=8, min_cp_size=2, max_cp_size=2)
    assert allowed_cp_sizes(Topology(num_lanes=6), options) == (2,)
    with pytest.raises(InvalidInputError, match=r"max_cp_size is 8.*6 lanes has 4"):
        allowed_cp_sizes(Topology(num_lanes=6), PlanOptions(max_tokens_per_rank=8, max_cp_size=8))
    with pytest.raises(InvalidInputError, match=r"min_cp_size is 4.*is 2"):
        allowed_cp_sizes(Topology(num_lanes=6), PlanOptions(max_tokens_per_rank=8, min_cp_size=4, max_cp_size=2))


def test_capacity_counts_padding():
    def capacity(cp_size, limit, tp_size=1):
        topology = Topology(num_lanes=4, tp_size=tp_size, sequence_parallel=tp_size > 1)
        return capacity_tokens(cp_size, topology, PlanOptions(max_tokens_per_rank=limit))

    assert capacity(1, 7) == 7
    assert capacity(2, 7) == 12  # 7 tokens a rank are not two chunks
    assert capacity(2, 7, tp_size=3) == 12
    assert capacity(4, 7, tp_size=4) == 16
    assert capacity(1, 3, tp_size=4) == 0


def test_one_long_sample_gets_more_lanes_and_short_ones_share():
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=128)
    rows = pack(samples_of([400, *[30] * 8]), model, 2, (1, 2, 4))
    plan = build_plan(rows, model, "dynamic")
    check_plan(plan, samples_of([400, *[30] * 8]))
    assert plan.cp_histogram[4] == 1
    assert max(len(bucket.samples) for bucket in plan.buckets) > 1


def test_a_cheap_long_sample_leaves_room_for_other_cp_sizes_in_its_micro_batch():
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=128)
    rows = pack(samples_of([250, 128, 120]), model, 1, (1, 2, 4))
    assert [[bucket.cp_size for bucket in row] for row in rows] == [[2, 1, 1]]


def test_fewer_micro_batches_mean_fuller_ones():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=256)
    samples = samples_of([16] * 24)
    assert [len(pack(samples, model, count, (1, 2))) for count in (1, 2, 3, 6)] == [1, 2, 3, 6]
    assert len(pack_rows(samples, model, 0, (1, 2))) == 24, (
        "without a quota each sample gets what is fastest for it alone"
    )


def test_the_pyramid_is_low_at_both_ends():
    model = tiny_cost_model(Topology(num_lanes=1))
    rows = pack_rows(samples_of([50, 40, 30, 20, 10]), model, 0, (1,))
    assert seqlens(pyramid(rows, model)) == [[[10]], [[30]], [[50]], [[40]], [[20]]]


def test_interleaving_gets_empty_micro_batches():
    model = tiny_cost_model(Topology(num_lanes=2, pp_size=4, vp_size=2))
    plan = build_plan(pack(samples_of([9]), model, 4, (1, 2)), model, "dynamic")
    assert plan.num_microbatches == 4
    check_plan(plan, samples_of([9]))


def test_next_fit_follows_the_input_order():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=10)
    assert seqlens(pack_static(samples_of([6, 4, 1, 9, 8, 3]), model, 1)) == [[[6, 4], [1, 9]], [[8], [3]]]
    # 4 would fit to 6, but that bucket is closed.
    assert seqlens(pack_static(samples_of([6, 9, 4, 8]), model, 1)) == [[[6], [9]], [[4], [8]]]


def test_next_fit_splits_the_last_bins_to_fill_the_last_micro_batch():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=10)
    assert seqlens(pack_static(samples_of([6, 4, 9, 1, 2]), model, 1)) == [[[6, 4], [9]], [[2], [1]]]
    assert seqlens(pack_static(samples_of([9, 8, 7]), model, 1)) == [[[9], [8]], [[7]]]
    assert seqlens(pack_static(samples_of([6, 4]), model, 1)) == [[[6], [4]]]


def test_balanced_puts_the_longest_first_into_the_cheapest_bucket():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=100)
    assert seqlens(pack_balanced(samples_of([10, 60, 50, 20]), model, 1, 1)) == [[[60, 10], [50, 20]]]
    assert pack_balanced(samples_of([60, 60, 60]), model, 1, 1) is None
    assert min_microbatches(samples_of([60, 60, 60]), model, 1) == 1


def test_static_cp_size():
    topology, options = Topology(num_lanes=6), PlanOptions(max_tokens_per_rank=16)
    assert static_cp_size(samples_of([5, 33]), topology, options) == 4
    given = PlanOptions(max_tokens_per_rank=16, static_cp_size=2)
    assert static_cp_size(samples_of([32]), topology, given) == 2
    with pytest.raises(
        InfeasibleSampleError, match=r"sample 0 has 33 tokens.*2 lanes holds 32.*--context-parallel-size"
    ):
        static_cp_size(samples_of([33]), topology, given)
    for wrong in (3, 8, 0):
        with pytest.raises(InvalidInputError, match="--context-parallel-size"):
            static_cp_size(samples_of([5]), topology, PlanOptions(max_tokens_per_rank=16, static_cp_size=wrong))


def test_static_never_fails_where_the_cp_size_does_not_divide_the_lanes():
    model = tiny_cost_model(Topology(num_lanes=3), max_tokens_per_rank=16)
    samples = samples_of([30, 20, 10, 5])
    plan = build_plan(pack_static(samples, model, 2), model, "static")
    check_plan(plan, samples)
    assert plan.cp_histogram == {2: 3}
    assert all(not micro_batch.bucket_of_lane(2).samples for micro_batch in plan.micro_batches)
