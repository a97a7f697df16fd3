"""Trains twice: undisturbed, and with ranks, workers and the planner killed at random; both must give the same losses.

nice python -m tools.soak --steps 500 --kills 12 --seed 0

Ragged documents, 4 ranks, a tiny model, checkpoints. What a killed run computed before and after each resume must be
what the undisturbed run computed: loss and gradient norm bit for bit, and the samples of every lane in every step. The
undisturbed run is long enough to see memory grow: RSS of each rank and of the planner, as MB per 100 steps. Nothing may
be left: processes, files in /dev/shm, file descriptors, threads. The exit code is 1 when anything differs or grows. How
soon real jobs end after a kill is what `tools.kill_times` measures: here ranks wait less for one another to speak.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.faults.job import Job, RankEnd
from tests.faults.records import read_records, record_steps
from tests.trainer.commandline import command_line

TARGETS = ("rank", "rank", "planner", "rank", "worker", "rank", "starting rank")
END_LIMIT_S = 25.0
"""Seconds from a kill to the end of the last rank; a launcher's patience is 30 s."""
SETTLED_STEPS = 200
"""Steps after which memory is measured: by then allocators have filled their caches."""


@dataclass(kw_only=True)
class Soak:
    """What was asked for and what was found."""

    options: argparse.Namespace
    folder: Path
    wrong: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)

    def words(self, save: Path | None) -> list[str]:
        """Return the command line of a run that saves to and resumes from `save`."""
        steps = self.options.steps
        words = [
            f"--dynamic-cp --max-seqlen-per-dp-cp-rank {64 if self.options.ranks < 4 else 48} --num-layers 1",
            f"--train-iters {steps} --lr-decay-iters {steps}",
            f"--split 1,0,0 --data-path {self.folder}/documents --data-cache-path {self.folder}/cache --num-workers 1",
        ]
        if save is not None:
            words.append(f"--save {save} --load {save} --save-interval {self.options.save_interval}")
        return command_line(*words)

    def start(self, name: str, save: Path | None) -> Job:
        """Start the ranks; what they compute is written below `name`."""
        (self.folder / name).mkdir()
        sabotage = partial(record_steps, self.folder / name)
        return Job(self.folder / name, self.words(save), ranks=self.options.ranks, sabotage=sabotage, launched=True)

    def check(self, ok: bool, what: str) -> None:
        """Note what is wrong."""
        if not ok:
            self.wrong.append(what)
            print(f"WRONG: {what}", flush=True)


