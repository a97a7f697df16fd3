"""Short runs of the trainer on one GPU, as a user starts them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --seq-length 4096 --bf16 "
    "--transformer-impl local --data-path docs --data-glob **/*.md --split 1,0,0 --global-batch-size 16 "
    "--train-iters 12 --lr 2e-3 --lr-decay-style constant --dynamic-cp --max-seqlen-per-dp-cp-rank 4096 "
    "--distributed-backend nccl"
)


TIMED_OUT = -1


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"lm loss: ([0-9.E+-]+)", output)]


def trains(words: list[str], environment: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run pretrain_gpt.py; its output is in the error of a test that fails. None of its processes outlives the call."""
    job = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "4", **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # the launcher and its ranks
        output, _ = job.communicate()
        return subprocess.CompletedProcess(words, TIMED_OUT, output)
    finally:  # pytest's own time limit ends up here as well, and ranks that a launcher left behind hold the device
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return subprocess.CompletedProcess(words, job.returncode, output)


def trained(
    flags: str, cache: Path, timeout_s: float, num_iterations: int = 12, model: str = MODEL, **environment: str
) -> tuple[list[float], str]:
    """Return the losses and the output of a run on one GPU, which must succeed."""
    words = [sys.executable, "pretrain_gpt.py", *model.split(), *flags.split(), "--data-cache-path", str(cache)]
    job = trains(words, environment, timeout_s)
    assert job.returncode == 0, job.stdout
    assert len(losses(job.stdout)) == num_iterations, job.stdout
    return losses(job.stdout), job.stdout


def test_loss_falls_on_one_gpu(tmp_path: Path) -> None:
    found, output = trained("", tmp_path, 200)
    assert "attention kernel flash" in output, output
    assert found[-1] < found[0] - 1, found


RANKS = {
    "two_lanes": (2, ""),
    "every_exchange": (4, "--cp-comm-type auto"),
    "heads": (4, "--cp-comm-type a2a"),
    "placed": (4, "--cp-comm-type blocks"),
    "tensor": (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "pipeline": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"),
    "pool": (4, "--pipeline-model-parallel-size 2 --dynamic-cp-pool always"),
}
"""Ranks, and flags beside MODEL."""
SPLIT = "--train-iters 3 --max-seqlen-per-dp-cp-rank 2048 --no-bias-swiglu-fusion --no-bias-dropout-fusion"
"""Longer samples need two lanes; compiling takes most of the time of several ranks."""


@pytest.fixture(scope="module")
def losses_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained(f"{SPLIT} --max-seqlen-per-dp-cp-rank 4096", tmp_path_factory.mktemp("cache"), 100, 3)[0]


def losses_on_ranks(num_ranks: int, flags: str, tmp_path: Path) -> list[float]:
    """Return the losses of ranks that share one GPU; NCCL refuses that on one host: each says that it is on another."""
    script = tmp_path / "rank.sh"
    script.write_text(
        f'export NCCL_HOSTID="host$LOCAL_RANK" LOCAL_RANK=0\nexec {sys.executable} pretrain_gpt.py "$@"\n',
        encoding="utf-8",
    )
    alone = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_NCHANNELS": "1"}
    alone |= {f"NCCL_{way}_DISABLE": "1" for way in ("IB", "P2P", "SHM")}
    launcher = (
        f"-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node {num_ranks} --no-python bash"
    )
    words = [sys.executable, *launcher.split(), str(script), *MODEL.split(), *SPLIT.split(), *flags.split()]
    job = trains([*words, "--data-cache-path", str(tmp_path)], alone, 140)
    assert job.returncode == 0, job.stdout
    assert len(losses(job.stdout)) == 3, job.stdout
    assert re.search(r"cp[24]×", job.stdout), f"no sample was split: {job.stdout}"
    return losses(job.stdout)


@pytest.mark.parametrize("which", RANKS)
def test_ranks_that_share_one_gpu(which: str, losses_of_one_rank: list[float], tmp_path: Path) -> None:
    """The losses are those of one rank."""
    num_ranks, flags = RANKS[which]
    found = losses_on_ranks(num_ranks, flags, tmp_path)
    # Stages and tensor ranks draw weights of their own.
    bound = 5e-2 if "parallel" in flags else 5e-3
    assert found == pytest.approx(losses_of_one_rank, rel=bound), (found, losses_of_one_rank)
