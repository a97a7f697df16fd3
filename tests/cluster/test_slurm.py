"""The jobs of examples/slurm under a real SLURM: two nodes of one machine, CPU ranks (gloo) in place of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster import slurm as real
from tests.cluster.slurm import Job, Slurm
from tests.trainer.commandline import command_line

pytestmark = pytest.mark.nightly
# The flags of a small model on CPU ranks, behind those of the job, which they replace.
SMALL = command_line(
    "--max-seqlen-per-dp-cp-rank 64 --dynamic-cp-hardware cpu --tensor-model-parallel-size 1 --recompute-num-layers 1",
    "--lr-decay-iters 1000 --num-layers 2 --num-workers 0 --rotary-base 10000 --split 100,0,0",
)
ITERATION = r"(?m)^ \[.*?\] iteration +(\d+)/"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = real.missing()
    if reason:
        pytest.skip(reason)
    with real.two_nodes(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def jobs(slurm: Slurm, tmp_path: Path) -> Iterator[list[Job]]:
    """Jobs that end with the test."""
    running: list[Job] = []
    yield running
    for job in running:
        job.cancel()


def started(slurm: Slurm, jobs: list[Job], tmp_path: Path, job: str, *words: str, iterations: int = 900) -> Job:
    flags = [*SMALL, "--train-iters", str(iterations), "--save-interval", "1000"]
    script = f"examples/slurm/{job}.sbatch"
    output = tmp_path / f"{job}-{len(jobs)}.log"
    run_dir = str(tmp_path / "run")
    jobs.append(slurm.submit("--nodes=2", *words, script, *flags, output=output, RUN_DIR=run_dir))
    return jobs[-1]


def under_way(slurm: Slurm, jobs: list[Job], tmp_path: Path, *words: str) -> Job:
    job = started(slurm, jobs, tmp_path, "requeue", *words)
    job.wait_for(r"iteration +2/")
    return job


def completes(job: Job) -> None:
    assert job.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", job.text()


def another_goes_on(slurm: Slurm, jobs: list[Job], tmp_path: Path, saved: int) -> None:
    """Submit a job of one more iteration; it must do just that."""
    again = started(slurm, jobs, tmp_path, "requeue", iterations=saved + 1)
    completes(again)
    assert iterations_of(again.text()) == [saved + 1]


def iterations_of(text: str) -> list[int]:
    return [int(one) for one in re.findall(ITERATION, text)]


def saved_of(tmp_path: Path) -> int:
    return int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))


def test_a_job_trains_on_two_nodes(slurm: Slurm, jobs: list[Job], tmp_path: Path) -> None:
    job = started(slurm, jobs, tmp_path, "multi_node", iterations=3)
    completes(job)
    assert iterations_of(job.text()) == [1, 2, 3]
    assert "4 ranks = TP 1 x PP 1 (VPP 1) x 4 lanes" in job.text()
    assert saved_of(tmp_path) == 3


def test_a_job_before_its_time_limit_saves_is_requeued_and_resumes(
    slurm: Slurm, jobs: list[Job], tmp_path: Path
) -> None:
    job = under_way(slurm, jobs, tmp_path)
    job.signal("USR1")
    job.wait_for(r"left with 0, requeueing \d+ \(restart 1\)")
    saved = saved_of(tmp_path)
    before = job.text()
    assert f"leaving after iteration {saved} (SIGUSR1)" in before
    job.start_now()
    job.wait_for(rf"iteration +{saved + 2}/")
    assert iterations_of(job.text())[len(iterations_of(before)) :][:2] == [saved + 1, saved + 2]
    assert job.field("Restarts") == "1"


def test_scancel_in_a_save_ends_the_job_and_leaves_a_checkpoint_that_loads(
    slurm: Slurm, jobs: list[Job], tmp_path: Path
) -> None:
    job = under_way(slurm, jobs, tmp_path)
    job.signal("USR1")
    job.wait_for("asking the ranks to save and leave")
    slurm.command("scancel", job.number)
    assert job.wait_for_state("CANCELLED", "COMPLETED", "PENDING") != "PENDING", job.text()
    assert "requeueing" not in job.text()
    saved = saved_of(tmp_path)
    assert f"leaving after iteration {saved} (SIGUSR1)" in job.text()
    another_goes_on(slurm, jobs, tmp_path, saved)


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
def test_a_preempted_job_saves_is_requeued_and_resumes(
    slurm: Slurm, jobs: list[Job], tmp_path: Path, signal: str
) -> None:
    """On clusters that send no user's signal the steps get SIGTERM and end well, which SLURM takes for a job's end."""
    with nullcontext() if signal == "USR1" else slurm.without(real.USER_SIGNAL):
        job = under_way(slurm, jobs, tmp_path)
        words = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "sleep 1")
        urgent = slurm.submit(*words, output=tmp_path / "urgent.log")
        jobs.append(urgent)
        job.wait_for(r"left with 0, requeueing \d+ \(restart 1\)")
    saved = saved_of(tmp_path)
    completes(urgent)
    job.start_now()
    job.wait_for(rf"iteration +{saved + 1}/")
    assert "loaded" in job.text()


def test_a_rank_that_dies_ends_the_job_on_all_nodes(slurm: Slurm, jobs: list[Job], tmp_path: Path) -> None:
    job = under_way(slurm, jobs, tmp_path)
    (rank,) = [one for one in ranks_of(job) if one.environ()["RANK"] == "3"]
    rank.kill()
    assert job.wait_for_state("FAILED", "COMPLETED", "PENDING") == "FAILED", job.text()
    assert "one of 4 ranks ended or did not answer" in job.text() or "another rank has probably ended" in job.text()
    assert not ranks_of(job)


def test_a_node_that_dies_ends_the_job_and_another_goes_on_from_what_was_saved(
    slurm: Slurm, jobs: list[Job], tmp_path: Path
) -> None:
    job = under_way(slurm, jobs, tmp_path, "--signal=B:USR1@5")
    job.signal("USR1")
    job.wait_for("requeueing")
    saved = saved_of(tmp_path)
    job.start_now()
    job.wait_for(rf"iteration +{saved + 1}/")
    slurm.lose(real.NODES[1])
    try:
        assert job.wait_for_state("FAILED", "NODE_FAIL", "PENDING", "COMPLETED") != "COMPLETED", job.text()
        real.wait_until(lambda: not ranks_of(job), "no rank is left", job.text)
    finally:
        job.cancel()
        slurm.start_node(real.NODES[1])
    another_goes_on(slurm, jobs, tmp_path, saved)


def test_the_first_day_of_a_node_writes_its_page(slurm: Slurm, jobs: list[Job], tmp_path: Path) -> None:
    run_dir = tmp_path / "first-day"
    words = ("examples/slurm/first_day.sbatch", "--ranks", "2", "--quick")
    job = slurm.submit(*words, output=tmp_path / "first-day.log", RUN_DIR=str(run_dir))
    jobs.append(job)
    completes(job)
    assert (run_dir / "hardware.json").exists(), list(run_dir.iterdir())


def test_table_1_compares_both_arms_on_two_nodes(slurm: Slurm, jobs: list[Job], tmp_path: Path) -> None:
    sizes = {"LAYERS": "2", "HIDDEN": "64", "FFN": "96", "HEADS": "4", "VOCAB": "511"}
    run = {"ITERS": "3", "GBS": "8", "SEQ": "512", "LIMIT": "256", "PP": "1", "CP": "2", "LENGTHS": "github_bal"}
    script, gloo = "examples/slurm/table1.sbatch", ("--distributed-backend", "gloo")
    words = ("--nodes=2", script, *gloo, "--num-workers", "0")
    environment = sizes | run | {"HARDWARE": "cpu", "RUN_DIR": str(tmp_path / "run")}
    job = slurm.submit(*words, output=tmp_path / "table1.log", **environment)
    jobs.append(job)
    completes(job)
    table = job.text().rpartition("saved")[2]
    assert {"static", "dynamic"} <= set(re.findall(r"\w+", table)), job.text()


def ranks_of(job: Job) -> list[psutil.Process]:
    """Return the ranks of a job, in no order."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            is_rank = "LOCAL_RANK" in environment and "pretrain_gpt.py" in real.words_of(process)
            if is_rank and environment.get("SLURM_JOB_ID") == job.number:
                found.append(process)
    return found
