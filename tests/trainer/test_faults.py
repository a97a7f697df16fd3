"""The real command under torchrun: wrong input, signals."""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megatron.trainer.checkpoints import checkpoint_files
from tests.trainer.checkpoints import verified
from tests.trainer.commandline import NO_COMPILE, command_line

ROOT = Path(__file__).parents[2]
LAUNCHER = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node",
)  # fmt: skip
UNNAMED = ("unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh")
"""Before a command: nothing resolves the name of its host, as in many containers."""
DYNAMIC = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 --num-layers 2 --lr-decay-iters 1000"
# With two cores shared among jobs, importing torch on two ranks may take most of it.
ERROR_LIMIT_S = 60.0
SIGNALLED_LIMIT_S = 45.0


@cache
def _unnamed() -> tuple[str, ...]:
    """Return UNNAMED, or nothing where a process may not have a host name of its own."""
    may = shutil.which(UNNAMED[0]) and subprocess.run([*UNNAMED, "true"], capture_output=True).returncode == 0
    return UNNAMED if may else ()


def _start(*words: str, ranks: int = 2) -> subprocess.Popen:
    """Start the job with its output, line by line, on the pipe."""
    return subprocess.Popen(
        [*_unnamed(), *LAUNCHER, str(ranks), "pretrain_gpt.py", *command_line(*words)], cwd=ROOT,
        env={**os.environ, **NO_COMPILE, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def _finish(job: subprocess.Popen, timeout_s: float) -> str:
    """Return what is left of the job's output once it has ended; kills it and its ranks when it takes too long."""
    try:
        return job.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        workers = _workers(job)
        os.killpg(job.pid, signal.SIGKILL)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"still running after {timeout_s} s:\n{job.communicate()[0]}")


def _workers(job: subprocess.Popen) -> list[int]:
    """Return the process ids of the ranks."""
    path = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(word) for word in path.read_text().split()]


def _read_until(job: subprocess.Popen, pattern: str) -> list[str]:
    lines = []
    for line in job.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail("ended before " + pattern + ":\n" + "".join(lines))


@pytest.mark.by_day("--tensor-model-parallel-size 4")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--tensor-model-parallel-size 4", "world size 2 is not a multiple of TP * PP = 4 * 1"),
        ("--data-path /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_wrong_input_ends_the_job_with_one_message(words, part):
    job = _start(DYNAMIC if "--data-path" not in words else DYNAMIC.replace("--mock-data", ""), words)
    output = _finish(job, ERROR_LIMIT_S)
    assert job.returncode != 0
    said = [line for line in output.splitlines() if line.startswith("error")]
    assert len(said) == 1, output
    assert part in said[0]
    assert "ended with exit code 2 of " in output or "exitcode  : 2" in output  # without the entry points of setup.py
    assert " failed:" not in output.partition(said[0])[0]


@pytest.mark.nightly
def test_a_signal_to_launcher_and_ranks_saves(tmp_path):
    """Ranks get two signals, of the scheduler and of torchrun, whose exit code is 1 whenever it was signalled."""
    job = _start(f"{DYNAMIC} --save {tmp_path} --train-iters 500")
    _read_until(job, r"iteration +2/")
    for pid in [*_workers(job), job.pid]:
        os.kill(pid, signal.SIGTERM)
    output = _finish(job, SIGNALLED_LIMIT_S)
    assert job.returncode == 1, output
    last = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= last < 500
    assert f"leaving after iteration {last} (SIGTERM)" in output
    assert verified(checkpoint_files.latest(str(tmp_path)))["iteration"] == last
