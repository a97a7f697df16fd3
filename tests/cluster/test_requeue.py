"""A job that is told to stop: two real ranks save and leave, the job goes back into the queue, and the run goes on."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.test_jobs import requeues
from tests.trainer.commandline import NO_COMPILE, command_line

# The flags of a small model on CPU ranks, behind those of the job, which they replace.
SMALL = command_line(
    "--max-seqlen-per-dp-cp-rank 64 --dynamic-cp-hardware cpu --tensor-model-parallel-size 1 --recompute-num-layers 1",
    "--lr-decay-iters 1000 --num-layers 2 --num-workers 0 --rotary-base 10000 --split 100,0,0",
)


@pytest.mark.nightly
def test_a_signalled_job_saves_is_requeued_and_resumes(cluster: Cluster) -> None:
    words = ["--nodes=1", "examples/slurm/requeue.sbatch", *SMALL]
    environment = {
        "PYTHON": sys.executable,
        "RANKS_PER_NODE": "2",
        "STUB_HOST": "127.0.0.1",
        "RESEND_S": "1",
    } | NO_COMPILE
    run_dir = Path(cluster.environment["RUN_DIR"])

    job = cluster.start(*words, "--train-iters", "900", **environment)
    before: list[str] = []
    assert job.stdout is not None
    for line in job.stdout:
        before.append(line)
        if re.search(r"iteration +2/", line):
            break
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 does
    rest, _ = job.communicate(timeout=90)
    output = "".join(before) + rest
    assert job.returncode == 0, output
    last = int((run_dir / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
    assert 2 <= last < 900
    assert f"leaving after iteration {last} (SIGUSR1)" in output
    assert "left with 0, requeueing 4242 (restart 1)" in output
    assert requeues(cluster) == [["requeue", "4242"]]

    # What SLURM does then; one rank may go on alone.
    words += ["--max-seqlen-per-dp-cp-rank", "128", "--train-iters", str(last + 2)]
    environment |= {"RANKS_PER_NODE": "1", "SLURM_RESTART_COUNT": "1"}
    code, output = cluster.run(*words, timeout_s=90, **environment)
    assert code == 0, output
    iterations = [int(one) for one in re.findall(r"^ \[.*?\] iteration +(\d+)/", output, re.MULTILINE)]
    assert iterations == [last + 1, last + 2]
    assert len(requeues(cluster)) == 1
