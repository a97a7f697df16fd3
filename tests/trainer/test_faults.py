"""The real command under torchrun: wrong input, a killed rank, signals."""

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
from megatron.trainer.data import mock
from tests import patience
from tests.trainer.checkpoints import verified
from tests.trainer.commandline import NO_COMPILE, command_line
from tests.trainer.training_ranks import train

ROOT = Path(__file__).parents[2]
LAUNCHER = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node",
)  # fmt: skip
UNNAMED = ("unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh")
"""Before a command: nothing resolves the name of its host, as in many containers."""
DYNAMIC = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 --num-layers 2 --lr-decay-iters 1000"
ALL_DOCUMENTS = mock.NUM_DOCUMENTS
# With two cores shared among jobs, importing torch on two ranks may take most of it.
ERROR_LIMIT_S = 60.0
# torchrun kills the others 30 s after SIGTERM. They must not need that: gloo notices the closed connection at once, and
# a rank that waits for rank 0's word gives up after exits.GIVE_UP_S.
KILLED_LIMIT_S = 25.0
KILLED_BY_TORCHRUN = "forcefully exiting via"
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


def _losses(output: str) -> dict[int, str]:
    return dict(re.findall(r"iteration +(\d+)/.*? lm loss: (\S+) ", output))


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
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("", id="dense"),
        pytest.param(
            "--num-experts 4 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.1 --expert-model-parallel-size 2",
            id="experts",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_killed_rank_ends_the_job_which_resumes_from_its_checkpoint(model, tmp_path, capfd, monkeypatch):
    """Rank 0, without which nobody hears the others; of rank 1: tests/faults/test_kills.py."""
    monkeypatch.setattr(mock, "NUM_DOCUMENTS", ALL_DOCUMENTS)  # as the job under torchrun, which is no fork
    words = f"{DYNAMIC} {model} --save {tmp_path} --load {tmp_path} --save-interval 2"
    job = _start(words, "--train-iters 500")
    before = _read_until(job, r"saved .*iter_0000004")
    killed = patience.now_s()
    os.kill(_workers(job)[0], signal.SIGKILL)
    rest = _finish(job, 60)
    assert patience.now_s() - killed < KILLED_LIMIT_S
    assert KILLED_BY_TORCHRUN not in rest
    assert job.returncode != 0
    known = _losses("".join(before) + rest)

    last = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 4 <= last < 500
    capfd.readouterr()
    assert sorted(train(2, words, f"--train-iters {last + 2}")) == [last + 1, last + 2]
    resumed = _losses(capfd.readouterr().out)
    assert sorted(map(int, resumed)) == [last + 1, last + 2]
    # Iterations that were computed before the kill come out the same.
    assert all(known.get(iteration, loss) == loss for iteration, loss in resumed.items())
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.nightly
def test_a_signal_to_one_rank_saves_and_ends_all_with_exit_code_0(tmp_path):
    """SIGUSR1 to forked ranks: test_training.py."""
    job = _start(f"{DYNAMIC} --save {tmp_path} --train-iters 500")
    before = _read_until(job, r"iteration +2/")
    os.kill(_workers(job)[1], signal.SIGTERM)
    output = _finish(job, SIGNALLED_LIMIT_S)
    assert job.returncode == 0, output
    last = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= last < 500
    assert f"leaving after iteration {last}" in output
    assert max(map(int, _losses("".join(before) + output))) == last


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
