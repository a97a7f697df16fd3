"""Annealing of small batches: never worse, legal, the same each time, and every number it works with is exact."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from dynamic_cp.packing.durations import Packing, durations_of
from dynamic_cp.packing.judge import makespan_ns
from dynamic_cp.packing.polish import _is_legal, _move, _one_slot_a_sample, polish
from dynamic_cp.packing.static import pack_next_fit
from dynamic_cp.types import Topology
from tests.unit.packing.packings import check_packing, descending
from tests.unit.support import causal, tiny_cost_model


def one_a_row(lengths, num_lanes, **sizes):
    model = tiny_cost_model(Topology(num_lanes=num_lanes, **sizes), max_tokens_per_rank=64)
    seqlens = descending(lengths)
    durations = durations_of(model.table, num_lanes)
    packing = pack_next_fit(seqlens, np.arange(len(seqlens)), durations, 0, num_lanes, 1)
    return seqlens, packing, model, durations


@pytest.mark.by_day("1", "5", "8")
@pytest.mark.parametrize("num_lanes", [1, 2, 3, 5, 6, 8])
def test_what_is_legal_stays_on_the_lanes_in_the_rows_and_in_the_slots(num_lanes):
    """Kernels do not check bounds, so the judge of a move runs as Python here, which does."""
    is_legal = getattr(_is_legal, "py_func", _is_legal)
    seqlens, start, model, _ = one_a_row(range(20, 35), num_lanes)
    trial = _one_slot_a_sample(start, len(seqlens))
    before = tuple(part.copy() for part in trial)
    state = np.uint64(5)
    outcomes = Counter()
    for _ in range(2000):
        state, changed = _move(state, seqlens, model.table, start.num_rows, num_lanes, trial)
        state = np.uint64(state)
        legal = is_legal(seqlens, model.table, start.num_rows, num_lanes, trial)
        assert legal == _is_legal(seqlens, model.table, start.num_rows, num_lanes, trial)
        outcomes[bool(changed), bool(legal)] += 1
        if not legal:
            trial = tuple(part.copy() for part in before)
            continue
        before = tuple(part.copy() for part in trial)
        bucket_of_sample, rows, first_lanes, sizes = trial
        assert 0 <= bucket_of_sample.min() <= bucket_of_sample.max() < len(seqlens)
        assert 0 <= rows.min() <= rows.max() < start.num_rows
        used = np.unique(bucket_of_sample)
        assert (first_lanes[used] % (1 << sizes[used]) == 0).all()
        assert first_lanes[used].min() >= 0
        assert (first_lanes[used] + (1 << sizes[used])).max() <= num_lanes
    assert outcomes[True, True] > 100
    assert outcomes[True, False] > 100


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 6, 7])
def test_a_walk_stays_legal_and_never_gets_worse(num_lanes):
    rng = random.Random(num_lanes)
    better = 0
    for seed in range(12):
        pp_size = rng.choice([1, 2])
        lengths = [rng.randint(1, 64) for _ in range(rng.randint(2, 10))]
        seqlens, start, model, durations = one_a_row(lengths, num_lanes, pp_size=pp_size)
        found_ns, packing = polish(causal(seqlens), start, model, 1500, seed)
        check_packing(packing, seqlens, durations, num_lanes)
        assert found_ns == makespan_ns(causal(seqlens), packing, model)
        assert packing.num_rows <= start.num_rows
        assert found_ns <= makespan_ns(causal(seqlens), start, model)
        again_ns, again = polish(causal(seqlens), start, model, 1500, seed)
        assert again_ns == found_ns
        assert all(np.array_equal(one, other) for one, other in zip(packing, again, strict=True))
        better += found_ns < makespan_ns(causal(seqlens), start, model)
    assert better >= 6 or num_lanes == 1


def test_an_obvious_improvement_is_found():
    # All in one lane, in a row each; four lanes are free.
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=64)
    seqlens = descending([60, 60, 60, 60])
    start = Packing(4, np.arange(4), np.arange(4), np.zeros(4, np.int64), np.zeros(4, np.int64))
    found_ns, packing = polish(causal(seqlens), start, model, 2000)
    assert packing.num_rows <= 2
    assert found_ns < 0.35 * makespan_ns(causal(seqlens), start, model)
