"""Kills or stops processes at random moments of a save; every job must end soon, leave nothing behind and resume equal.

nice python -m tools.save_kills --kills 50 --seed 0

Two ranks train a tiny model on ragged documents and save in the middle, at the end or after a signal, waiting for the
files or beside the training, under torchrun or without a launcher. At some moment of one save a rank, its writer, the
planner or a DataLoader worker gets SIGKILL or SIGSTOP. Then: the job ends within 15 s, or goes on to its end; who
survives says one line, no traceback; no process and no shared memory stays; the same command then trains to the end.
Losses, gradient norms and samples of all steps, before and after, are bit for bit those of an undisturbed run. The exit
code is 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron.trainer import main
from megatron.trainer.checkpoints import checkpoint_files, saving
from megatron.trainer.checkpoints.saving import WriterProcess
from megatron.trainer.ending import exits
from megatron.trainer.loop import training
from tests import patience
from tests.faults.job import Job, forked_children, living_in_sessions, planner_of
from tests.faults.records import read_records, record_steps
from tests.trainer.commandline import command_line
from tools.soak import left_in_shm, write_documents

NUM_RANKS = 2
NUM_STEPS = 8
END_LIMIT_S = 15.0
"""Seconds from the kill to the end of the job, the 5 s of --stopped-process-timeout among them."""
LEFT_LIMIT_S = 2.0
SAVES = {"middle": 4, "after a signal": 6, "last": NUM_STEPS}
"""Kind of save -> its iteration. The signal comes in iteration 5, which makes the next one the last."""
MOMENTS = ("begins", "plans", "forks", "writes", "names", "renames")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One kill.

    Attributes:
        victim: "rank", or the "writer", "planner" or "worker" of it.
        signal: "SIGKILL" or "SIGSTOP".
        save: of SAVES.
        moment: of MOMENTS; a writer's is "writes".
        delay_s: after the beginning of that moment.
        beside: with --async-save.
        launched: under torchrun; otherwise the store is on rank 0.
    """

    victim: str
    rank: int
    signal: str
    save: str
    moment: str
    delay_s: float
    beside: bool
    launched: bool

    @classmethod
    def draw(cls, draw: random.Random) -> Trial:
        """Return a random trial."""
        victim = draw.choice(("rank", "rank", "rank", "writer", "writer", "planner", "worker"))
        moment = "writes" if victim == "writer" else draw.choice(MOMENTS)
        return cls(
            victim=victim,
            rank=0 if victim == "planner" or moment == "renames" else draw.randrange(NUM_RANKS),
            signal=draw.choice(("SIGKILL", "SIGKILL", "SIGSTOP")),
            save=draw.choice(tuple(SAVES)),
            moment=moment,
            delay_s=draw.choice((0.0, 0.0, draw.uniform(0.0, 0.03))),
            beside=draw.random() < 0.5,
            launched=draw.random() < 0.4,
        )

    def __str__(self) -> str:
        return (
            f"{self.signal} to the {self.victim} of rank {self.rank}, {1000 * self.delay_s:.0f} ms after the save "
            f"({self.save}) {self.moment}, {'beside the training' if self.beside else 'training waits'}, "
            f"{'torchrun' if self.launched else 'no launcher'}"
        )


def sabotage(trial: Trial, folder: Path, rank: int) -> None:
    """Make this rank record its steps, and send the trial's signal when its moment comes."""
    exits.SPEAK_FIRST_S = 2.0  # as users have it
    record_steps(folder, rank)
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    if trial.save == "after a signal":
        _signal_rank_zero(rank)
    if rank == trial.rank:
        _strike_in_the_moment(trial, folder)


def _signal_rank_zero(rank: int) -> None:
    real = training.Loop._step

    def step(loop: training.Loop, steps: Any) -> Any:
        outcome = real(loop, steps)
        if rank == 0 and loop.run.scheduler.num_steps == 12 * 5:  # samples: after iteration 5
            signal.raise_signal(signal.SIGTERM)
        return outcome

    training.Loop._step = step  # type: ignore[method-assign]


