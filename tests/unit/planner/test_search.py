"""plan_global_batch: limits, errors, determinism across processes, and that its choices pay."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.search import POLICIES, check_feasible, plan_global_batch
from dynamic_cp.serialize import digest
from dynamic_cp.types import PlanOptions, Sample, Topology
from dynamic_cp.validate import check_plan
from tests.unit.planner.support import TINY_HARDWARE, TINY_MODEL, samples_of


def plan(samples, topology, policy="dynamic", **options):
    settings = {"max_tokens_per_rank": 256, "bytes_per_element": 4, **options}
    return plan_global_batch(
        samples,
        topology=topology,
        model=TINY_MODEL,
        hardware=TINY_HARDWARE,
        options=PlanOptions(**settings),
        policy=policy,
    )


def heavy_tailed(count: int, longest: int, seed: int = 0):
    lengths = np.random.default_rng(seed).lognormal(4.0, 1.2, count).astype(int).clip(1, longest)
    return samples_of([longest, *lengths[1:]])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_prediction_describes_the_plan(policy):
    samples = heavy_tailed(60, 1000)
    planned = plan(samples, Topology(num_lanes=4), policy)
    check_plan(planned.plan, samples)
    assert planned.plan.policy == policy
    assert len(planned.predicted_busy_s) == 4
    assert 0 < max(planned.predicted_busy_s) <= planned.predicted_s
    assert f"{planned.predicted_s:.6f} s" in planned.reason
    assert "\n" not in planned.reason


def test_dynamic_beats_static_clearly_on_a_heavy_tail():
    samples = heavy_tailed(60, 1000)
    dynamic, balanced, static = (
        plan(samples, Topology(num_lanes=4), policy).predicted_s for policy in ("dynamic", "balanced", "static")
    )
    assert dynamic < 0.95 * balanced
    assert balanced < static


def test_the_reason_names_the_runner_up():
    reason = plan(heavy_tailed(60, 1000), Topology(num_lanes=4)).reason
    assert reason.startswith("dynamic cp<=4 m=")
    assert "; next " in reason


def test_min_and_max_cp_size_bind():
    samples = samples_of([500, *[30] * 40])
    topology = Topology(num_lanes=8)
    free = plan(samples, topology).plan.cp_histogram
    assert (min(free), max(free)) == (1, 8)
    assert min(plan(samples, topology, min_cp_size=2).plan.cp_histogram) == 2
    assert max(plan(samples, topology, max_cp_size=2).plan.cp_histogram) == 2
    assert set(plan(samples, topology, min_cp_size=4, max_cp_size=4).plan.cp_histogram) == {4}
    # A static size outside the allowed ones is no candidate of the dynamic policy.
    assert set(plan(samples, topology, min_cp_size=4, static_cp_size=2).plan.cp_histogram) <= {4, 8}


def test_a_sample_that_fits_no_group():
    with pytest.raises(InfeasibleSampleError) as caught:
        plan((Sample(sample_id=7, seqlen=1025), Sample(sample_id=8, seqlen=3)), Topology(num_lanes=6))
    text = str(caught.value)
    assert "sample 7 has 1025 tokens" in text
    assert "4 lanes holds 1024" in text
    for flag in ("--max-seqlen-per-dp-cp-rank", "--max-dynamic-cp-size", "--seq-length"):
        assert flag in text
    assert (caught.value.sample_id, caught.value.seqlen, caught.value.capacity_tokens) == (7, 1025, 1024)
    plan((Sample(sample_id=7, seqlen=1024),), Topology(num_lanes=6))


def test_check_feasible_draws_the_same_line():
    options = PlanOptions(max_tokens_per_rank=256, max_cp_size=2)
    check_feasible(512, Topology(num_lanes=6), options)
    with pytest.raises(InfeasibleSampleError, match=r"513 tokens.*2 lanes holds 512 \(256 per rank\)"):
        check_feasible(513, Topology(num_lanes=6), options)


def test_a_static_size_that_is_too_small_is_refused_for_static_but_not_for_dynamic():
    samples, topology = samples_of([500, 20]), Topology(num_lanes=4)
    for policy in ("static", "balanced"):
        with pytest.raises(InfeasibleSampleError, match="--context-parallel-size"):
            plan(samples, topology, policy, static_cp_size=1)
    check_plan(plan(samples, topology, static_cp_size=1).plan, samples)


def test_bad_input():
    with pytest.raises(InvalidInputError, match="0 samples"):
        plan((), Topology(num_lanes=2))
    with pytest.raises(InvalidInputError, match="sample_id 1 is there twice, with 5 and 6 tokens"):
        plan((Sample(sample_id=1, seqlen=5), Sample(sample_id=1, seqlen=6)), Topology(num_lanes=2))
    with pytest.raises(InvalidInputError, match="'magic' is unknown: use one of dynamic, static, balanced"):
        plan(samples_of([1]), Topology(num_lanes=2), "magic")


PROGRAM = """
from tests.unit.planner.test_search import *
print(*(digest(plan(heavy_tailed(40, 900), Topology(num_lanes=6, pp_size=2), policy).plan) for policy in POLICIES))
"""


def test_every_process_makes_the_same_plan():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.split()
        for seed in ("0", "1")
    ]
    here = [digest(plan(heavy_tailed(40, 900), Topology(num_lanes=6, pp_size=2), policy).plan) for policy in POLICIES]
    assert outputs == [here, here]
    assert len(set(here)) == 3
