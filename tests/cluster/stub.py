"""Stand-ins for a cluster's commands, on one machine: `stub.py NAME ARG...`, called by scripts on PATH.

Each call is a line of $STUB_DIR/calls.jsonl with name, words and environment. sbatch runs a copy of the script, as
SLURM does; srun runs the command once per node and passes signals on to every process of the step; docker hands on only
what `-e` names. A path of the image is taken to be that of this repository.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
IMAGE_ROOT = "/opt/dynamic-cp"
SBATCH_OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time", "output", "signal", "requeue",
    "open-mode",
}  # fmt: skip
SRUN_OPTIONS = {
    "nodes", "ntasks-per-node", "distribution", "kill-on-bad-exit", "unbuffered",
    "container-image", "container-mounts", "no-container-mount-home",
}  # fmt: skip
DOCKER_OPTIONS = {"rm", "gpus", "network", "ipc", "ulimit", "user", "device", "entrypoint"}


def record(name: str, words: list[str]) -> None:
    """Append a call."""
    line = json.dumps({"name": name, "words": words, "environment": dict(os.environ), "cwd": os.getcwd()})
    with open(Path(os.environ["STUB_DIR"]) / "calls.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def split(words: list[str], known: set[str], with_value: tuple[str, ...] = ()) -> tuple[dict[str, str], list[str]]:
    """Return options, written as --name=value, and the words after them; an unknown option ends the test."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        if words[0] in with_value:
            options[f"{words[0]} {words[1]}"] = ""
            words = words[2:]
            continue
        name, _, value = words[0].removeprefix("--").partition("=")
        if name not in known:
            sys.exit(f"stub: unknown option {words[0]}")
        options[name] = value
        words = words[1:]
    return options, words


def on_host(text: str) -> str:
    """Return `text` with places in the image replaced by those in this repository."""
    return text.replace(IMAGE_ROOT, str(REPOSITORY))


def sbatch(words: list[str]) -> None:
    """Become the batch script, with the variables that SLURM sets."""
    options, words = split(words, SBATCH_OPTIONS)
    script = Path(words[0])
    for line in script.read_text(encoding="utf-8").splitlines():
        if line.startswith("#SBATCH "):
            found, rest = split([line.removeprefix("#SBATCH ")], SBATCH_OPTIONS)
            assert not rest, line
            options = found | options
    nodes = options["nodes"]
    spooled = Path(os.environ["STUB_DIR"]) / "slurm_script"
    shutil.copy(script, spooled)
    os.environ.update(
        SLURM_JOB_ID="4242", SLURM_JOB_NAME=options["job-name"], SLURM_JOB_NUM_NODES=nodes, SLURM_NNODES=nodes,
        SLURM_JOB_NODELIST=f"gpu[1-{nodes}]", SLURM_SUBMIT_DIR=os.getcwd(),
        SLURM_GPUS_ON_NODE=options["gpus-per-node"],
    )  # fmt: skip
    os.execvp("bash", ["bash", str(spooled), *words[1:]])


def srun(words: list[str]) -> int:
    """Run the command for each node; SIGUSR1 goes to every process below this one."""
    options, command = split(words, SRUN_OPTIONS)
    running: list[subprocess.Popen[bytes]] = []

    def signal_all(number: int, _frame: object) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(child.pid, number)

    signal.signal(signal.SIGUSR1, signal_all)
    for node in range(int(options["nodes"])):
        environment = {**os.environ, "SLURM_NODEID": str(node)}
        if "container-image" in options:
            command, environment["REPO"] = [on_host(word) for word in command], on_host(environment["REPO"])
        running.append(subprocess.Popen(command, env=environment))
    code = max(child.wait() for child in running)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python gives handlers up before it ends
    return code


def docker(words: list[str]) -> int:
    """Run the command with only the named part of the environment; only the command itself gets a signal."""
    assert words[0] == "run"
    options, rest = split(words[1:], DOCKER_OPTIONS, with_value=("-e", "-v"))
    environment = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("STUB_")}
    for option in options:
        if match := re.fullmatch(r"-e (\w+)(?:=(.*))?", option):
            name, value = match[1], match[2] if match[2] is not None else os.environ.get(match[1])
            environment |= {name: on_host(value)} if value is not None else {}
    child = subprocess.Popen([on_host(word) for word in rest[1:]], env=environment)
    signal.signal(signal.SIGUSR1, lambda number, _frame: child.send_signal(number))
    code = child.wait()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return code


def apptainer(words: list[str]) -> int:
    """Run the command of `exec`."""
    assert words[:2] == ["exec", "--nv"]
    assert words[2] == "--bind"
    os.environ["REPO"] = on_host(os.environ["REPO"])
    return subprocess.run([on_host(word) for word in words[5:]], check=False).returncode


def scontrol(words: list[str]) -> int:
    """Answer `show hostnames gpu[1-N]` and accept `requeue`."""
    if words[:2] == ["show", "hostnames"]:
        (count,) = re.fullmatch(r"gpu\[1-(\d+)\]", words[2]).groups()  # type: ignore[union-attr]
        names = [os.environ.get("STUB_HOST", "gpu1"), *(f"gpu{number}" for number in range(2, int(count) + 1))]
        print("\n".join(names))
        return 0
    return 0 if words[0] == "requeue" else 1


def python(words: list[str]) -> int:
    """Run a script, but stand in for torchrun: $STUB_CODE is its exit code, with $STUB_RANK it has a rank."""
    if words[0] != "-m":
        os.execv(sys.executable, [sys.executable, *words])
    return torchrun() if "STUB_RANK" in os.environ else int(os.environ.get("STUB_CODE", "0"))


def torchrun() -> int:
    """Run one rank, which leaves with $STUB_RANK_CODE, 0, after SIGUSR1; it listens only after a while."""
    rank = (
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "    print('rank saved', flush=True)\n"
        "    time.sleep(float(os.environ.get('STUB_SAVE_S', '0')))\n"
        "    os._exit(int(os.environ.get('STUB_RANK_CODE', '0')))\n"
        "time.sleep(0.5)\n"
        "signal.signal(signal.SIGUSR1, leave)\n"
        "print('rank trains', flush=True)\n"
        "time.sleep(30)\n"
        "os._exit(9)\n"
    )
    code = subprocess.run([sys.executable, "-c", rank], check=False).returncode
    time.sleep(0.2)
    return code


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2:])
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
