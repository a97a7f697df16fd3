"""A pool is taken where it is faster."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.decide.cli import main
from dynamic_cp.decide.comparison import compare_policies, to_dict
from dynamic_cp.errors import InfeasibleSampleError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.plans.serialize import plan_from_dict
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pool.kind import choose
from dynamic_cp.pool.legal import most_fetched, peak_in_ticks
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.pool.tasks import SERVER
from dynamic_cp.pool.ticks import num_ticks
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_batch, plan_problem
from dynamic_cp.types import CP_COMM_TYPES, PlanOptions, Problem, Sample, Topology
from dynamic_cp.types.placement import HOLDER
from tests.unit import support
from tests.unit.pool.test_task_plans import HARDWARE, MODEL, K

OPTIONS = PlanOptions(max_tokens_per_rank=64 * K, recompute="full", cp_comm_types=CP_COMM_TYPES)


def problem_of(pp_size: int, vp_size: int = 1) -> Problem:
    topology = Topology(num_lanes=4, tp_size=8, pp_size=pp_size, vp_size=vp_size, sequence_parallel=True)
    return Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=OPTIONS)


def prices(problem: Problem) -> CostModel:
    return CostModel(replace(problem, options=OPTIONS))


ONE_GIANT = [Sample(sample_id=number, seqlen=200 * K if number == 0 else 8 * K) for number in range(60)]
EVEN = [Sample(sample_id=number, seqlen=8 * K) for number in range(64)]


@pytest.mark.nightly
def test_a_job_with_model_chunks_has_a_pool_of_chunks() -> None:
    problem = replace(problem_of(4, 2), options=replace(OPTIONS, pool="auto"))
    planned = plan_batch(problem, ONE_GIANT)
    assert planned.plan.extension is not None
    assert len(planned.plan.extension.forward) == num_ticks(4, 2, planned.plan.num_microbatches)
    whole = plan_batch(replace(problem_of(4), options=replace(OPTIONS, pool="auto")), ONE_GIANT)
    assert planned.predicted_s < whole.predicted_s


@pytest.mark.by_day("2-2")
@pytest.mark.parametrize(("pp_size", "vp_size"), [(1, 1), (2, 2)])
def test_where_the_pool_is_slower_the_plan_is_the_dynamic_one(pp_size: int, vp_size: int) -> None:
    problem = problem_of(pp_size, vp_size)
    choice = choose(EVEN, problem, prices(problem))
    assert choice.planned.plan.extension is None
    assert choice.planned.plan == plan_problem(problem, EVEN).plan
    assert "as fast as the pool" in choice.reason


@pytest.mark.nightly
def test_policies_of_tasks_are_compared_with_all_others() -> None:
    names = ("dynamic", "pool", "with-pool")
    problem = problem_of(4)
    comparison = compare_policies(
        [ONE_GIANT], topology=problem.topology, model=MODEL, hardware=HARDWARE, options=OPTIONS, policies=names
    )
    found = {one.policy: one.iteration_s for one in comparison.policies}
    assert tuple(found) == names
    assert found["with-pool"] == min(found["dynamic"], found["pool"]) == found["pool"]
    assert comparison.policy("pool").peak_bytes == comparison.policy("with-pool").peak_bytes
    assert set(to_dict(comparison, {})["policies"]) == set(names)
    margin = compare_policies(
        [ONE_GIANT], topology=problem.topology, model=MODEL, hardware=HARDWARE, options=OPTIONS, policies=("pool",),
        task_options=TaskOptions(noise_margin=0.3, ping_pong=False),
    )  # fmt: skip
    assert margin.policy("pool").iteration_s > 1.1 * found["pool"]


def test_a_run_has_the_pool_where_it_may_and_where_that_is_faster() -> None:
    problem = problem_of(4)
    assert plan_batch(problem, ONE_GIANT).plan.extension is None
    chosen = plan_batch(replace(problem, options=replace(OPTIONS, pool="auto")), ONE_GIANT)
    assert chosen.plan.extension is not None
    assert chosen.plan.extension.num_nano_batches == 2
    assert "times as fast as dynamic" in chosen.reason
    assert len(chosen.predicted_busy_s) == 4
    assert 1.0 <= chosen.imbalance < 1.5
    assert 0 < max(chosen.predicted_busy_s) < chosen.predicted_s
    with pytest.raises(UnsupportedFeatureError, match="policy with-pool is dynamic with PlanOptions"):
        plan_problem(replace(problem, policy="with-pool"), EVEN)


@pytest.mark.nightly
def test_whether_a_pool_is_faster_is_judged_as_it_runs() -> None:
    """In two nano-batches, or, where that is asked for, with the exchange of every layer in the open."""
    problem = problem_of(4)
    auto, always = (replace(problem, options=replace(OPTIONS, pool=pool)) for pool in ("auto", "always"))
    chosen = plan_batch(auto, ONE_GIANT)
    assert chosen.plan == plan_batch(always, ONE_GIANT).plan
    whole = plan_batch(replace(auto, options=replace(OPTIONS, pool="auto", ping_pong=False)), ONE_GIANT)
    assert whole.plan.extension is not None
    assert whole.plan.extension.num_nano_batches == 1
    assert whole.predicted_s > 1.02 * chosen.predicted_s
    noisy = plan_batch(replace(auto, options=replace(OPTIONS, pool="auto", noise_margin=9.0)), ONE_GIANT)
    assert noisy.plan.extension is None
    assert "as fast as the pool" in noisy.reason
    static = replace(auto, policy="static")
    assert plan_batch(static, ONE_GIANT).plan.extension is None


@pytest.mark.by_day("2-1-1", "3-2-2")
@pytest.mark.parametrize(
    ("lanes", "tp_size", "vp_size", "limit", "longest"),
    [
        (2, 1, 1, 100, 200),  # two lanes, filled to the last token: what a run plans at start with --seq-length 200
        (1, 2, 1, 64, 64), (3, 2, 2, 250, 497), (4, 1, 1, 24, 93), (8, 2, 1, 1024, 8192),
    ],
)  # fmt: skip
def test_a_pool_holds_every_batch_that_the_planner_holds(
    lanes: int, tp_size: int, vp_size: int, limit: int, longest: int
) -> None:
    topology = Topology(num_lanes=lanes, tp_size=tp_size, pp_size=2, vp_size=vp_size, sequence_parallel=tp_size > 1)
    problem = support.problem_of(topology, MODEL, HARDWARE, max_tokens_per_rank=limit, pool="always")
    samples = [Sample(sample_id=number, seqlen=max(1, longest >> number % 8)) for number in range(16)]
    plan_problem(replace(problem, options=replace(problem.options, pool="off")), samples)
    plan = plan_batch(problem, samples).plan
    assert plan.extension is not None
    check_plan(plan, samples)
    assert lane_tokens_of(plan).max() <= limit


def test_a_sample_that_no_pool_holds_is_refused_with_what_helps() -> None:
    problem = problem_of(2)
    small = replace(problem, options=replace(OPTIONS, max_tokens_per_rank=1024, pool="always"))
    too_long = [Sample(sample_id=0, seqlen=4097)]
    with pytest.raises(InfeasibleSampleError, match="has 4097 tokens, a micro-batch of 4 lanes holds 4096: raise"):
        plan_batch(small, too_long)
    enough = replace(small, options=replace(small.options, max_tokens_per_rank=1032))
    assert plan_batch(enough, too_long).plan.extension is not None


def test_servers_that_would_fetch_too_much_compute_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem_of(4), options=replace(OPTIONS, pool="always"))
    monkeypatch.setattr("dynamic_cp.pool.legal._MOST_QUERIES", 0)
    plan = plan_batch(problem, ONE_GIANT).plan
    assert plan.extension is not None
    assert plan.policy == "pool"
    for tasks in plan.extension.forward:
        assert (tasks.rows[:, HOLDER] == tasks.rows[:, SERVER]).all()


@pytest.mark.parametrize(("lanes", "tp_size", "pp_size"), [(2, 8, 2), (4, 8, 4), (64, 2, 2)])
def test_the_limit_that_memory_sets_is_kept_by_every_legal_plan(lanes: int, tp_size: int, pp_size: int) -> None:
    topology = Topology(num_lanes=lanes, tp_size=tp_size, pp_size=pp_size, sequence_parallel=True)
    options = replace(OPTIONS, pool="always")
    memory = MemoryModel(Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=options))
    limit = memory.max_tokens_per_rank(64 * K)
    held = np.full((5 * pp_size, lanes), limit, np.int64)
    queries, keys = most_fetched(topology)
    # `check_pool` refuses a server that fetches a token more; what there is of others' tokens in a tick bounds it, too.
    assert keys == min(max(32, lanes), lanes * pp_size - 1)
    most = np.array([[[queries * limit] * lanes, [keys * limit] * lanes]] * pp_size, np.int64)
    peak = peak_in_ticks(memory, held, most, in_nano_batches=True, has_relays=True)
    assert max(stage.total_bytes for stage in peak) <= memory.available_bytes
    # A limit that is given has to hold plans that fetch less.
    memory.check_limit_fits(limit)
    with pytest.raises(MemoryLimitError, match="tokens per rank in ticks needs"):
        memory.check_limit_fits(20 * limit)


@pytest.mark.nightly
def test_the_command_plans_judges_and_refuses_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, plan = tmp_path / "lengths.txt", tmp_path / "plan.json"
    lengths.write_text("\n".join(str(sample.seqlen) for sample in ONE_GIANT))
    words = ["plan", "--lengths", str(lengths), "--tp", "8", "--recompute", "full", "--max-tokens-per-rank", "65536"]
    piped = [*words, "--lanes", "4", "--pp", "4"]
    assert main([*piped, "--policy", "with-pool", "--output", str(plan)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"pool \d+ tasks forward, 16 servers", said)
    assert "times as fast as dynamic" in said
    whole = tmp_path / "whole.json"
    assert main([*piped, "--policy", "with-pool", "--no-ping-pong", "--output", str(whole)]) == 0
    pools = [plan_from_dict(json.loads(one.read_text())).extension for one in (plan, whole)]
    assert [pool and pool.num_nano_batches for pool in pools] == [2, 1]
    capsys.readouterr()
    assert main(["check", str(plan), "--lengths", str(lengths)]) == 0
    assert "on 16 servers" in capsys.readouterr().out
    assert main([*piped, "--vpp", "2", "--policy", "with-pool", "--output", str(plan)]) == 0
    assert "16 servers" in capsys.readouterr().out
    assert main(["check", str(plan), "--lengths", str(lengths)]) == 0
    assert "on 16 servers" in capsys.readouterr().out
    for more, reason in (
        (["--bound"], "--bound is one of plans whose attention stays on its stage"),
        (["--noise-margin", "-1"], "noise_margin is -1.0"),
    ):
        assert main([*piped, "--policy", "pool", *more]) == 2
        assert reason in capsys.readouterr().err
