"""What the jobs of examples/slurm start, on which node, with which flags: no rank runs here."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time

import pytest

from dynamic_cp.models.catalog import load_hardware
from megatron.dynamic_cp.flags.shape import model_shape
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import planned_runtime
from tests.cluster.conftest import ROOT, Cluster

SLURM = ROOT / "examples" / "slurm"
SCRIPTS = sorted([*SLURM.glob("*.sbatch"), *SLURM.glob("*.sh"), *(ROOT / "docker").glob("*.sh")])
JOBS = ["single_node", "multi_node", "requeue", "pyxis", "apptainer", "docker"]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def flags_of(words: list[str]) -> list[str]:
    return words[words.index("pretrain_gpt.py") + 1 :]


def requeues(cluster: Cluster) -> list[list[str]]:
    """Return the words of the calls of scontrol that put a job back into the queue."""
    return [call["words"] for call in cluster.calls("scontrol") if call["words"][0] == "requeue"]


def test_scripts_are_there() -> None:
    assert {path.stem for path in SCRIPTS} >= {*JOBS, "table1", "common", "model", "entrypoint"}


def test_shell_scripts_are_clean() -> None:
    for script in SCRIPTS:
        first = script.read_text(encoding="utf-8").splitlines()[0]
        shell = "sh" if first == "#!/bin/sh" else "bash"
        assert first in ("#!/bin/sh", "#!/usr/bin/env bash", "# shellcheck shell=bash"), script
        subprocess.run([shell, "-n", str(script)], check=True, timeout=20)
    if shutil.which("shellcheck"):  # all at once: the jobs source the shared ones
        command = ["shellcheck", *(str(script.relative_to(ROOT)) for script in SCRIPTS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == 0, done.stdout


@pytest.mark.by_day("requeue")
@pytest.mark.parametrize("job", JOBS)
def test_a_job_starts_its_ranks_on_every_node_in_order(
    cluster: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = 1 if job == "single_node" else 2
    code, output = cluster.run(f"--nodes={nodes}", f"examples/slurm/{job}.sbatch", "--lr", "3e-6", MOUNTS="/data:/data")
    assert code == 0, output
    started = cluster.launches()
    assert [option(call["words"], "--node-rank") for call in started] == [str(node) for node in range(nodes)]
    for call in started:
        words, environment = call["words"], call["environment"]
        assert words[:4] == ["-m", "torch.distributed.run", "--rdzv-backend", "static"]
        assert option(words, "--nnodes") == str(nodes)
        assert option(words, "--nproc-per-node") == "8"
        assert option(words, "--master-addr") == "gpu1"
        assert option(words, "--master-port") == str(20000 + 4242)
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["NCCL_NVLS_ENABLE"] == "0"
        assert call["cwd"] == str(ROOT)
    (step,) = cluster.calls("srun")
    assert {"--distribution=block", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(step["words"])
    run_dir = cluster.environment["RUN_DIR"]
    seen_inside = {
        "pyxis": f"--container-mounts={run_dir}:{run_dir},/data:/data",
        "apptainer": f"{run_dir}:{run_dir}",
        "docker": f"{run_dir}:{run_dir}",
    }
    assert job not in seen_inside or seen_inside[job] in step["words"]
    assert not requeues(cluster)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settings = parse_args(flags_of(started[-1]["words"]), 8 * nodes)
    planning = settings.planning
    assert planning.policy == "dynamic"
    assert settings.optimizer.lr == 3e-6  # flags behind the job's name win
    assert settings.checkpoints.save == settings.checkpoints.load == run_dir
    shape = model_shape(settings.model, 128256)
    limit = planned_runtime.max_tokens_per_rank(planning, shape, load_hardware("h100"))
    assert limit * planning.topology.max_cp_size >= planning.seq_length


def test_the_first_day_is_one_command_on_one_node(cluster: Cluster) -> None:
    code, output = cluster.run("examples/slurm/first_day.sbatch", "--again", "calibration")
    assert code == 0, output
    (call,) = cluster.calls("python")
    run_dir = cluster.environment["RUN_DIR"]
    assert call["words"] == ["-m", "dynamic_cp.decide.cli", "first-day", "--output", run_dir, "--again", "calibration"]
    assert call["cwd"] == str(ROOT)
    (step,) = cluster.calls("srun")
    assert "--nodes=1" in step["words"]


@pytest.mark.by_day("one line")
@pytest.mark.parametrize(
    "data", ["0.3 /data/long 0.7 /data/short", "0.3 /data/long\n0.7 /data/short\n"], ids=["one line", "several lines"]
)
def test_data_are_words_of_their_own(cluster: Cluster, data: str) -> None:
    code, output = cluster.run("examples/slurm/single_node.sbatch", DATA=data)
    assert code == 0, output
    (call,) = cluster.launches()
    found = parse_args(flags_of(call["words"]), 8).data
    assert found.data_path == ("0.3", "/data/long", "0.7", "/data/short")
    assert not found.mock_data


@pytest.mark.by_day("docker")
@pytest.mark.parametrize("job", ["pyxis", "apptainer", "docker"])
def test_a_container_gets_absolute_folders(cluster: Cluster, job: str) -> None:
    shutil.rmtree(ROOT / "runs" / "relative to the submission", ignore_errors=True)
    code, output = cluster.run("--nodes=1", f"examples/slurm/{job}.sbatch", RUN_DIR="runs/relative to the submission")
    assert code == 0, output
    folder = ROOT / "runs" / "relative to the submission"
    assert folder.is_dir()
    folder.rmdir()
    (step,) = cluster.calls("srun")
    assert any(word.removeprefix("--container-mounts=") == f"{folder}:{folder}" for word in step["words"])
    (call,) = cluster.launches()
    assert option(call["words"], "--save") == str(folder)


@pytest.mark.by_day("requeue")
@pytest.mark.parametrize("job", ["requeue", "docker"])
def test_a_failure_is_the_jobs_and_is_not_requeued(cluster: Cluster, job: str) -> None:
    code, output = cluster.run("--nodes=1", f"examples/slurm/{job}.sbatch", STUB_CODE="3")
    assert code == 3, output
    assert not requeues(cluster)


def start_a_rank(cluster: Cluster, job: str, **environment: str) -> subprocess.Popen[str]:
    """Return the batch script while its rank is still starting, as long as nobody listens to USR1."""
    words = ("--nodes=1", f"examples/slurm/{job}.sbatch")
    running = cluster.start(*words, STUB_RANK="1", RESEND_S="0.3", **environment)
    while not cluster.launches():
        assert running.poll() is None
    return running


ENDS = {
    "USR1": ("requeue", signal.SIGUSR1, {}, 0, "SIGUSR1: asking the ranks to save and leave", ["requeue", "4242"]),
    "USR1, docker": ("docker", signal.SIGUSR1, {}, 0, "SIGUSR1: asking the ranks to save and leave", []),
    # The next job would resume from an older checkpoint and fail again, up to MAX_RESTARTS times.
    "a save that fails": ("requeue", signal.SIGUSR1, {"STUB_RANK_CODE": "5"}, 5, "left with 5: not requeueing", []),
    "the last restart": (
        "requeue", signal.SIGUSR1, {"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"}, 0,
        "3 restarts reach MAX_RESTARTS", [],
    ),
    "TERM": ("requeue", signal.SIGTERM, {}, 0, "rank saved", []),  # SLURM requeues by itself
}  # fmt: skip


@pytest.mark.by_day("USR1", "a save that fails")
@pytest.mark.parametrize("name", ENDS)
def test_a_signal_that_comes_too_early_is_repeated_until_the_ranks_listen(cluster: Cluster, name: str) -> None:
    """The ranks save once, whoever asks them; the job goes back into the queue where that helps."""
    job, number, environment, wanted, said, requeued = ENDS[name]
    running = start_a_rank(cluster, job, **environment)
    running.send_signal(number)
    output, _ = running.communicate(timeout=25)
    assert running.returncode == wanted, output
    assert said in output
    assert output.count("rank saved") == 1
    assert [word for words in requeues(cluster) for word in words] == requeued


def test_scancel_while_the_ranks_save_is_not_requeued(cluster: Cluster) -> None:
    running = start_a_rank(cluster, "requeue", STUB_SAVE_S="3")
    assert running.stdout is not None
    running.send_signal(signal.SIGUSR1)
    for line in running.stdout:
        if "rank saved" in line:
            break
    for _ in range(2):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    output, _ = running.communicate(timeout=25)
    assert running.returncode == 0, output
    assert not requeues(cluster), output


def test_requeue_has_time_to_save() -> None:
    directives = re.findall(r"^#SBATCH (\S+)$", (SLURM / "requeue.sbatch").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@300"} <= set(directives)
