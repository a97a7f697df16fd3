"""The planner raises, hangs or dies: the stated fallback or one error everywhere, soon, and nobody is left behind."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamic_cp.search.planner_process import static_fallback
from dynamic_cp.types import Problem
from megatron.dynamic_cp.plans import planner
from megatron.trainer.setup import planned_runtime
from tests import patience
from tests.faults.faulty_planner import FaultyProblem
from tests.faults.job import Job, RankEnd
from tests.trainer.commandline import command_line

WORDS = (
    "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 --num-layers 1 --lr-decay-iters 1000 --train-iters 6 "
    "--dynamic-cp-lookahead 1 --num-workers 0"
)
LIMIT_S = 40.0
pytestmark = pytest.mark.usefixtures("fresh_planners")
FAULT_LIMIT_S = 20.0
"""Seconds from a fault to the end of the last rank."""
PLAN_LIMIT = "--dynamic-cp-plan-timeout 8"
"""For planners that hang: a new one took more than 4 s to its first plan where other jobs had the cores."""


def faulty(rank: int, **fault: Any) -> None:
    if rank == 0:
        assert planned_runtime.Problem is Problem, "what is replaced is what a run takes"
        planned_runtime.Problem = partial(FaultyProblem, **fault)


def figures(ended: RankEnd) -> dict[int, str]:
    """Return iteration -> loss, gradient norm, micro-batches, CP sizes and padding from rank 0's log."""
    found = re.findall(r"iteration +(\d+)/.*?(lm loss: .*?)\| predicted", ended.output)
    return {int(number): text for number, text in found}


def loss(text: str) -> float:
    return float(text.split()[2])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    with Job(tmp_path_factory.mktemp("undisturbed"), command_line(WORDS)) as job:
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [0, 0], ended
    assert sorted(figures(ended[0])) == [1, 2, 3, 4, 5, 6]
    return figures(ended[0])


def run_job(folder: Path, *words: str, sabotage: Callable[[int], None] | None = None, code: int = 0) -> list[RankEnd]:
    with Job(folder, command_line(WORDS, *words), sabotage=sabotage) as job:
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [code, code], ended
    return ended


def check_static(ended: list[RankEnd], undisturbed: dict[int, str], iterations: set[int], why: str) -> None:
    """All ranks warned of these iterations and of no others; the losses are those of the undisturbed run."""
    for end in ended:
        warned = re.findall(r"step (\d+) runs the static plan: (.*)", end.output)
        assert {int(step) for step, _ in warned if int(step)} == iterations, end.output
        assert all(why in text for _, text in warned), warned
    got = figures(ended[0])
    assert sorted(got) == sorted(undisturbed)
    for iteration, expected in undisturbed.items():
        if iteration in iterations:
            assert re.search(r"\| cp2×\d+ \|", got[iteration]), "static CP"
        assert loss(got[iteration]) == pytest.approx(loss(expected), rel=1e-5)
    if 1 not in iterations:
        assert got[1] == undisturbed[1], "planned as ever"


@pytest.mark.nightly
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_planner_that_raises_is_replaced_by_the_static_plan_of_that_step(tmp_path, undisturbed, lookahead):
    sabotage = partial(faulty, fault="raise", iterations=(3, 5), folder=str(tmp_path))
    ended = run_job(tmp_path, f"--dynamic-cp-lookahead {lookahead}", sabotage=sabotage)
    check_static(ended, undisturbed, {3, 5}, "the planner raised RuntimeError: planted in iteration")
    assert "Traceback" in ended[0].output


@pytest.mark.nightly
def test_a_planner_that_raises_in_the_warm_up_does_not_end_the_run(tmp_path, undisturbed):
    ended = run_job(tmp_path, sabotage=partial(faulty, fault="raise", iterations=(0,), folder=str(tmp_path)))
    assert figures(ended[0]) == undisturbed
    assert all("step 0 runs the static plan" in end.output for end in ended)