def write_documents(folder: Path, seed: int) -> None:
    """Write text files of ragged lengths: most of them short, some many times as long as a sample."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    for number, length in enumerate(np.clip(draw.lognormal(4.0, 1.2, size=400), 1, 2000).astype(int).tolist()):
        (folder / f"{number:04d}.txt").write_bytes(draw.integers(32, 127, size=length, dtype=np.uint8).tobytes())


def disturb(soak: Soak) -> list[list[dict[int, dict[str, Any]]]]:
    """Train to the end through all kills; return the records of each attempt, by rank."""
    options, draw = soak.options, random.Random(soak.options.seed)
    moments = sorted(draw.sample(range(2, options.steps - 2), options.kills))
    events = [(step, TARGETS[number % len(TARGETS)], draw.random()) for number, step in enumerate(moments)]
    attempts: list[list[dict[int, dict[str, Any]]]] = []
    while True:
        name = f"attempt_{len(attempts)}"
        with soak.start(name, soak.folder / "checkpoints") as job:
            ended = None
            while events and ended is None:
                step, target, fraction = events.pop(0)
                killed = _kill(soak, job, step, target, fraction)
                if killed != "planner":
                    ended = job.wait(END_LIMIT_S)
                    soak.check(all(end.code != 0 for end in ended), f"{name}: exit codes {_codes(ended)} after a kill")
            if ended is None:
                ended = job.wait(60.0 + options.steps)
                soak.check(all(end.code == 0 for end in ended), f"{name}: exit codes {_codes(ended)} at the end")
                attempts.append(read_records(soak.folder / name, options.ranks))
                return attempts
        attempts.append(read_records(soak.folder / name, options.ranks))


def _kill(soak: Soak, job: Job, step: int, target: str, fraction: float) -> str:
    """Kill at a random time after `step` was computed (a starting rank: after the start); return what was killed."""
    options = soak.options
    victim = int(fraction * 997) % options.ranks
    if target == "starting rank":
        time.sleep(3.0 * fraction)
    else:
        while _last_step(job.folder / "rank_0.jsonl") < step:
            if not all(process.is_alive() for process in job.processes):
                raise AssertionError(f"a rank ended on its own before step {step}:\n{job.said()}")
            time.sleep(0.02)
        time.sleep(0.2 * fraction)
    if target == "planner":
        job.planner().kill()
    elif target == "worker" and (workers := job.workers(victim)):
        workers[0].kill()
    else:
        job.kill(victim)
    soak.kills.append(f"{target} {victim if target != 'planner' else ''}".strip() + f" @ {step}")
    print(f"killed {soak.kills[-1]}", flush=True)
    return target


def _last_step(path: Path) -> int:
    lines = path.read_text().split("\n") if path.exists() else []
    return int(json.loads(lines[-2])["iteration"]) if len(lines) > 1 else 0


def _codes(ended: Sequence[RankEnd]) -> list[int]:
    return [end.code for end in ended]


def compare(
    soak: Soak, expected: list[dict[int, dict[str, Any]]], attempts: list[list[dict[int, dict[str, Any]]]]
) -> int:
    """Compare every step of every attempt with the undisturbed run; return the number of comparisons."""
    options, num_compared, computed = soak.options, 0, set()
    for number, attempt in enumerate(attempts):
        for rank, records in enumerate(attempt):
            for iteration, record in records.items():
                for name in ("loss", "grad_norm", "samples"):
                    soak.check(
                        record[name] == expected[rank][iteration][name],
                        f"attempt {number}, rank {rank}, iteration {iteration}: {name} {record[name]} instead of "
                        f"{expected[rank][iteration][name]}",
                    )
                num_compared += 1
        computed |= set(attempt[0])
    soak.check(
        computed == set(range(1, options.steps + 1)), f"{options.steps - len(computed)} steps were never computed"
    )
    for iteration in range(1, options.steps + 1):
        consumed = sorted({sample for records in expected for sample in records[iteration]["samples"]})
        soak.check(consumed == list(range(12 * (iteration - 1), 12 * iteration)), f"iteration {iteration}: {consumed}")
    return num_compared


def growth(soak: Soak, expected: list[dict[int, dict[str, Any]]]) -> dict[str, float]:
    """Return MB per 100 steps of each rank and of the planner, by least squares after the first steps."""
    slopes = {}
    settled = min(SETTLED_STEPS, soak.options.steps // 2)
    for rank, records in enumerate(expected):
        steps = [step for step in sorted(records) if step > settled]
        for name, what in (("rss_mb", f"rank {rank}"), ("planner_rss_mb", "planner")):
            values = [records[step][name] for step in steps]
            if values[0] is not None:
                slopes[what] = 100 * float(np.polyfit(steps, values, 1)[0])
                limit = soak.options.max_slope_mb
                soak.check(slopes[what] <= limit, f"{what} grows by {slopes[what]:.2f} MB per 100 steps, limit {limit}")
        # Not the very last step: other ranks, and with them connections, may be gone after it.
        first, last = records[steps[0]], records[steps[-2]]
        for name in ("fds", "threads", "children"):
            soak.check(first[name] == last[name], f"rank {rank}: {name} {first[name]} -> {last[name]}")
    return slopes


def _state() -> dict[str, Any]:
    me = psutil.Process()
    return {"fds": me.num_fds(), "children": len(me.children(recursive=True))}


def left_in_shm(before: set[str]) -> list[str]:
    """Return new files in /dev/shm that are left over: their maker, named in them, is dead, or no process maps them."""
    left = []
    for name in set(os.listdir("/dev/shm")) - before:
        makers = [int(word) for word in name.split("_") if word.isdecimal()]
        if not (psutil.pid_exists(makers[0]) if makers else _is_mapped(Path("/dev/shm", name))):
            left.append(name)
    return left


def _is_mapped(path: Path) -> bool:
    """Return whether a process maps a file, by its inode: a semaphore's maker maps it under an older name."""
    if not path.exists():
        return True  # gone meanwhile
    inode = str(path.stat().st_ino)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if any("/dev/shm/" in line and line.split()[4] == inode for line in maps.read_text().splitlines()):
                return True
    return False


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the findings; `wrong` among them is empty if all is well."""
    soak = Soak(options=options, folder=folder)
    write_documents(folder / "documents", options.seed)
    shm_before, before = set(os.listdir("/dev/shm")), _state()
    started_s = time.monotonic()
    with soak.start("undisturbed", None) as job:
        ended = job.wait(120.0 + 2.0 * options.steps)
    soak.check(
        all(end.code == 0 for end in ended), f"undisturbed: exit codes {_codes(ended)}\n{ended[0].output[-2000:]}"
    )
    undisturbed_s = time.monotonic() - started_s
    expected = read_records(folder / "undisturbed", options.ranks)
    attempts = disturb(soak)
    num_compared = compare(soak, expected, attempts)
    slopes = growth(soak, expected)
    after = _state()
    soak.check(after == before, f"this process: {before} -> {after}")
    left = left_in_shm(shm_before)
    soak.check(not left, f"left in /dev/shm: {left}")
    return {
        "steps": options.steps,
        "ranks": options.ranks,
        "kills": soak.kills,
        "resumes": len(attempts) - 1,
        "step_records_compared": num_compared,
        "final_loss": [float.fromhex(run[0][options.steps]["loss"]) for run in (expected, attempts[-1])],
        "rss_mb_per_100_steps": {what: round(slope, 3) for what, slope in sorted(slopes.items())},
        "rss_mb_at_the_end": [round(records[options.steps]["rss_mb"], 1) for records in expected],
        "fds_threads_children_of_rank_0": [expected[0][options.steps][name] for name in ("fds", "threads", "children")],
        "undisturbed_s": round(undisturbed_s, 1),
        "all_s": round(time.monotonic() - started_s, 1),
        "wrong": soak.wrong,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--max-slope-mb", type=float, default=1.0, help="MB per 100 steps; 40 steps say little")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, Path(folder))
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
