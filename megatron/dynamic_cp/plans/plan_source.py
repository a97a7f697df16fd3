"""Where the plan of a step comes from, on every rank: asked for early, fetched in the background, taken when needed.

    request(step + lookahead)  ->  rank 0's Planner  ->  store  ->  fetched by a thread  ->  take(step)

A rank fetches its own lane's part only. It polls the store at growing intervals: a wait inside the store blocks signal
handlers and prints a warning whenever it times out.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist

from dynamic_cp.errors import DisagreementError, DynamicCPError
from dynamic_cp.plans import serialize
from dynamic_cp.plans.lane_plan import LanePlan, PlanFacts, decode_lane, lane_plan
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import Hardware, Plan, PlannedBatch, Sample, Topology
from megatron.dynamic_cp.agreement.messages import decode_error
from megatron.dynamic_cp.agreement.verify import (
    agree,
    beat,
    job_store,
    lost_store,
    rank_zero_is_silent,
    silent_rank_zero,
)
from megatron.dynamic_cp.plans.planner import CLOSE_LIMIT_S, ERROR, WHOLE, Planner, lane_key

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 300.0
_STOP = -1
_LOOK_UP_S = 0.05
RANKS_PER_PAUSE = 512
"""Ranks that may ask the store in the shortest pauses; with more of them, each asks less often."""


class PlanSource:
    """The plans of one series of global batches, for one rank.

    Args:
        planner: rank 0's; None on the other ranks.
        name: of the series; two series of one job need two names.
        lane: whose part of the plans is fetched.
        lookahead: global batches that are asked for ahead of the one that is taken.
        timeout_s: how long rank 0 waits for a plan before it takes the static one.
        hardware_of: step -> hardware of the cost model for it, asked on rank 0 with the request; None: the planner's.
    """

    def __init__(
        self,
        planner: Planner | None,
        *,
        topology: Topology,
        lane: int,
        name: str = "train",
        lookahead: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        hardware_of: Callable[[int], Hardware] | None = None,
    ) -> None:
        self.topology = topology
        self.lookahead = lookahead
        self._planner = planner
        self._prefix = f"dynamic_cp/plan/{name}"
        self._lane = lane
        self._timeout_s = timeout_s
        self._hardware_of = hardware_of
        self._taken: int | None = None
        self._listener: Callable[[int, LanePlan], None] | None = None
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._outcomes: dict[int, LanePlan | DynamicCPError | RuntimeError] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def on_arrival(self, listener: Callable[[int, LanePlan], None]) -> None:
        """Call `listener` with each plan when it arrives, from another thread and in the order of the requests."""
        self._listener = listener

    def request(self, step: int, samples: Sequence[Sample]) -> None:
        """Ask for the plan of `step`; returns immediately. All ranks ask for the same steps in the same order.
        `samples`: the global batch; only rank 0's are looked at."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fetch_all, name="dynamic-cp-plans", daemon=True)
            self._thread.start()
        if self._planner is not None:
            hardware = None if self._hardware_of is None else self._hardware_of(step)
            self._planner.submit(self._key(step), samples, hardware)
        self._steps.put(step)

    def take(self, step: int) -> LanePlan:
        """Return the plan of `step`, which was requested. Every rank takes every step, in the same order, with a
        collective of all ranks between two of them (a plan is removed when the next one is taken). Raises
        DynamicCPError: there is no plan, the same error on every rank; or this rank could not get it."""
        outcome = self._wait_for(step)
        if self._planner is not None and self._taken is not None:
            self._planner.discard(self._key(self._taken))
        self._taken = step
        if isinstance(outcome, DynamicCPError):
            raise outcome
        if outcome.facts.fallback is not None:
            logger.warning("step %d runs the static plan: %s", step, outcome.facts.fallback)
        return outcome

    def whole(self, step: int) -> Plan:
        """Return the whole plan of `step`, which was taken; the planner must publish whole plans."""
        return serialize.loads(job_store().get(lane_key(self._key(step), WHOLE)))

    def close(self) -> None:
        """Stop fetching; call it after a collective that followed the latest `take`."""
        self._is_closed = True
        if self._planner is not None and self._taken is not None:
            self._planner.discard(self._key(self._taken))
        self._steps.put(_STOP)
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    def _key(self, step: int) -> str:
        return f"{self._prefix}/{step}"

    def _wait_for(self, step: int) -> LanePlan | DynamicCPError:
        started_s = time.monotonic()
        limit_s = self._timeout_s + job_store().timeout.total_seconds()  # some more for the static plan
        while True:
            with self._arrived:
                if self._arrived.wait_for(lambda: step in self._outcomes, timeout=_LOOK_UP_S):
                    outcome = self._outcomes.pop(step)
                    return lost_store(outcome) if isinstance(outcome, RuntimeError) else outcome
            waited_s = time.monotonic() - started_s
            try:
                if self._planner is None:
                    if waited_s > limit_s or rank_zero_is_silent():
                        return silent_rank_zero(self._key(step), started_s)
                    continue
                beat()
            except RuntimeError as error:  # what a store raises
                return lost_store(error)
            if self._planner.lost_store is not None:
                return lost_store(self._planner.lost_store)
            if waited_s > limit_s:
                return lost_store(f"no answer for {waited_s - self._timeout_s:.0f} s")
            if waited_s > self._timeout_s:
                self._planner.fall_back(
                    self._key(step),
                    f"no plan after {self._timeout_s:g} s (--dynamic-cp-plan-timeout {self._timeout_s:g})",
                )

    def _fetch_all(self) -> None:
        store: dist.Store | None = None
        while (step := self._steps.get()) != _STOP:
            outcome: LanePlan | DynamicCPError | RuntimeError | None
            try:
                if store is None:
                    job_store().check([self._prefix])  # fails immediately, where clone() would retry for minutes
                    store = job_store().clone()  # its own connection: the main thread's must be free
                outcome = self._fetch(store, step)
            except (DynamicCPError, RuntimeError) as error:  # RuntimeError: what a store raises
                outcome = error
            except Exception as error:  # a bug: without an outcome the main thread would wait for the timeout
                traceback.print_exc()
                outcome = DynamicCPError(f"{type(error).__name__}: {error}; the rank's log has the traceback")
            if outcome is None:
                return
            if isinstance(outcome, LanePlan) and self._listener is not None:
                self._listener(step, outcome)
            with self._arrived:
                self._outcomes[step] = outcome
                self._arrived.notify_all()

    def _fetch(self, store: dist.Store, step: int) -> LanePlan | DynamicCPError | None:
        """Return this lane's plan or error from the store; None: the source was closed before it came."""
        key = lane_key(self._key(step), self._lane)
        crowd = max(1.0, dist.get_world_size() / RANKS_PER_PAUSE)
        pause_s, longest_s = 0.001 * crowd, 0.02 * crowd
        while not store.check([key]):
            if self._is_closed:
                return None
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
        message = store.get(key)
        if message[:1] == ERROR:
            return decode_error(message[1:], f"under {key!r} in the job's store")
        return decode_lane(message[1:])