def _strike_in_the_moment(trial: Trial, folder: Path) -> None:
    """Let the trial's signal be sent `delay_s` after the moment, by the rank or, when it writes, by its writer."""
    rank, iteration = psutil.Process(), SAVES[trial.save]
    workers: list[psutil.Process] = []

    def strike() -> None:
        victim = {
            "rank": lambda: rank,
            "planner": lambda: planner_of(rank),
            "worker": lambda: workers[0],
            "writer": psutil.Process,
        }[trial.victim]()
        (folder / "struck").write_text(str(time.monotonic()))
        victim.send_signal(signal.Signals[trial.signal])

    def begin(moment: str) -> None:
        if moment == trial.moment and not (folder / "struck").exists():
            threading.Timer(trial.delay_s, strike).start() if trial.delay_s else strike()

    def hook(owner: Any, name: str, moment: str, iteration_of: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if iteration_of(*args) == iteration:
                if moment == "begins":
                    workers[:] = forked_children(rank)
                begin(moment)
            return real(*args, **options)

        setattr(owner, name, call)

    saver = saving.Saver
    hook(saver, "save", "begins", lambda _saver, position: position.iteration)
    hook(saver, "_request", "plans", lambda _saver, _folder, position: position.iteration)
    hook(WriterProcess, "start", "forks", lambda _writer, _request: iteration if workers else 0)
    named: list[int] = []

    def is_named(saver: saving.Saver) -> int:
        named[:] = [saver._unnamed.iteration] if saver._unnamed else []
        return 0

    hook(saver, "finish", "", is_named)
    hook(saving, "_of_all_ranks", "names", lambda _files: named[0])
    hook(checkpoint_files, "commit", "renames", lambda _folder, committed, *_: committed)
    real_write = FileSystemWriterAsync.write_preloaded_data

    def write(*args: Any, **options: Any) -> Any:
        _, _, (path, *_), *_ = args
        if f"iter_{iteration:07d}" in str(path):
            begin("writes")
        return real_write(*args, **options)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)


@dataclass(kw_only=True)
class Checks:
    """What was checked, and what was found wrong."""

    folder: Path
    wrong: list[str] = field(default_factory=list)
    end_seconds: list[float] = field(default_factory=list)

    def check(self, ok: bool, what: str) -> None:
        """Note what is wrong."""
        if not ok:
            self.wrong.append(what)
            print(f"WRONG: {what}", flush=True)


def words_of(folder: Path, trial: Trial | None) -> list[str]:
    """Return the command line of a trial whose data lie in `folder`; without checkpoints if there is no trial."""
    words = [
        f"--dynamic-cp --max-seqlen-per-dp-cp-rank 64 --num-layers 1 --train-iters {NUM_STEPS} --lr-decay-iters 100",
        f"--split 1,0,0 --data-path {folder}/documents --data-cache-path {folder}/cache --num-workers 1",
    ]
    if trial is not None:
        words.append(f"--save {folder}/saved --load {folder}/saved --save-interval 4")
        words += ["--async-save"] if trial.beside else []
    return command_line(*words)


