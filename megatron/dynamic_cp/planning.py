"""Where the plan of a step comes from: rank 0 plans and publishes, every rank takes the same plan or the same error.

Planning runs in the training loop for now, behind `PlanSource.plan`; whoever moves it ahead of the step keeps that
call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from dynamic_cp import serialize
from dynamic_cp.search import plan_global_batch
from dynamic_cp.types import Hardware, ModelShape, PlannedBatch, PlanOptions, Sample, Topology
from megatron.dynamic_cp.verify import job_store, publish_outcome, run_on_rank_zero


@dataclass(frozen=True, slots=True)
class _Published:
    plan: str
    predicted_s: float
    predicted_busy_s: tuple[float, ...]
    reason: str
    planner_s: float


class PlanSource:
    """Plans global batches for all ranks of the job.

    Args:
        policy: one of dynamic_cp.search.POLICIES.
        name: prefix of the keys in the store; two sources of one job need two names.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        model: ModelShape,
        hardware: Hardware,
        options: PlanOptions,
        policy: str = "dynamic",
        name: str = "train",
    ) -> None:
        self.topology = topology
        self.model = model
        self.hardware = hardware
        self.options = options
        self.policy = policy
        self._name = name
        self._previous_key: str | None = None
        self.planner_s = 0.0
        """Seconds that rank 0 spent on the latest plan."""

    def plan(self, step: int, samples: Sequence[Sample]) -> PlannedBatch:
        """Return the plan of `samples`, the same on every rank. Called by all ranks with steps in the same order, each
        step once, with a collective of all ranks after each call (a plan is deleted when the next is asked for).

        Raises:
            DynamicCPError: rank 0 found no plan; the same error on every rank.
        """
        key = f"dynamic_cp/plan/{self._name}/{step}"

        def compute() -> _Published:
            started = time.perf_counter()
            planned = self._plan(samples)
            return _Published(
                plan=serialize.dumps(planned.plan),
                predicted_s=planned.predicted_s,
                predicted_busy_s=planned.predicted_busy_s,
                reason=planned.reason,
                planner_s=time.perf_counter() - started,
            )

        published = publish_outcome(key, compute)
        # Whoever asks for this step has finished the collectives of the one before, so its plan was read by all.
        if dist.get_rank() == 0 and self._previous_key is not None:
            job_store().delete_key(self._previous_key)
        self._previous_key = key
        self.planner_s = published.planner_s
        return PlannedBatch(
            plan=serialize.loads(published.plan),
            predicted_s=published.predicted_s,
            predicted_busy_s=published.predicted_busy_s,
            reason=published.reason,
        )

    def warm_up(self, max_seqlen: int) -> float:
        """Plan a made-up batch on rank 0, so that the planner's code is compiled and loaded before the first step.

        Has no effect on any plan. Collective: the others wait; minutes at most, the first time on a machine.

        Args:
            max_seqlen: longest sample of the run, tokens.

        Returns:
            Seconds that rank 0 spent.

        Raises:
            DynamicCPError: rank 0 found no plan; the same error on every rank.
        """

        def compute() -> float:
            started = time.perf_counter()
            self._plan(_made_up_batch(max_seqlen, self.topology.num_lanes))
            return time.perf_counter() - started

        return run_on_rank_zero(compute)

    def _plan(self, samples: Sequence[Sample]) -> PlannedBatch:
        return plan_global_batch(
            samples,
            topology=self.topology,
            model=self.model,
            hardware=self.hardware,
            options=self.options,
            policy=self.policy,
        )


def _made_up_batch(max_seqlen: int, num_lanes: int) -> tuple[Sample, ...]:
    """Return samples of mixed lengths: enough to run all of the planner's code, and no more than a step has."""
    num_samples = min(256, max(16, 2 * num_lanes))
    return tuple(Sample(sample_id=index, seqlen=max(1, max_seqlen >> index % 8)) for index in range(num_samples))