def check_whole(step: int, whole: Plan, part: LanePlan, samples: Sequence[Sample]) -> None:
    """Judge the whole plan of `step`, and compare it with the part that this lane has of it. `samples`: the global
    batch; none where this rank does not know it. Raises IllegalPlanError: the plan breaks a rule, or does not hold
    `samples`. Raises DisagreementError: the part is of another plan."""
    if samples:
        check_plan(whole, samples)
    digest = serialize.digest(whole)
    if digest != part.facts.digest or lane_plan(whole, part.lane, part.facts) != part:
        raise DisagreementError(
            f"lane {part.lane} has another part of the plan of step {step} than the whole plan says: digest "
            f"{digest[:15]} of the whole, {part.facts.digest[:15]} of the part; restart the job"
        )


class FixedPlan:
    """In place of a PlanSource: hands out one plan for every step, for loops that plan themselves.

    Args:
        planned: the same on all ranks.
        lane: of this rank.
    """

    lookahead = 0

    def __init__(self, planned: PlannedBatch, lane: int) -> None:
        self.topology = planned.plan.topology
        self._whole = planned.plan
        self._plan = lane_plan(planned.plan, lane, PlanFacts.of(planned))
        self._listener: Callable[[int, LanePlan], None] | None = None

    def on_arrival(self, listener: Callable[[int, LanePlan], None]) -> None:
        self._listener = listener

    def request(self, step: int, samples: Sequence[Sample]) -> None:
        if self._listener is not None:
            self._listener(step, self._plan)

    def take(self, step: int) -> LanePlan:
        return self._plan

    def whole(self, step: int) -> Plan:
        return self._whole

    def close(self) -> None:
        """Nothing to end."""


def warm_up(source: PlanSource, max_seqlen: int, more: Sequence[Sample] = ()) -> float:
    """Plan a synthetic batch, so that the planner's code is compiled and loaded before the first step.

    Has no effect on any plan. Collective; minutes at most, the first time on a machine.

    Args:
        source: a series of its own, which is closed.
        max_seqlen: longest sample of the run, tokens.
        more: a batch to plan besides; with masks, whose code is compiled apart.

    Returns:
        Seconds that it took.

    Raises DynamicCPError: rank 0 found no plan; the same error on every rank."""
    started_s = time.monotonic()
    for step, batch in enumerate((_synthetic_batch(max_seqlen, source.topology.num_lanes), more)):
        if len(batch):
            source.request(step, batch)
            agree(partial(source.take, step), None)
    source.close()
    return time.monotonic() - started_s


def _synthetic_batch(max_seqlen: int, num_lanes: int) -> tuple[Sample, ...]:
    """Return samples of mixed lengths: enough to run all of the planner's code, and no more than a step has."""
    num_samples = min(256, max(16, 2 * num_lanes))
    return tuple(Sample(sample_id=index, seqlen=max(1, max_seqlen >> index % 8)) for index in range(num_samples))
