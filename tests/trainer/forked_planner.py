"""The planner's process as a fork of its rank, with imports and compiled loops: a fresh one takes 0.8 s of computing.
Tests of the planner's process itself (fresh_planners in tests/faults) and every run of the real command start a fresh
one."""

import ctypes
import functools
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dynamic_cp.search import planner_process
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import PlanOptions, Topology
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, samples_of

NAME = b"planner_process"
"""What tells a forked one from its rank's other children; Linux keeps so many letters."""
_PR_SET_NAME = 15


class ForkedPlanner:
    """What `PlannerProcess` asks of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], **_: Any) -> None:
        assert words[1:3] == ["-c", planner_process._RUN], words
        self._process = multiprocessing.get_context("fork").Process(target=_plan, args=(words[3:],))
        self._process.start()

    def poll(self) -> int | None:
        """Return how it ended, None while it lives."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the planner", timeout or 0.0)
        return self._process.exitcode


def _plan(words: Sequence[str]) -> None:
    gc.freeze()  # process groups of the rank may be garbage: to free them here, without their threads, is a crash
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME)
    sys.argv = ["-c", *words]
    planner_process.main()
    os._exit(0)


@functools.cache
def warm_up() -> None:
    """Load most of the planner's compiled loops, once, so that forks have them."""
    samples = samples_of([17, 100, 128, 30, 5, 50, 60, 70, 3, 2, 90, 20])
    for pp_size, vp_size in ((1, 1), (2, 2)):
        topology = Topology(num_lanes=4, tp_size=1, pp_size=pp_size, vp_size=vp_size, ranks_per_node=8)
        for exchanges in (("p2p",), ("p2p", "all_gather")):
            options = PlanOptions(max_tokens_per_rank=48, cp_comm_types=exchanges)
            plan_global_batch(samples, topology=topology, model=TINY_MODEL, hardware=TINY_HARDWARE, options=options)


def fork_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every planner's process forked from now on."""
    forked = SimpleNamespace(Popen=ForkedPlanner, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(planner_process, "subprocess", forked)
