"""A process of its own that plans, so that planning takes no time of a training step.

    process = PlannerProcess(); process.start(problem); process.submit("train/7", samples); process.receive(1.0)

It is a fresh interpreter that imports numpy and the planner only, gets its work through a socket pair and leaves when
that closes, so it cannot outlive the process that started it. Signals to the process group do not reach it: whoever
trains finishes the step first.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DynamicCPError, InfeasibleSampleError
from dynamic_cp.packing.static import check_static_cp_size
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.plans.lane_plan import PlanFacts, encode_lanes
from dynamic_cp.plans.serialize import dumps
from dynamic_cp.pricing.allowed import allowed_cp_sizes, exchanges_of_policy, widest_bucket
from dynamic_cp.search.search import check_feasible, plan_batch
from dynamic_cp.types import BY_PLACEMENT, Hardware, Mask, Problem, Sample

CHECK_PARENT_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)

# Not -m: the module would exist twice, as __main__ and under its own name, and so would the classes that are sent.
# Python looks for modules in the working folder first ('' of -c), and that may be one that others write to.
_RUN = "import sys; sys.path = [*filter(None, sys.path)]; from dynamic_cp.search.planner_process import main; main()"


def static_fallback(problem: Problem, max_seqlen: int) -> Problem:
    """Return the problem of the fallback: the static policy at static_cp_size where that holds a sample of `max_seqlen`
    tokens, else at the smallest CP size that does; in any case one that the job built groups for, with exchanges that
    need no others (`exchanges_of_policy`). Where only all lanes hold such a sample, and they are no power of two, no
    static plan does: then it is a placed one, of a fast search. Raises InfeasibleSampleError: no allowed size does; a
    run that has called this at its start always has a fallback."""
    topology, options = problem.topology, problem.options
    check_feasible(max_seqlen, topology, options)
    if max_seqlen > widest_bucket(topology, options, places=False)[0]:
        options = replace(options, search="fast", pool="off", cp_comm_types=(BY_PLACEMENT,))
        return replace(problem, policy="dynamic", options=options)
    longest = Sample(sample_id=0, seqlen=max_seqlen)
    sizes = allowed_cp_sizes(topology, options)
    wanted = options.static_cp_size
    for cp_size in (wanted, *sizes) if wanted in sizes else sizes:
        with contextlib.suppress(InfeasibleSampleError):
            check_static_cp_size(cp_size, longest, topology, options)
            break
    exchanges = exchanges_of_policy("static", options.cp_comm_types, problem.model)
    return replace(problem, policy="static", options=replace(options, static_cp_size=cp_size, cp_comm_types=exchanges))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A global batch to plan. Two arrays instead of samples: they are sent ten times as fast.

    Attributes:
        key: names it in the answer.
        sample_ids, seqlens: int64 [num_samples].
        masks: as in `GlobalBatch`.
        wants_whole: whether the answer should hold the whole plan.
        hardware: what the cost model is to use for this request; None = the problem's.
    """

    key: str
    sample_ids: NDArray[np.int64]
    seqlens: NDArray[np.int64]
    masks: Sequence[Mask | None] | None = None
    wants_whole: bool = False
    hardware: Hardware | None = None

    @classmethod
    def of(
        cls, key: str, samples: Sequence[Sample], *, wants_whole: bool = False, hardware: Hardware | None = None
    ) -> Request:
        batch = GlobalBatch.of(samples)
        return cls(
            key=key,
            sample_ids=batch.sample_ids,
            seqlens=batch.seqlens,
            masks=batch.masks,
            wants_whole=wants_whole,
            hardware=hardware,
        )

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(GlobalBatch(self.sample_ids, self.seqlens, self.masks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request: a plan, an error of the input, or a failure of the planner.

    Attributes:
        lanes: one message per lane for `lane_plan.decode_lane`, or None.
        whole: `serialize.dumps` of the plan, if asked for.
        facts: of the plan, or None.
        error: the input has no plan: every rank must hear that.
        failure: the planner is at fault: another plan may do.
    """

    key: str
    lanes: tuple[bytes, ...] | None = None
    whole: str | None = None
    facts: PlanFacts | None = None
    error: DynamicCPError | None = None
    failure: str | None = None


def answer(problem: Problem, request: Request, fallback: str | None = None) -> Answer:
    """Return the answer of `problem` to `request`; does not raise. `fallback`: why this is not the plan that was asked
    for, to be told with the plan."""
    started = time.perf_counter()
    if request.hardware is not None:
        problem = replace(problem, hardware=request.hardware)
    try:
        planned = plan_batch(problem, request.samples)
        facts = PlanFacts.of(planned, problem.model, planner_s=time.perf_counter() - started, fallback=fallback)
        return Answer(
            key=request.key,
            lanes=tuple(encode_lanes(planned.plan, facts)),
            whole=dumps(planned.plan) if request.wants_whole else None,
            facts=facts,
        )
    except DynamicCPError as error:
        return Answer(key=request.key, error=error)
    except Exception as error:
        traceback.print_exc()
        return Answer(key=request.key, failure=f"the planner raised {type(error).__name__}: {error}")


class PlannerProcess:
    """The planner's process, seen from the process that wants plans. Answers come in the order of the requests."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self, problem: Problem) -> None:
        """Start the process; returns at once, its imports take a second."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The ranks of a node leave it about one core; and plans must not depend on who else is busy.
                env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
            )
        self._connection = Connection(ours.detach())
        self._connection.send(problem)

    def submit(self, request: Request) -> None:
        """Hand over a request. Raises OSError: the process is gone."""
        self._open().send(request)

    def receive(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None when there is none after `timeout_s`. Raises EOFError, OSError: the process
        is gone."""
        connection, process = self._open(), self._process
        if connection.poll(timeout_s):
            return cast(Answer, connection.recv())
        if process is not None and process.poll() is not None:
            raise EOFError  # a fork of this process may hold the other end open, so that the connection does not tell
        return None

    def kill(self) -> None:
        """End the process, whatever it does; the connection then ends, too."""
        process = self._process  # another thread may be closing
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process and forget it."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def exit_status(self) -> str:
        """Return how the process ended, in words."""
        if self._process is None:
            return "was not running"
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by signal {-status}" if status < 0 else f"left with status {status}"

    def _open(self) -> Connection:
        if self._connection is None:
            raise OSError("the planner process is not running")
        return self._connection


def _python_path() -> str:
    """Return PYTHONPATH with the folder of this package first, which need not be installed."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _serve(connection: Connection, parent: int) -> None:
    problem: Problem = connection.recv()
    while True:
        # A fork of the parent may hold the other end open, so its end alone does not tell that the parent is gone.
        while not connection.poll(CHECK_PARENT_EVERY_S):
            if os.getppid() != parent:
                return
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        connection.send(answer(problem, request))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever it is doing then; only Linux can.

    Args:
        parent: process id of who started this process; if it is dead already, this process ends now.

    Limits: the kernel goes by the thread that started the process: it must live as long as the process is wanted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve the parent through the file descriptor that the command line names."""
    # What it says stands in the log of rank 0, which is stdout.
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    parent = int(sys.argv[2])
    die_with_parent(parent)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent left while it was answered
        _serve(Connection(int(sys.argv[1])), parent)