@pytest.mark.nightly
def test_a_planner_process_that_is_stopped_is_replaced_after_the_timeout(tmp_path):
    """SIGSTOP to the real process in the middle of the run: the kernel, not our code, keeps it from answering."""
    words = command_line(WORDS, "--train-iters 400 --exit-interval 20", PLAN_LIMIT, "--stopped-process-timeout 0")
    with Job(tmp_path, words) as job:
        job.wait_for(0, r"iteration +3/")
        stopped = job.planner()
        stopped.suspend()
        job.wait_for(0, "a new one takes its place")
        assert not stopped.is_running() or stopped.status() == "zombie"
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [0, 0], ended
    for end in ended:
        assert len(re.findall(r"step (?!0 )\d+ runs the static plan: no plan after 8 s", end.output)) == 1, end.output
    assert sorted(figures(ended[0])) == list(range(1, 21)), "it went on, and was planned again by a new process"


@pytest.mark.nightly
def test_a_planner_process_that_is_killed_is_replaced_at_once_and_plans_the_same(tmp_path, undisturbed):
    words = command_line(WORDS, "--train-iters 400 --exit-interval 8")
    with Job(tmp_path, words) as job:
        job.wait_for(0, r"iteration +3/")
        job.planner().kill()
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [0, 0], ended
    assert "the planner process was killed by signal 9; a new one takes its place" in ended[0].output
    assert "static plan" not in ended[0].output
    got = figures(ended[0])
    assert len(got) == 8
    assert {iteration: got[iteration] for iteration in undisturbed} == undisturbed


@pytest.mark.by_day("2")
@pytest.mark.parametrize("times", [1, 2])
def test_a_request_that_kills_the_planner_twice_gets_the_static_plan(tmp_path, undisturbed, times):
    sabotage = partial(faulty, fault="die", iterations=(3,), folder=str(tmp_path), times=times)
    ended = run_job(tmp_path, sabotage=sabotage)
    assert ended[0].output.count("the planner process was killed by signal 9; a new one takes its place") == times
    if times == 1:
        assert figures(ended[0]) == undisturbed
    else:
        check_static(ended, undisturbed, {3}, "the planner process was killed by signal 9, twice")


@pytest.mark.by_day("raise")
@pytest.mark.parametrize(
    ("fault", "words", "why"),
    [
        ("raise", "", "the planner raised RuntimeError: planted in iteration 3"),
        ("hang", PLAN_LIMIT, "no plan after 8 s"),
        ("die", "", "the planner process was killed by signal 9, twice"),
    ],
)
def test_in_a_strict_run_all_ranks_end_with_the_same_error(tmp_path, fault, words, why):
    sabotage = partial(faulty, fault=fault, iterations=(3,), folder=str(tmp_path))
    ended = run_job(tmp_path, "--dynamic-cp-strict", words, sabotage=sabotage, code=2)
    said = [re.findall(r"^error.*?: (.*)", end.output, re.MULTILINE) for end in ended]
    assert said[0] == said[1]
    assert len(said[0]) == 1
    for part in ("no plan for dynamic_cp/plan/train/3", why, "--dynamic-cp-strict"):
        assert part in said[0][0]
    assert sorted(figures(ended[0])) == [1, 2]


@pytest.mark.nightly
def test_a_planner_whose_static_plan_fails_too_ends_all_ranks_with_the_same_error(tmp_path):
    sabotage = partial(faulty, fault="raise", iterations=(3,), folder=str(tmp_path), also_static=True)
    ended = run_job(tmp_path, sabotage=sabotage, code=2)
    said = [re.findall(r"^error.*?: (.*)", end.output, re.MULTILINE) for end in ended]
    assert said[0] == said[1]
    assert said[0][0].count("planted in iteration 3") == 2
    assert "nor a static one" in said[0][0]


@pytest.mark.nightly
@pytest.mark.parametrize("words", ["--max-dynamic-cp-size 1 --context-parallel-size 2", "--min-dynamic-cp-size 2"])
def test_the_static_plan_keeps_to_the_groups_that_were_built(tmp_path, words):
    sabotage = partial(faulty, fault="raise", iterations=(3,), folder=str(tmp_path))
    ended = run_job(tmp_path, "--max-seqlen-per-dp-cp-rank 128", words, sabotage=sabotage)
    size = 1 if "--max-dynamic-cp-size 1" in words else 2
    got = figures(ended[0])
    assert sorted(got) == [1, 2, 3, 4, 5, 6]
    assert all(re.search(rf"\| cp{size}×\d+ \|", text) for text in got.values()), got


