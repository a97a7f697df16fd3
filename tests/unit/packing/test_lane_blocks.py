"""Packing for a pipeline: blocks of lanes, exact times of each, critical paths, and that learning pays."""

from __future__ import annotations

import numpy as np
import pytest

from dynamic_cp.packing.durations import durations_of
from dynamic_cp.packing.judge import build_plan, makespan_ns, price_packing
from dynamic_cp.packing.lane_blocks import EFFORTS, cut, pack_blocks
from dynamic_cp.packing.static import fewest_rows
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import Topology
from tests.unit.packing.packings import check_packing, deep_cost_model, descending
from tests.unit.support import causal, samples_of


def batch(num_samples, longest, seed=0):
    lengths = np.random.default_rng(seed).lognormal(3.5, 1.3, num_samples).astype(int).clip(1, longest)
    return descending([longest, *lengths[1:]])


def setting(num_lanes=8, pp_size=4, vp_size=1, **options):
    topology = Topology(num_lanes=num_lanes, pp_size=pp_size, vp_size=vp_size)
    return deep_cost_model(topology, **{"max_tokens_per_rank": 512, **options})


(FAST,) = EFFORTS["fast"]


def packed(seqlens, model, effort=None):
    durations = durations_of(model.table, model.topology.num_lanes)
    base = int(np.flatnonzero(durations.capacities)[0])
    fewest = fewest_rows(seqlens, durations, base, model.topology.num_lanes)
    return pack_blocks(causal(seqlens), model, fewest, effort or FAST)


def test_blocks_are_aligned_and_cover_all_lanes():
    for num_lanes in range(1, 70):
        for width in (1 << k for k in range(num_lanes.bit_length())):
            blocks = cut(num_lanes, width)
            first = 0
            for start, lanes in zip(blocks.first_lanes.tolist(), blocks.num_lanes.tolist(), strict=True):
                assert start == first
                assert start % lanes == 0
                assert lanes <= width
                first += lanes
            assert first == num_lanes
    assert cut(14, 4).num_lanes.tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize(
    ("num_lanes", "pp_size", "vp_size"), [(8, 4, 1), (7, 2, 1), (12, 3, 2), (1, 2, 1), (2, 8, 1), (6, 4, 2)]
)
def test_packings_are_legal_and_their_times_exact(num_lanes, pp_size, vp_size):
    model = setting(num_lanes, pp_size, vp_size)
    seqlens = batch(80, 400)
    results = packed(seqlens, model)
    assert results
    assert [one.makespan_ns for one in results] == sorted(one.makespan_ns for one in results)
    for one in results:
        check_packing(one.packing, seqlens, durations_of(model.table, num_lanes), num_lanes)
        assert one.makespan_ns == makespan_ns(causal(seqlens), one.packing, model)
        assert one.packing.num_rows % model.topology.num_microbatches_multiple == 0
        priced = price_packing(causal(seqlens), one.packing, model)
        check_plan(build_plan(samples_of(seqlens), priced, model, "blocks"), samples_of(seqlens))


def test_learning_never_loses_and_pays():
    """Against the packings that it starts from."""
    gains = []
    for seed in range(6):
        model, seqlens = setting(8, 4), batch(150, 900, seed)
        plain = packed(seqlens, model, FAST._replace(num_learned=0))
        learned = packed(seqlens, model)
        assert learned[0].makespan_ns <= plain[0].makespan_ns
        gains.append(1 - learned[0].makespan_ns / plain[0].makespan_ns)
    assert np.mean(gains) > 0.005
