"""The real command on forked ranks with real exit codes: they start in no time, may be killed, and leave nobody behind.

    with Job(folder, "--mock-data ...", ranks=2) as job:
        job.wait_for(0, r"iteration +2/"); job.kill(1); ended = job.wait(20.0)

The ranks meet as under a launcher: through MASTER_ADDR and MASTER_PORT, with the store on rank 0 or in a process of its
own. Each rank leads a session, so that whoever it starts can be found even after the rank is dead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from dynamic_cp.search.planner_process import die_with_parent
from megatron.trainer import main
from megatron.trainer.ending import exits
from megatron.trainer.loop import training  # noqa: F401 imported once, before the ranks are forked
from tests import patience

SURVIVORS_LIMIT_S = 8.0
"""Seconds after the last rank in which its planner and workers must be gone, too: a worker of torch looks for its
parent every 5 s."""
_LOOK_UP_S = 0.01


class JobError(AssertionError):
    """A job that took too long or left a process behind; carries what its ranks said."""


class RankEnd(NamedTuple):
    """How a rank ended: exit code (negative: the signal), what it printed, seconds after the start of the job."""

    code: int
    output: str
    seconds: float


class Job:
    """A job of `pretrain_gpt.py` on forked ranks. sabotage: called on each before the command; own_store: the store has
    a process, as with torchrun; launched: when one rank ends badly, the others get SIGTERM."""

    def __init__(
        self, folder: Path, words: Sequence[str], *, ranks: int = 2, sabotage: Callable[[int], None] | None = None,
        own_store: bool = False, launched: bool = False, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
        for log in self._logs:
            log.unlink(missing_ok=True)
        self._launched = launched
        context = multiprocessing.get_context("fork")
        port = _free_port()
        rendezvous = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.store_host: Any = None
        if own_store:
            rendezvous |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            self.store_host = context.Process(target=_host_store, args=(port,), daemon=True)
            self.store_host.start()
        self.started_s = patience.now_s()
        self._ended: dict[int, float] = {}
        self.processes = []
        for rank in range(ranks):
            variables = rendezvous | {"RANK": str(rank)} | dict(environment or {})
            arguments = (os.getpid(), list(words), self._logs[rank], variables, sabotage)
            process = context.Process(target=_rank_main, args=arguments)
            process.start()
            self.processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.processes, *([self.store_host] if self.store_host else [])]:
            process.kill()
            process.join()
        for left in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        for process in [*self.processes, *([self.store_host] if self.store_host else [])]:
            process.close()

    def output(self, rank: int) -> str:
        return self._logs[rank].read_text() if self._logs[rank].exists() else ""

    def wait_for(self, rank: int, pattern: str, limit_s: float = 60.0) -> None:
        """Return when the output of `rank` matches; JobError: not within `limit_s`, or the rank ended before."""
        deadline_s = patience.now_s() + limit_s
        while not re.search(pattern, self.output(rank)):
            is_alive = self.processes[rank].is_alive()
            if patience.now_s() > deadline_s or (not is_alive and not re.search(pattern, self.output(rank))):
                raise JobError(
                    f"rank {rank} never said {pattern!r} ({'alive' if is_alive else 'dead'}):\n{self.said()}"
                )
            time.sleep(_LOOK_UP_S)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

    def planner(self) -> psutil.Process:
        found = planner_of(psutil.Process(self.processes[0].pid))
        assert found is not None, f"rank 0 has no planner process:\n{self.said()}"
        return found

    def workers(self, rank: int) -> list[psutil.Process]:
        return forked_children(psutil.Process(self.processes[rank].pid))

    def family(self) -> list[psutil.Process]:
        """Return every living process that a rank of this job is or ever started."""
        return living_in_sessions({process.pid for process in self.processes})

    def wait(self, limit_s: float, *, survivors_limit_s: float = SURVIVORS_LIMIT_S) -> list[RankEnd]:
        """Return how the ranks ended; JobError: one runs after `limit_s`, or what it started `survivors_limit_s`
        later."""
        deadline_s = patience.now_s() + limit_s
        told = False
        while len(self._ended) < len(self.processes):
            for rank, process in enumerate(self.processes):
                if rank not in self._ended and not process.is_alive():
                    self._ended[rank] = patience.now_s() - self.started_s
            if self._launched and not told and any(self.processes[rank].exitcode for rank in self._ended):
                told = True
                for rank in set(range(len(self.processes))) - set(self._ended):
                    self.signal(rank, signal.SIGTERM)
            if patience.now_s() > deadline_s:
                running = [rank for rank in range(len(self.processes)) if rank not in self._ended]
                raise JobError(f"ranks {running} still run after {limit_s:g} s:\n{self.said()}")
            time.sleep(_LOOK_UP_S)
        deadline_s = patience.now_s() + survivors_limit_s
        while family := self.family():
            if patience.now_s() > deadline_s:
                raise JobError(f"{family} still run {survivors_limit_s:g} s after the last rank:\n{self.said()}")
            time.sleep(0.05)
        return [
            RankEnd(process.exitcode, self.output(rank), self._ended[rank])
            for rank, process in enumerate(self.processes)
        ]

    def said(self) -> str:
        return "\n".join(f"--- rank {rank}:\n{self.output(rank)}" for rank in range(len(self.processes)))


def living_in_sessions(leaders: Collection[int]) -> list[psutil.Process]:
    """Return every living process of the sessions that these processes lead or led."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def planner_of(rank: psutil.Process) -> psutil.Process | None:
    """Return the planner process of rank 0, None on other ranks."""
    for child in rank.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _plans(child):
                return child
    return None


def _plans(child: psutil.Process) -> bool:
    """Return whether it is the planner's process, whether started anew or forked (tests.trainer.forked_planner)."""
    return "planner_process" in " ".join([child.name(), *child.cmdline()])


def forked_children(rank: psutil.Process) -> list[psutil.Process]:
    """Return the children that a rank has forked: DataLoader workers, the process that writes a checkpoint."""
    command, found = rank.cmdline(), []
    for child in rank.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline() == command and not _plans(child):
                found.append(child)
    return found


def _rank_main(
    parent: int, words: list[str], log: Path, environment: Mapping[str, str], sabotage: Callable[[int], None] | None
) -> None:
    die_with_parent(parent)
    os.setsid()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # as Python has it
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    exits.SPEAK_FIRST_S = 0.1  # no launcher ends the ranks that have not spoken yet
    if sabotage is not None:
        sabotage(int(environment["RANK"]))
    exits.leave(main.run(words))


def _host_store(port: int) -> None:
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while True:
        time.sleep(3600)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
