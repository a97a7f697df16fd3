"""What is stopped for too long is killed, and nothing else; the guard ends with its rank."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc")

ROOT = Path(__file__).parents[2]
RANK = """
import subprocess, sys, time
from megatron.trainer.ending.stop_guard import StopGuard
guard = StopGuard(float(sys.argv[1]))
sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
print(guard._process.pid if guard._process else 0, *(sleeper.pid for sleeper in sleepers), flush=True)
time.sleep(60)
"""


@pytest.fixture
def start_rank():
    """Start a process with a guard and two children; return it, the guard and the children."""
    ranks: list[subprocess.Popen] = []

    def start(limit_s: float) -> tuple[subprocess.Popen, int, list[psutil.Process]]:
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(limit_s)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
        guard, *sleepers = map(int, ranks[-1].stdout.readline().split())
        return ranks[-1], guard, [psutil.Process(pid) for pid in sleepers]

    yield start
    for rank in ranks:
        for left in psutil.Process(rank.pid).children() if rank.poll() is None else []:
            left.kill()
        rank.kill()
        rank.communicate()


def _has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _wait_for_end(process: psutil.Process, limit_s: float) -> None:
    deadline_s = patience.now_s() + limit_s
    while not _has_ended(process):
        assert patience.now_s() < deadline_s, f"{process} lives"
        time.sleep(0.02)


def test_a_stopped_child_is_killed_and_the_others_are_left_alone(start_rank):
    rank, guard, (stopped, running) = start_rank(1.0)
    stopped.suspend()
    _wait_for_end(stopped, 10.0)
    assert not _has_ended(running)
    assert rank.poll() is None
    rank.kill()
    _wait_for_end(psutil.Process(guard), 5.0)
    running.kill()
    said = rank.stderr.read()
    assert f"its process {stopped.pid} (sleep) was stopped for 1 s: killed" in said
    assert said.count("killed") == 1


@pytest.mark.slow  # it waits
def test_a_stopped_rank_is_killed_and_a_short_stop_is_not_minded(start_rank):
    rank, _, sleepers = start_rank(2.0)
    for _ in range(2):
        rank.send_signal(signal.SIGSTOP)
        time.sleep(0.8)
        rank.send_signal(signal.SIGCONT)
        time.sleep(0.8)
    assert rank.poll() is None
    rank.send_signal(signal.SIGSTOP)
    assert rank.wait(10.0) == -signal.SIGKILL
    for sleeper in sleepers:
        sleeper.kill()
    assert "(the rank itself) was stopped for 2 s" in rank.stderr.read()


def test_zero_starts_no_guard(start_rank):
    _, guard, sleepers = start_rank(0.0)
    assert guard == 0
    for sleeper in sleepers:
        sleeper.kill()
