"""Static context parallelism: next-fit in input order, balanced buckets, and which CP size."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.packing.durations import bucket_ns, durations_of
from dynamic_cp.packing.judge import build_plan, price_packing
from dynamic_cp.packing.static import check_static_cp_size, fewest_rows, pack_balanced, pack_next_fit
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import PlanOptions, Sample, Topology
from tests.unit.packing.packings import check_packing, contents, descending
from tests.unit.support import causal, samples_of, tiny_cost_model


def durations(num_lanes, limit):
    return durations_of(tiny_cost_model(Topology(num_lanes=num_lanes), max_tokens_per_rank=limit).table, num_lanes)


def next_fit(lengths, num_lanes=2, limit=10, cp_size=1, rows_multiple=1):
    seqlens = descending(lengths)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # stable: ties by input order
    input_order = np.argsort(order)
    prices, k = durations(num_lanes, limit), cp_size.bit_length() - 1
    packing = pack_next_fit(seqlens, input_order, prices, k, num_lanes, rows_multiple)
    check_packing(packing, seqlens, prices, num_lanes)
    return contents(packing, seqlens)


def test_next_fit_follows_the_input_order():
    # Inside a bucket samples are listed by length; which bucket they are in follows the input.
    assert next_fit([6, 4, 1, 9, 8, 3]) == [[[6, 4], [9, 1]], [[8], [3]]]
    # 4 would fit to 6, but that bucket is closed.
    assert next_fit([6, 9, 4, 8]) == [[[6], [9]], [[4], [8]]]


def test_next_fit_splits_the_last_bins_to_fill_the_last_micro_batch():
    assert next_fit([6, 4, 9, 1, 2]) == [[[6, 4], [9]], [[2], [1]]]
    assert next_fit([9, 8, 7]) == [[[9], [8]], [[7]]]
    assert next_fit([6, 4]) == [[[6], [4]]]
    assert next_fit([3, 3, 3, 1], rows_multiple=2) == [[[3], [1]], [[3], [3]]]


def test_next_fit_counts_padding():
    assert next_fit([17, 3, 4], num_lanes=2, limit=10, cp_size=2) == [[[17]], [[4, 3]]]
    assert next_fit([16, 4, 1], num_lanes=2, limit=10, cp_size=2) == [[[16, 4]], [[1]]]


def balanced(lengths, num_rows, num_lanes=2, limit=100, cp_size=1):
    seqlens, prices = descending(lengths), durations(num_lanes, limit)
    packing = pack_balanced(causal(seqlens), prices, cp_size.bit_length() - 1, num_lanes, num_rows)
    if packing is None:
        return None
    check_packing(packing, seqlens, prices, num_lanes)
    assert packing.num_rows == num_rows
    return contents(packing, seqlens)


def test_balanced_puts_the_longest_first_into_the_cheapest_bucket():
    assert balanced([10, 60, 50, 20], 1) == [[[60, 10], [50, 20]]]
    # Buckets that last similarly long share a row, the longest first: here tokens count for more than attention.
    assert balanced([80, 20, 70, 10, 5, 6], 2) == [[[80], [70]], [[10, 6, 5], [20]]]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_balanced_is_longest_first_into_the_cheapest_with_room(cp_size):
    """Against the plain greedy, which looks at every bucket."""
    rng = random.Random(cp_size)
    none = 0
    for _ in range(200):
        num_lanes, num_rows = rng.randint(cp_size, 6), rng.randint(1, 4)
        seqlens = descending(rng.randint(1, 40) for _ in range(rng.randint(1, 25)))
        prices, k = durations(num_lanes, 40), cp_size.bit_length() - 1
        buckets = [[0.0, 0.0, 0.0] for _ in range(num_lanes // cp_size * num_rows)]
        room_for_all = True
        for seqlen in seqlens:
            padded = float(-(-seqlen // prices.multiples[k]) * prices.multiples[k])
            open_ones = [one for one in range(len(buckets)) if buckets[one][1] + padded <= prices.capacities[k]]
            if not open_ones:
                room_for_all = False
                continue
            one = min(open_ones, key=lambda index: (buckets[index][0], index))
            tokens, squares = buckets[one][1] + padded, buckets[one][2] + padded**2
            buckets[one] = [bucket_ns(prices, k, tokens, squares), tokens, squares]
        packing = pack_balanced(causal(seqlens), prices, k, num_lanes, num_rows)
        assert (packing is not None) == room_for_all
        if packing is None:
            none += 1
            continue
        tokens = np.bincount(
            packing.bucket_of_sample, -(-seqlens // prices.multiples[k]) * prices.multiples[k], minlength=len(buckets)
        )
        assert sorted(tokens) == sorted(tokens for _, tokens, _ in buckets)
    assert 10 < none < 190


def test_fewest_rows_counts_padding_and_whole_blocks():
    def fewest(lengths, cp_size, num_lanes=3, limit=10):
        return fewest_rows(descending(lengths), durations(num_lanes, limit), cp_size.bit_length() - 1, num_lanes)

    assert fewest([10, 10, 10], 1) == 1
    assert fewest([10, 10, 10, 1], 1) == 2
    assert fewest([20], 2) == 1  # three lanes hold one group of two
    assert fewest([17, 1], 2) == 2  # 20 + 4 padded tokens


def test_a_static_cp_size_that_cannot_be_is_refused():
    topology, options = Topology(num_lanes=6), PlanOptions(max_tokens_per_rank=16, cp_comm_types=("p2p",))
    for fine, seqlen in ((1, 16), (2, 1), (2, 32), (4, 64)):
        check_static_cp_size(fine, Sample(sample_id=0, seqlen=seqlen), topology, options)
    says = r"sample 0 has 33 tokens.*2 lanes holds 32.*--context-parallel-size"
    with pytest.raises(InfeasibleSampleError, match=says):
        check_static_cp_size(2, Sample(sample_id=0, seqlen=33), topology, options)
    for wrong in (3, 8, 0):
        with pytest.raises(InvalidInputError, match="--context-parallel-size"):
            check_static_cp_size(wrong, Sample(sample_id=0, seqlen=5), topology, options)


def test_lanes_that_no_group_covers_stay_empty():
    model = tiny_cost_model(Topology(num_lanes=3), max_tokens_per_rank=16)
    samples = samples_of([30, 20, 10, 5])
    seqlens = descending(sample.seqlen for sample in samples)
    packing = pack_next_fit(seqlens, np.arange(4), durations_of(model.table, 3), 1, 3, 1)
    plan = build_plan(samples, price_packing(causal(seqlens), packing, model), model, "static")
    check_plan(plan, samples)
    assert plan.cp_histogram == {2: 3}
    assert all(not micro_batch.bucket_of_lane(2).samples for micro_batch in plan.micro_batches)
