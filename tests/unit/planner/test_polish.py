"""Annealing of small batches: never worse, legal, the same each time, and every number it works with is exact."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dynamic_cp.packing.durations import durations_of
from dynamic_cp.packing.judge import makespan_ns
from dynamic_cp.packing.polish import _is_legal, _move, _one_slot_a_sample, polish, steps_within
from dynamic_cp.packing.static import pack_next_fit
from dynamic_cp.packing.table import Packing
from dynamic_cp.types import Topology
from tests.unit.planner.packings import check_packing, descending
from tests.unit.planner.support import tiny_cost_model


def one_a_row(lengths, num_lanes, **sizes):
    model = tiny_cost_model(Topology(num_lanes=num_lanes, **sizes), max_tokens_per_rank=64)
    seqlens = descending(lengths)
    durations = durations_of(model.table, num_lanes)
    packing = pack_next_fit(seqlens, np.arange(len(seqlens)), durations, 0, num_lanes, 1)
    return seqlens, packing, model, durations


# Not run: what they write out of bounds may end the process.
RUINOUS = pytest.mark.xfail(run=False, reason="see BEYOND")
BEYOND = pytest.mark.xfail(
    strict=True, reason="merging buckets makes groups beyond the last lane (lanes 2-3 of 3), which kernels then write"
)


@pytest.mark.parametrize("num_lanes", [1, 2, 8, *(pytest.param(lanes, marks=BEYOND) for lanes in (3, 5, 7))])
def test_no_move_leaves_the_lanes_the_rows_or_the_slots(num_lanes):
    """A later check cannot mend it: the kernels that check and price a state do not check bounds."""
    seqlens, start, model, _ = one_a_row(range(20, 35), num_lanes)
    trial = _one_slot_a_sample(start, len(seqlens))
    state = np.uint64(5)
    changes = 0
    for _ in range(3000):
        state, changed = _move(state, seqlens, model.table, start.num_rows, num_lanes, trial)
        state = np.uint64(state)
        changes += changed
        bucket_of_sample, rows, first_lanes, sizes = trial
        assert 0 <= bucket_of_sample.min() <= bucket_of_sample.max() < len(seqlens)
        assert 0 <= rows.min() <= rows.max() < start.num_rows
        used = np.unique(bucket_of_sample)
        assert (first_lanes[used] % (1 << sizes[used]) == 0).all()
        assert first_lanes[used].min() >= 0
        assert (first_lanes[used] + (1 << sizes[used])).max() <= num_lanes
        if not _is_legal(seqlens, model.table, start.num_rows, num_lanes, trial):
            trial = _one_slot_a_sample(start, len(seqlens))
    assert changes > 500


@pytest.mark.parametrize("num_lanes", [1, 2, 4, *(pytest.param(lanes, marks=RUINOUS) for lanes in (3, 5, 7))])
def test_a_walk_stays_legal_and_never_gets_worse(num_lanes):
    rng = random.Random(num_lanes)
    better = 0
    for seed in range(12):
        pp_size = rng.choice([1, 2])
        lengths = [rng.randint(1, 64) for _ in range(rng.randint(2, 10))]
        seqlens, start, model, durations = one_a_row(lengths, num_lanes, pp_size=pp_size)
        found_ns, packing = polish(seqlens, start, model, 1500, seed)
        check_packing(packing, seqlens, durations, num_lanes)
        assert found_ns == makespan_ns(seqlens, packing, model)
        assert packing.num_rows <= start.num_rows
        assert found_ns <= makespan_ns(seqlens, start, model)
        again_ns, again = polish(seqlens, start, model, 1500, seed)
        assert again_ns == found_ns
        assert all(np.array_equal(one, other) for one, other in zip(packing, again, strict=True))
        better += found_ns < makespan_ns(seqlens, start, model)
    assert better >= 6 or num_lanes == 1


def test_without_steps_it_returns_where_it_started():
    seqlens, start, model, _ = one_a_row([60, 50, 40, 30], 2)
    found_ns, packing = polish(seqlens, start, model, 0)
    assert found_ns == makespan_ns(seqlens, start, model)
    assert packing.num_rows == start.num_rows


def test_an_obvious_improvement_is_found():
    # All in one lane, in a row each; four lanes are free.
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=64)
    seqlens = descending([60, 60, 60, 60])
    start = Packing(4, np.arange(4), np.arange(4), np.zeros(4, np.int64), np.zeros(4, np.int64))
    found_ns, packing = polish(seqlens, start, model, 2000)
    assert packing.num_rows <= 2
    assert found_ns < 0.35 * makespan_ns(seqlens, start, model)


def test_steps_within_a_budget():
    seqlens, start, model, _ = one_a_row([60, 50, 40, 30], 2, pp_size=2)
    assert start.num_rows == 2
    assert steps_within(10_000, seqlens, start, model) == 10_000 // (2 * 2 * 2 * 2 + 8 * 4)
