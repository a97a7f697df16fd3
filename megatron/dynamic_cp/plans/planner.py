"""Rank 0's planner: plans in the planner process, publishes through the job's store, and always has a fallback.

    submit(request) -> planner process -> answer -> store: one message per lane
                       raises, hangs or dies -> the static plan of that step, with a warning (strict: an error)

Only the choice between a plan and its fallback depends on a clock, and rank 0 alone makes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.search.planner_process import Answer, PlannerProcess, Request, answer, static_fallback
from dynamic_cp.types import Hardware, Problem, Sample
from megatron.dynamic_cp.agreement import messages
from megatron.dynamic_cp.agreement.verify import job_store

logger = logging.getLogger(__name__)

PLAN, ERROR = b"P", b"E"
WHOLE = "whole"
_IDLE_S = 0.1
CLOSE_LIMIT_S = 5.0
"""Seconds that closing waits for a thread, which may be inside a store that does not answer."""


def lane_key(key: str, lane: int | str) -> str:
    """Return the store's key of one lane's part of an answer, or of the WHOLE plan."""
    return f"{key}/{lane}"


class Planner:
    """Plans for all ranks of the job; lives on rank 0.

    Args:
        problem: what is planned for.
        max_seqlen: longest sample of the run, tokens; the fallback must hold it.
        ahead: plan in a process of its own; otherwise inside `submit`.
        strict: a failure of the planner is an error of the run, there is no fallback.
        recorded: gives the answers of an earlier run instead of planning.
        on_answer: called with every published answer and its request, from any thread; makes answers hold whole plans.
        publish_whole: publish whole plans, too.

    Attributes:
        lost_store: why nothing can be published any more, or None.

    Raises:
        InfeasibleSampleError: no static plan holds `max_seqlen`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        max_seqlen: int,
        ahead: bool = False,
        strict: bool = False,
        recorded: Callable[[Request], Answer] | None = None,
        on_answer: Callable[[Request, Answer], None] | None = None,
        publish_whole: bool = False,
    ) -> None:
        self._problem = problem
        self._static = static_fallback(problem, max_seqlen)
        self._strict = strict
        self._recorded = recorded
        self._on_answer = on_answer
        self._publish_whole = publish_whole
        self._store = job_store().clone()  # its own connection: a long answer must not block the ranks' other traffic
        self._changed = threading.Condition()
        self._waiting: dict[str, Request] = {}
        self._given_up: dict[str, str] = {}
        self._deaths: Counter[str] = Counter()
        self._to_discard: deque[str] = deque()
        self._process = PlannerProcess() if ahead and recorded is None else None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._bug: str | None = None
        self.lost_store: str | None = None
        if self._process is not None:
            self._process.start(problem)
            self._thread = threading.Thread(
                target=self._run, args=(self._process,), name="dynamic-cp-planner", daemon=True
            )
            self._thread.start()

    def submit(self, key: str, samples: Sequence[Sample], hardware: Hardware | None = None) -> None:
        """Have a global batch planned and published under `key`; returns immediately when planning ahead. `hardware`:
        what the cost model is to use; None = the problem's."""
        wants_whole = self._publish_whole or self._on_answer is not None
        request = Request.of(key, samples, wants_whole=wants_whole, hardware=hardware)
        with self._changed:
            self._waiting[request.key] = request
            self._changed.notify()
        if self._thread is None:
            with self._noting_a_lost_store():
                self._settle(request, (self._recorded or self._plan_here)(request))
        elif self._bug is not None:
            with self._noting_a_lost_store():
                self._settle(request, Answer(key=key, error=DynamicCPError(self._bug)))

    def fall_back(self, key: str, why: str) -> None:
        """Have the static plan published for `key`, or in a strict run the error, unless it has its plan by now. Called
        by whoever waited too long, perhaps repeatedly. The planner process is ended; a new one takes the other
        requests. Takes no lock and does not touch the store: the planner's thread may wait inside it."""
        if key in self._waiting and key not in self._given_up:
            self._given_up[key] = why
            if self._process is not None:
                self._process.kill()

    def discard(self, key: str) -> None:
        """Remove what was published for `key`, which all ranks have read."""
        with self._changed:
            self._to_discard.append(key)
            self._changed.notify()
        if self._thread is None:
            with self._noting_a_lost_store():
                self._discard_all()

    def close(self) -> None:
        """End the process and the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._process is not None:
            self._process.kill()  # first: the thread may be in the middle of a message that a hung process never ends
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
        if self._process is not None:
            self._process.close()

    def _plan_here(self, request: Request) -> Answer:
        return answer(self._problem, request)

    def _settle(self, request: Request, given: Answer) -> None:
        """Publish an answer; in place of a failure the static plan, or in a strict run the error."""
        if given.failure is not None:
            given = self._in_place_of_failure(request, given.failure)
        with self._changed:
            if self._waiting.pop(request.key, None) is None:
                return  # the late answer to a request that got its fallback
            self._given_up.pop(request.key, None)
        self._publish(given)
        if self._on_answer is not None:
            self._on_answer(request, given)

    def _in_place_of_failure(self, request: Request, why: str) -> Answer:
        if self._strict:
            error = DynamicCPError(f"no plan for {request.key}: {why} (--dynamic-cp-strict)")
            return Answer(key=request.key, error=error)
        logger.warning("%s: %s; this step runs the static plan", request.key, why)
        static = answer(self._static, request, fallback=why)
        if static.failure is None:
            return static
        error = DynamicCPError(f"no plan for {request.key}: {why}; nor a static one: {static.failure}")
        return Answer(key=request.key, error=error)

    def _publish(self, given: Answer) -> None:
        num_lanes = self._problem.topology.num_lanes
        if given.error is not None:
            error = ERROR + messages.encode_error(given.error)
            parts = {lane_key(given.key, lane): error for lane in range(num_lanes)}
        else:
            assert given.lanes is not None, "an answer is a plan, an error or a failure"
            parts = {lane_key(given.key, lane): PLAN + part for lane, part in enumerate(given.lanes)}
            if self._publish_whole and given.whole is not None:  # before the parts: whoever has one asks for it
                self._store.set(lane_key(given.key, WHOLE), given.whole)
        _set_all(self._store, parts)

    def _run(self, process: PlannerProcess) -> None:
        with self._noting_a_lost_store():
            try:
                self._serve(process)
            except RuntimeError:
                raise
            except Exception as error:  # a bug: everybody hears of it instead of waiting
                logger.exception("the planner's thread ended")
                self._bug = f"rank 0's planner ended: {type(error).__name__}: {error}; its log has the traceback"
                for request in list(self._waiting.values()):
                    self._settle(request, Answer(key=request.key, error=DynamicCPError(self._bug)))

    @contextlib.contextmanager
    def _noting_a_lost_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what a store raises; only this rank can be told
            self.lost_store = f"{type(error).__name__}: {error}"

    def _serve(self, process: PlannerProcess) -> None:
        """Hand requests to the process one at a time, so that neither side ever blocks in a full pipe."""
        given_out: Request | None = None
        while not self._is_closed:
            self._settle_given_up()
            try:
                if given_out is None:
                    given_out = self._next_request()
                    if given_out is not None:
                        process.submit(given_out)
                else:
                    given = process.receive(_IDLE_S)
                    if given is not None:
                        self._settle(given_out, given)
                        given_out = None
            except (EOFError, OSError):
                if self._is_closed:
                    return
                self._after_death(process, given_out)
                given_out = None
            self._discard_all()

    def _settle_given_up(self) -> None:
        for key, why in list(self._given_up.items()):
            if key in self._waiting:
                self._settle(self._waiting[key], Answer(key=key, failure=why))

    def _next_request(self) -> Request | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._to_discard or self._is_closed)
            return next(iter(self._waiting.values()), None)

    def _after_death(self, process: PlannerProcess, given_out: Request | None) -> None:
        """Start a new process; a request that ended two of them gets its fallback."""
        how = process.exit_status()
        self._settle_given_up()
        logger.warning("the planner process %s; a new one takes its place", how)
        if given_out is not None and given_out.key in self._waiting:
            self._deaths[given_out.key] += 1
            if self._deaths[given_out.key] > 1:
                self._settle(given_out, Answer(key=given_out.key, failure=f"the planner process {how}, twice"))
        process.close()
        try:
            process.start(self._problem)
        except OSError as error:  # out of memory: the next caller that needs the process comes here again
            logger.warning("no new planner process could be started: %s", error)

    def _discard_all(self) -> None:
        while self._to_discard:
            key = self._to_discard.popleft()
            for lane in range(self._problem.topology.num_lanes):
                self._store.delete_key(lane_key(key, lane))
            if self._publish_whole:
                self._store.delete_key(lane_key(key, WHOLE))


def _set_all(store: dist.Store, messages: Mapping[str, bytes]) -> None:
    if store.has_extended_api():
        store.multi_set(list(messages), list(messages.values()))
    else:
        for key, message in messages.items():
            store.set(key, message)
