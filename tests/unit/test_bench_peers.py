"""The planners that ours is compared with: legal plans, honest prices."""

import random
from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.peers import flexsp, hybrid, wlb
from benchmarks.peers.peer import PeerBucket, plan_of_rows
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import Topology
from tests.unit.support import CASES, frozen_cost_model, samples_of, tiny_cost_model

# PuLP 3 announces another way to make variables and solvers in PuLP 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")


def lognormal(seed: int, count: int, longest: int):
    generator = random.Random(seed)
    return samples_of(max(1, min(longest, int(generator.lognormvariate(4.5, 1)))) for _ in range(count))


def test_0161_as_in_the_frozen_bench():
    pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule", reason="needs megatron-core 0.16")
    model = frozen_cost_model(16384, num_lanes=64)
    samples = samples_of(np.load(CASES / "lengths" / "github_pp1_n64_128k.seed0.npy"))
    result = hybrid.peer(samples, model)
    assert result.seconds == pytest.approx(59.651723856514, rel=1e-9)  # megatron_0161_s of the frozen bench
    assert result.plan is None
    assert result.note == "5 barriers"


def test_flexsp_length_classes_add_the_fewest_tokens(monkeypatch):
    monkeypatch.setattr(flexsp, "MAX_CLASSES", 3)
    lengths = [100, 99, 98, 60, 55, 54, 10, 9, 1]

    def added(one, two):
        classes = lengths[:one], lengths[one:two], lengths[two:]
        return sum(held[0] * len(held) - sum(held) for held in classes)

    one, two, _ = flexsp._length_classes(samples_of(lengths))
    assert added(one, one + two) == min(added(*places) for places in combinations(range(1, 9), 2))


@pytest.mark.parametrize(
    ("topology", "note"), [(Topology(num_lanes=4, pp_size=2), "pipeline"), (Topology(num_lanes=6), "power of two")]
)
def test_0161_is_not_defined(topology, note):
    pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule", reason="needs megatron-core 0.16")
    result = hybrid.peer(samples_of([10, 20]), tiny_cost_model(topology))
    assert result.seconds is None
    assert note in result.note


@pytest.mark.by_day("topology3")
@pytest.mark.parametrize(
    "topology",
    [
        Topology(num_lanes=4),
        Topology(num_lanes=6),
        Topology(num_lanes=4, pp_size=2),
        Topology(num_lanes=4, tp_size=3, pp_size=2, vp_size=2, sequence_parallel=True),
    ],
)
def test_plans_are_legal_and_priced_by_the_simulator(topology):
    pytest.importorskip("pulp", reason="the FlexSP peer needs it")
    model = tiny_cost_model(topology, max_tokens_per_rank=256)
    samples = lognormal(1, 24, 900)
    results = [wlb.peer(samples, model), flexsp.peer(samples, model, seconds_per_solve=1, num_counts=1)]
    for result in results:
        assert result.plan is not None, result.note
        check_plan(result.plan, samples)
        assert result.seconds == makespan_ns(result.plan, model) / 1e9
    assert len({bucket.cp_size for bucket in results[0].plan.buckets if bucket.samples}) == 1, "WLB has one CP size"


def test_one_sample():
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=256)
    samples = samples_of([1000])
    check_plan(wlb.peer(samples, model).plan, samples)
    pytest.importorskip("pulp", reason="the FlexSP peer needs it")
    check_plan(flexsp.peer(samples, model, seconds_per_solve=1).plan, samples)


def test_wlb_takes_more_micro_batches_where_documents_fit_nowhere():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=100)
    samples = samples_of([60] * 6)  # 360 tokens, but no bucket of 100 holds two of them
    result = wlb.peer(samples, model)
    check_plan(result.plan, samples)
    assert result.plan.num_microbatches >= 3


@pytest.mark.nightly
def test_flexsp_finds_the_best_micro_batch():
    """Up to 16 lengths are their own classes, so the MILP is exact: compare with all assignments of a micro-batch."""
    pytest.importorskip("pulp", reason="the FlexSP peer needs it")
    model = tiny_cost_model(Topology(num_lanes=4), max_tokens_per_rank=256)
    layouts = ([(0, 4)], [(0, 2), (2, 2)], [(0, 2), (2, 1), (3, 1)], [(lane, 1) for lane in range(4)])
    sizes = set()
    for seed in range(4):
        samples = lognormal(seed, 5, 400)
        assert sum(sample.seqlen for sample in samples) <= 1000, "one micro-batch holds them all"
        best_s = np.inf
        for layout in layouts:
            for choice in product(range(len(layout)), repeat=len(samples)):
                row = [
                    PeerBucket(
                        lane, cp_size, [sample for sample, at in zip(samples, choice, strict=True) if at == index]
                    )
                    for index, (lane, cp_size) in enumerate(layout)
                ]
                plan = plan_of_rows([row], model, "brute")
                try:
                    check_plan(plan, samples)
                except ValueError:
                    continue
                best_s = min(best_s, makespan_ns(plan, model) / 1e9)
        result = flexsp.peer(samples, model, seconds_per_solve=5, num_counts=1)
        assert result.plan.num_microbatches == 1
        assert best_s * (1 - 1e-9) <= result.seconds <= best_s * (1 + flexsp.GAP)
        sizes |= set(result.plan.cp_histogram)
    assert len(sizes) > 1