def run_trial(checks: Checks, trial: Trial, name: str, expected: list[dict[int, dict[str, Any]]]) -> None:
    """Run a job into its kill, then to its end."""
    folder = checks.folder / name
    folder.mkdir()
    for shared in ("documents", "cache"):
        (folder / shared).symlink_to(checks.folder / shared)
    shm_before = set(os.listdir("/dev/shm"))
    words = words_of(folder, trial)
    started_s, began_s = time.monotonic(), patience.now_s()
    succeeded, output = (_under_torchrun if trial.launched else _without_launcher)(trial, folder, words)
    ended_s, over_s = time.monotonic(), patience.now_s()
    leaders = [int((folder / f"pid_{rank}").read_text()) for rank in range(NUM_RANKS)]
    while (left := living_in_sessions(leaders)) and patience.now_s() < over_s + LEFT_LIMIT_S:
        time.sleep(0.02)
    checks.check(not left, f"{name}: {left} live on")
    for process in left:
        process.kill()
    checks.check((folder / "struck").exists(), f"{name}: the moment never came")
    # A planner is replaced, and at the end nobody needs a worker: the job then ends as it would have.
    if not succeeded:
        took_s = ended_s - float((folder / "struck").read_text())
        took_s *= (over_s - began_s) / (ended_s - started_s)  # the share in which it did not wait for a processor
        checks.end_seconds.append(took_s)
        checks.check(took_s < END_LIMIT_S, f"{name}: ended {took_s:.1f} s after the signal")
        said = [line for line in output.splitlines() if line.startswith("error")]
        checks.check(1 <= len(said) < NUM_RANKS + 1, f"{name}: said {said}")
        checks.check(re.search(r"^rank \d+ failed", output, re.MULTILINE) is None, f"{name}: a traceback")
    first = read_records(folder, NUM_RANKS)
    with Job(folder / "again", words, ranks=NUM_RANKS, sabotage=partial(record_steps, folder / "again")) as job:
        codes = [end.code for end in job.wait(60.0)]
        checks.check(codes == [0] * NUM_RANKS, f"{name}: the resumed job ended with {codes}:\n{job.said()}")
    again = read_records(folder / "again", NUM_RANKS)
    steps = {step for records in (first[0], again[0]) for step in records}
    checks.check(steps == set(range(1, NUM_STEPS + 1)), f"{name}: steps {sorted(steps)} were computed")
    for attempt in (first, again):
        for rank, records in enumerate(attempt):
            for step, record in records.items():
                for key in ("loss", "grad_norm", "samples"):
                    same = record[key] == expected[rank][step][key]
                    checks.check(same, f"{name}: rank {rank}, step {step}: {key} {record[key]}")
    left_files = left_in_shm(shm_before)
    checks.check(not left_files, f"{name}: left in /dev/shm: {left_files}")
    if any(what.startswith(name + ":") for what in checks.wrong):
        print(output, flush=True)


def _without_launcher(trial: Trial, folder: Path, words: list[str]) -> tuple[bool, str]:
    """Return whether all ranks left with 0, and what they said."""
    with Job(folder, words, ranks=NUM_RANKS, sabotage=partial(sabotage, trial, folder)) as job:
        ended = job.wait(60.0, survivors_limit_s=60.0)
        return not any(end.code for end in ended), job.said()


def _under_torchrun(trial: Trial, folder: Path, words: list[str]) -> tuple[bool, str]:
    """Return whether the launcher left with 0, and what all said."""
    (folder / "trial.json").write_text(json.dumps([asdict(trial), words]))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        "--nproc-per-node",
        str(NUM_RANKS),
    ]
    job = subprocess.Popen(
        [*launcher, "-m", "tools.save_kills", "--as-rank-of", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = job.communicate(timeout=150.0)[0]
    return job.returncode == 0, output


def as_rank_of(folder: Path) -> int:
    """Train as one rank of a trial under torchrun; return the exit code."""
    trial, words = json.loads((folder / "trial.json").read_text())
    sabotage(Trial(**trial), folder, int(os.environ["RANK"]))
    return main.run(words)


def run(trials: Sequence[Trial], folder: Path) -> Checks:
    """Run all trials and return what was found."""
    checks = Checks(folder=folder)
    write_documents(folder / "documents", seed=0)
    (folder / "cache").mkdir()
    undisturbed = folder / "undisturbed"
    with Job(undisturbed, words_of(folder, None), ranks=NUM_RANKS, sabotage=partial(record_steps, undisturbed)) as job:
        checks.check([end.code for end in job.wait(120.0)] == [0] * NUM_RANKS, job.said())
    expected = read_records(undisturbed, NUM_RANKS)
    checks.check(all(len(records) == NUM_STEPS for records in expected), "the undisturbed run is not whole")
    for number, trial in enumerate(trials):
        print(f"{number + 1}/{len(trials)} {trial}", flush=True)
        run_trial(checks, trial, f"trial_{number}", expected)
    return checks


def start(argv: Sequence[str] | None = None) -> int:
    """Run the trials and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as-rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.as_rank_of is not None:
        exits.leave(as_rank_of(options.as_rank_of))
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        checks = run([Trial.draw(draw) for _ in range(options.kills)], Path(folder))
    seconds = sorted(checks.end_seconds)
    print(
        f"{options.kills} kills, {len(seconds)} jobs ended by them, after {seconds[0]:.1f} to {seconds[-1]:.1f} s; "
        f"{len(checks.wrong)} things wrong"
    )
    return 1 if checks.wrong else 0


if __name__ == "__main__":
    sys.exit(start())
