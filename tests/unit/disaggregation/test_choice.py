"""A pool is taken where it is faster, and only compared: nothing runs it yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamic_cp.cli import main
from dynamic_cp.comparison import compare_policies, to_dict
from dynamic_cp.disaggregation.choice import choose
from dynamic_cp.disaggregation.prices import TaskOptions
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.setting import TASK_POLICIES
from dynamic_cp.types import CP_COMM_TYPES, PlanOptions, Problem, Sample, Topology
from tests.unit.disaggregation.test_task_plans import HARDWARE, MODEL, K

OPTIONS = PlanOptions(max_tokens_per_rank=64 * K, recompute="full", cp_comm_types=CP_COMM_TYPES)


def problem_of(pp_size: int, vp_size: int = 1) -> Problem:
    topology = Topology(num_lanes=4, tp_size=8, pp_size=pp_size, vp_size=vp_size, sequence_parallel=True)
    return Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=OPTIONS)


def prices(problem: Problem) -> CostModel:
    return CostModel(MODEL, HARDWARE, problem.topology, OPTIONS)


ONE_GIANT = [Sample(sample_id=number, seqlen=200 * K if number == 0 else 8 * K) for number in range(90)]
EVEN = [Sample(sample_id=number, seqlen=8 * K) for number in range(64)]


def test_a_sample_that_outlasts_all_others_makes_the_pool_faster() -> None:
    problem = problem_of(4)
    choice = choose(ONE_GIANT, problem, prices(problem))
    assert choice.is_pool
    assert choice.makespan_s == choice.planned.makespan_s  # type: ignore[union-attr]
    assert "times as fast as dynamic" in choice.reason


@pytest.mark.parametrize(("pp_size", "vp_size", "words"), [(1, 1, "as fast as the pool"), (2, 2, "interleaving")])
def test_where_the_pool_is_slower_or_impossible_the_plan_is_the_dynamic_one(
    pp_size: int, vp_size: int, words: str
) -> None:
    problem = problem_of(pp_size, vp_size)
    choice = choose(EVEN, problem, prices(problem))
    assert not choice.is_pool
    assert choice.planned.plan == plan_problem(problem, EVEN).plan
    assert words in choice.reason


def test_policies_of_tasks_are_compared_with_all_others() -> None:
    names = ("dynamic", "wlb", "wlb-exposed", *TASK_POLICIES)
    problem = problem_of(4)
    comparison = compare_policies(
        [ONE_GIANT], topology=problem.topology, model=MODEL, hardware=HARDWARE, options=OPTIONS, policies=names
    )
    found = {one.policy: one.iteration_s for one in comparison.policies}
    assert tuple(found) == names
    assert found["with-pool"] == min(found["dynamic"], found["pool"]) == found["pool"]
    assert found["pool"] < found["pool-quota"]
    assert found["wlb"] <= found["wlb-exposed"]
    assert comparison.policy("pool").peak_bytes == comparison.policy("with-pool").peak_bytes
    assert comparison.policy("stage-tasks").parts is not None
    assert set(to_dict(comparison, {})["policies"]) == set(names)
    margin = compare_policies(
        [ONE_GIANT], topology=problem.topology, model=MODEL, hardware=HARDWARE, options=OPTIONS, policies=("pool",),
        task_options=TaskOptions(noise_margin=0.3, ping_pong=False),
    )  # fmt: skip
    assert margin.policy("pool").iteration_s > 1.1 * found["pool"]


@pytest.mark.parametrize("policy", TASK_POLICIES)
def test_what_nothing_runs_is_refused_by_name(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=rf"policy {policy} gives attention .* not run yet"):
        plan_problem(replace(problem_of(4), policy=policy), EVEN)
    assert main(["plan", "--lengths", "github", "--lanes", "4", "--policy", policy]) == 2
    assert f"policy {policy} gives attention to servers" in capsys.readouterr().err