@pytest.mark.nightly
def test_a_planner_process_that_never_starts_leaves_the_static_plan(tmp_path, undisturbed):
    """Its interpreter dies again and again, as without memory: two deaths a request, and the run goes on."""

    def sabotage(rank: int) -> None:
        if rank == 0:
            from dynamic_cp.search import planner_process

            planner_process._RUN = "import sys; sys.exit(7)"

    ended = run_job(tmp_path, sabotage=sabotage)
    check_static(ended, undisturbed, {1, 2, 3, 4, 5, 6}, "the planner process left with status 7, twice")


@pytest.mark.nightly
def test_a_planner_process_that_cannot_be_started_again_leaves_the_static_plan(tmp_path, undisturbed):
    def sabotage(rank: int) -> None:
        faulty(rank, fault="die", iterations=(4,), folder=str(tmp_path))
        if rank == 0:
            import subprocess

            real, started = subprocess.Popen, []

            def start_once(*args: Any, **options: Any) -> Any:
                if started:
                    raise OSError(12, "Cannot allocate memory")
                started.append(None)
                return real(*args, **options)

            subprocess.Popen = start_once

    ended = run_job(tmp_path, "--stopped-process-timeout 0", sabotage=sabotage)  # starts no other process
    check_static(ended, undisturbed, {4, 5, 6}, "the planner process was not running, twice")
    assert "no new planner process could be started: [Errno 12] Cannot allocate memory" in ended[0].output


def test_a_planner_process_that_cannot_be_started_is_an_error_of_all_ranks(tmp_path):
    def sabotage(rank: int) -> None:
        if rank == 0:
            import subprocess

            def refuse(*_args: Any, **_kwargs: Any) -> None:
                raise OSError(12, "Cannot allocate memory")

            subprocess.Popen = refuse

    with Job(tmp_path, command_line(WORDS), sabotage=sabotage, own_store=True) as job:
        ended = job.wait(LIMIT_S)
    assert all(end.code in (1, 2) for end in ended), ended
    assert "rank 0 failed: OSError: [Errno 12] Cannot allocate memory" in ended[1].output, ended
    assert "no process could be started that kills stopped ones" in ended[0].output, "a warning: training needs none"
    assert max(end.seconds for end in ended) < FAULT_LIMIT_S


def test_a_static_plan_that_is_impossible_is_an_error_of_all_ranks_at_the_start(tmp_path):
    def sabotage(rank: int) -> None:
        if rank == 0:  # as if validation had let it through
            from dynamic_cp.errors import InfeasibleSampleError

            def refuse(problem: Problem, max_seqlen: int) -> Problem:
                raise InfeasibleSampleError(f"no group holds {max_seqlen} tokens")

            assert planner.static_fallback is static_fallback, "what is replaced is what a run calls"
            planner.static_fallback = refuse

    with Job(tmp_path, command_line(WORDS), sabotage=sabotage, own_store=True) as job:
        ended = job.wait(LIMIT_S)
    assert [end.code for end in ended] == [2, 2], ended
    assert all("no group holds 128 tokens" in end.output for end in ended), ended
    assert max(end.seconds for end in ended) < FAULT_LIMIT_S


def test_a_hung_planner_and_workers_do_not_outlive_a_killed_rank(tmp_path):
    sabotage = partial(faulty, fault="hang", iterations=(3,), folder=str(tmp_path))
    with Job(tmp_path, command_line(WORDS, "--num-workers 1"), sabotage=sabotage) as job:
        job.wait_for(0, r"iteration +2/")
        orphans = [job.planner(), *job.workers(0), *job.workers(1)]
        assert len(orphans) == 3
        job.kill(0)
        job.kill(1)
        until_s = patience.now_s() + 2.0
        while (alive := psutil.wait_procs(orphans, timeout=0.1)[1]) and patience.now_s() < until_s:
            pass
        assert [process for process in alive if process.is_running() and process.status() != "zombie"] == []
        job.wait(LIMIT_S)
