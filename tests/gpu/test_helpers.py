"""What the tests of a GPU rest on: their judge and how they end what they start. These run anywhere."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu import judge
from tests.gpu.test_training import TIMED_OUT, trains

CHILD = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True)"


def test_the_judge_refuses_to_divide_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one token: queries and keys have no gradient, rounding errors alone are compared with `at_least`."""
    monkeypatch.setattr(judge, "DEVICE", torch.device("cpu"))
    ones = (1,) * 40
    inputs = judge.random_inputs(40, 40, 8, 2, 64)
    expected, _ = judge.exact(inputs, ones, ones, causal=True)
    assert not expected[1].any()
    assert not expected[2].any()
    actual = [x.to(torch.bfloat16) for x in expected]
    with pytest.raises(AssertionError, match="nothing to compare with"):
        judge.assert_close(actual, expected, torch.bfloat16)
    judge.assert_close(actual, expected, torch.bfloat16, at_least=0.3)
    actual[1] = actual[1] + 0.01
    with pytest.raises(AssertionError):
        judge.assert_close(actual, expected, torch.bfloat16, at_least=0.3)


def test_tf32_is_off_whatever_the_environment_asks() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_run_that_takes_too_long_leaves_nothing_behind() -> None:
    job = trains([sys.executable, "-c", f"{CHILD}; time.sleep(60)"], {}, 3)
    assert job.returncode == TIMED_OUT
    assert has_ended(int(job.stdout))


def test_a_launcher_that_ends_leaves_no_ranks_behind() -> None:
    """The rank here does not hold the pipe of the output, for whose end `trains` waits."""
    code = CHILD.replace("'60']", "'60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL")
    job = trains([sys.executable, "-c", code], {}, 20)
    assert job.returncode == 0
    assert has_ended(int(job.stdout))


def test_a_test_that_is_broken_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest's time limit does: an exception where the run is waited for."""
    seen = []

    def broken_off(job: subprocess.Popen[str], timeout: float) -> None:
        seen.append(job.pid)
        raise RuntimeError(f"longer than {timeout} s")

    monkeypatch.setattr(subprocess.Popen, "communicate", broken_off)
    with pytest.raises(RuntimeError, match="longer than 20 s"):
        trains(["sleep", "60"], {}, 20)
    assert has_ended(*seen)


def has_ended(pid: int) -> bool:
    """Return whether the process has gone, or only waits to be reaped, within ten seconds: signals take their time."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    return False
