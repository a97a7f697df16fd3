"""Kills a rank of real jobs while they start and train; says how long the others live on, and what they print.

nice python -m tools.kill_times --kills 12 --seed 0

Every other job runs under torchrun, the others without a launcher: then only the ranks themselves can notice. Nothing
is shortened or patched. Without a launcher a rank that is killed before all have met is not noticed, the others wait
for --distributed-timeout-minutes: such a job is killed after its first iterations. The exit code is 1 when a job lives
on for LIMIT_S or a rank ends with a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests import patience
from tests.trainer.commandline import command_line

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 25.0
"""Seconds from a kill to the end of the last rank; torchrun's own patience is 30 s."""
START_LIMIT_S = 120.0
_LOOK_UP_S = 0.005


class RealJob:
    """Ranks of `pretrain_gpt.py`, each with an output of its own below `folder`."""

    def __init__(self, folder: Path, words: Sequence[str], num_ranks: int, *, launched: bool) -> None:
        self._folder, self._launched = folder, launched
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = ["pretrain_gpt.py", *words]
        if launched:
            launch = "-m torch.distributed.run --standalone --local-addr localhost --redirects 3"
            launch += f" --nproc-per-node {num_ranks} --log-dir {folder}"
            with (folder / "launcher").open("w") as said:
                self.launcher = psutil.Popen(
                    [sys.executable, *launch.split(), *command], cwd=ROOT, env=environment, stdout=said, stderr=said
                )
            self.ranks: list[psutil.Process] = []
            try:
                self.ranks = self._ranks_of_launcher(num_ranks)
            except TimeoutError:
                self.end()
                raise
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.launcher, self.ranks = None, []
        for rank in range(num_ranks):
            with (folder / f"out{rank}").open("w") as out, (folder / f"err{rank}").open("w") as err:
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.ranks.append(psutil.Popen([sys.executable, *command], cwd=ROOT, env=own, stdout=out, stderr=err))

    def _ranks_of_launcher(self, num_ranks: int) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}

        def all_found() -> bool:
            for child in self.launcher.children():
                with suppress(psutil.Error, KeyError):  # still torchrun's copy, without the variables of a rank
                    if "pretrain_gpt.py" in child.cmdline():
                        found[int(child.environ()["RANK"])] = child
            return len(found) == num_ranks

        wait_until(all_found, START_LIMIT_S)
        return [found[rank] for rank in range(num_ranks)]

    def said(self, rank: int, stream: str) -> str:
        """Return what a rank has written to "out" or "err"."""
        name = f"*/attempt_0/{rank}/std{stream}.log" if self._launched else f"{stream}{rank}"
        return "".join(path.read_text() for path in self._folder.glob(name))

    def is_over(self) -> bool:
        """Return whether all ranks have ended."""
        return not any(map(is_alive, self.ranks))

    def end(self) -> None:
        """Kill what is left."""
        for process in (*self.ranks, *([self.launcher] if self.launcher else [])):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has not ended."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    """Return as soon as `condition()` holds; TimeoutError if it does not within `limit_s`."""
    deadline_s = patience.now_s() + limit_s
    while not condition():
        if patience.now_s() > deadline_s:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(_LOOK_UP_S)


def kill_one(number: int, options: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Start a job, kill one of its ranks at a random moment, and return what happened."""
    launched = number % 2 == 0
    victim = draw.randrange(options.ranks)
    words = command_line(
        f"--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank {64 if options.ranks < 4 else 48} --train-iters 10000",
        "--eval-interval 5 --eval-iters 1 --use-distributed-optimizer",
    )
    with tempfile.TemporaryDirectory() as name:
        job = RealJob(Path(name), words, options.ranks, launched=launched)
        try:
            starting = launched and number % 6 == 0
            if starting:
                time.sleep(draw.uniform(0.0, options.start_s))
            else:
                wait_until(lambda: "iteration        3/" in job.said(0, "out") or job.is_over(), START_LIMIT_S)
                time.sleep(draw.uniform(0.0, 1.0))
            assert not job.is_over(), f"it ended by itself:\n{job.said(0, 'err')}"
            steps = re.findall(r"iteration +(\d+)/", job.said(0, "out"))
            job.ranks[victim].kill()
            killed_s = patience.now_s()
            with suppress(TimeoutError):
                wait_until(job.is_over, LIMIT_S)
            ended_s = patience.now_s() - killed_s
            errors = [job.said(rank, "err") for rank in range(options.ranks)]
            return {
                "launcher": "torchrun" if launched else "none",
                "rank": victim,
                "iteration": int(steps[-1]) if steps else 0,
                "last_rank_ended_after_s": round(ended_s, 2) if job.is_over() else None,
                "said": [line[:160] for text in errors for line in text.splitlines() if line.startswith("error")],
                "tracebacks": sum("Traceback" in text for text in errors),
            }
        finally:
            job.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, print what was found as JSON, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-s", type=float, default=8.0, help="kills of starting jobs come within these seconds")
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    kills = []
    for number in range(options.kills):
        kills.append(kill_one(number, options, draw))
        print(json.dumps(kills[-1]), flush=True)
    ends_s: dict[str, list[float]] = {}
    for kill in kills:
        ends_s.setdefault(kill["launcher"], []).append(kill["last_rank_ended_after_s"] or LIMIT_S)
    found = {
        "kills": len(kills),
        "last_rank_ended_after_s": {launcher: [min(each), max(each)] for launcher, each in ends_s.items()},
        "lived_on": sum(kill["last_rank_ended_after_s"] is None for kill in kills),
        "tracebacks": sum(kill["tracebacks"] for kill in kills),
    }
    print(json.dumps(found, indent=1))
    return 1 if found["lived_on"] or found["tracebacks"] else 0


if __name__ == "__main__":
    sys.exit(main())
