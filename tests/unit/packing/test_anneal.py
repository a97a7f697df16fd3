"""Annealing without a pipeline: legal, the same each time, never worse where it is used, and lanes never wait."""

from __future__ import annotations

import numpy as np
import pytest

from dynamic_cp.packing.anneal import anneal
from dynamic_cp.packing.durations import durations_of
from dynamic_cp.packing.judge import grid_of_packing, makespan_ns
from dynamic_cp.packing.static import pack_next_fit
from dynamic_cp.types import Topology
from tests.unit.packing.packings import check_packing, descending
from tests.unit.support import causal, tiny_cost_model


def job(num_lanes, seed, count=24, limit=64):
    model = tiny_cost_model(Topology(num_lanes=num_lanes), max_tokens_per_rank=limit)
    lengths = np.random.default_rng(seed).lognormal(3.0, 0.9, count).astype(int).clip(1, limit)
    seqlens = descending(lengths.tolist())
    durations = durations_of(model.table, num_lanes)
    return seqlens, model, durations, pack_next_fit(seqlens, np.arange(count), durations, 0, num_lanes, 1)


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 6, 7, 8])
def test_a_walk_stays_legal_and_repeats(num_lanes):
    better = 0
    for seed in range(8):
        seqlens, model, durations, start = job(num_lanes, seed)
        packing = anneal(causal(seqlens), start, model, 3000, seed)
        check_packing(packing, seqlens, durations, num_lanes)
        assert packing.num_rows <= start.num_rows
        again = anneal(causal(seqlens), start, model, 3000, seed)
        assert all(np.array_equal(one, other) for one, other in zip(packing, again, strict=True))
        better += makespan_ns(causal(seqlens), packing, model) < makespan_ns(causal(seqlens), start, model)
    assert better >= 6 or num_lanes == 1


@pytest.mark.parametrize("num_lanes", [4, 6, 8])
def test_lanes_last_as_long_as_their_buckets_in_sum(num_lanes):
    """Groups shrink from row to row, so nobody waits; a walk adds up what the simulator finds."""
    for seed in range(8):
        seqlens, model, _, start = job(num_lanes, seed)
        packing = anneal(causal(seqlens), start, model, 3000, seed)
        grid = grid_of_packing(causal(seqlens), packing, model)
        sums = grid.chunk_ns.sum(axis=(0, 1)) + grid.edge_ns.sum(axis=(0, 1, 2))
        assert makespan_ns(causal(seqlens), packing, model) == sums.max()


def test_a_merger_gives_a_long_sample_more_lanes():
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=1024)
    seqlens = descending([1000, 20, 20, 20])
    start = pack_next_fit(seqlens, np.arange(4), durations_of(model.table, 4), 0, 4, 1)
    packing = anneal(causal(seqlens), start, model, 4000)
    assert packing.log2_cp_sizes[packing.bucket_of_sample[0]] == 2
    assert makespan_ns(causal(seqlens), packing, model) < 0.6 * makespan_ns(causal(seqlens), start, model)
