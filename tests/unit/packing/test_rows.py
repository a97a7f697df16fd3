"""Rows filled to targets: mixed CP sizes inside a row, and the least factor that places all samples."""

from __future__ import annotations

import random

import numpy as np

from dynamic_cp.packing.durations import Packing, bucket_ns, durations_of, sample_ns
from dynamic_cp.packing.rows import RowTargets, alone_ns, fill_least
from dynamic_cp.types import Topology
from tests.unit.packing.packings import check_packing, contents, descending
from tests.unit.support import causal, tiny_cost_model


def setting(num_lanes=4, **options):
    model = tiny_cost_model(Topology(num_lanes=num_lanes), **{"max_tokens_per_rank": 128, **options})
    return durations_of(model.table, num_lanes)


def filled(lengths, row_lanes, targets, floors=None, low=1.0, high=1.0, num_steps=0, durations=None):
    """Return (factor, packing); each row has its own lanes, from lane 0 on."""
    seqlens, durations = descending(lengths), durations or setting()
    alone = alone_ns(causal(seqlens), durations, max(row_lanes).bit_length())
    floors = np.zeros(len(targets)) if floors is None else np.array(floors, float)
    rows = RowTargets(np.array(row_lanes), np.array(targets, float), floors)
    factor, filling = fill_least(causal(seqlens), durations, alone, rows, (low, high), num_steps)
    if factor < 0:
        return factor, None
    packing = Packing(len(row_lanes), *filling)
    check_packing(packing, seqlens, durations, max(row_lanes))
    return factor, packing


def test_the_longest_sample_opens_at_the_smallest_size_that_meets_the_target():
    durations = setting()
    target = sample_ns(durations, 1, 200, 1.0)
    _, packing = filled([200, 100, 90], [4], [target])
    assert contents(packing, descending([200, 100, 90])) == [[[200], [100], [90]]]
    assert packing.log2_cp_sizes[packing.bucket_of_sample].tolist() == [1, 0, 0]
    # One nanosecond less, and it takes four lanes; the others do not fit on them.
    factor, _ = filled([200, 100, 90], [4], [target - 1])
    assert factor == -1


def test_a_bucket_is_topped_up_to_its_target_with_the_longest_that_fit():
    durations = setting(1)
    target = bucket_ns(durations, 0, 60.0, 2000.0) + 1  # 40 + 20 tokens
    _, packing = filled([40, 30, 20, 10], [1, 1], [target, target], durations=durations)
    assert contents(packing, descending([40, 30, 20, 10])) == [[[40, 20]], [[30, 10]]]


def test_the_factor_is_minus_one_when_no_factor_places_all_samples():
    durations = setting(2)
    assert filled([128, 128, 1], [2], [1e12], low=0.5, high=2.0, num_steps=5, durations=durations)[0] == -1
    assert filled([128, 127, 1], [2], [1e12], low=0.5, high=2.0, num_steps=5, durations=durations)[0] > 0
    assert filled([300], [2], [1e12], durations=durations)[0] == -1


def test_every_bucket_keeps_its_rows_target():
    rng = random.Random(3)
    placed, mixed = 0, 0
    for _ in range(150):
        num_lanes = rng.choice([1, 2, 4, 6, 7])
        durations = setting(num_lanes, cp_comm_types=("p2p", "all_gather"))
        row_lanes = [rng.randint(1, num_lanes) for _ in range(rng.randint(1, 5))]
        targets = [rng.choice([0.0, 1.0]) * rng.uniform(1e6, 6e7) for _ in row_lanes]
        lengths = [rng.randint(1, 60 * rng.choice([1, 4])) for _ in range(rng.randint(1, 12))]
        factor, packing = filled(lengths, row_lanes, targets, low=0.2, high=3.0, num_steps=6, durations=durations)
        if packing is None:
            continue
        placed += 1
        seqlens = descending(lengths)
        for bucket, row in enumerate(packing.rows):
            k = packing.log2_cp_sizes[bucket]
            padded = -(-seqlens[packing.bucket_of_sample == bucket] // durations.multiples[k]) * durations.multiples[k]
            assert len(padded), "no bucket is empty"
            assert bucket_ns(durations, k, float(padded.sum()), float((padded**2).sum())) <= targets[row] * factor
            assert packing.first_lanes[bucket] + (1 << k) <= row_lanes[row]
        mixed += len(set(packing.log2_cp_sizes.tolist())) > 1
    assert placed > 50
    assert mixed > 10
