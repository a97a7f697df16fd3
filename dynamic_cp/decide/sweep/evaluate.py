"""Time and memory of one setting: plan every global batch and simulate it; or only bound the time from below."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.sweep.space import MORE_ROOM, Refused
from dynamic_cp.errors import InfeasibleSampleError, UnsupportedFeatureError
from dynamic_cp.search.search import plan_batch
from dynamic_cp.setting import Setting

_SLACK = 0.97
"""The bound of a pipeline is the least over the numbers of micro-batches that were tried: not all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a setting gives.

    Attributes:
        batches_s: iteration of each global batch.
        peak_bytes: of the rank and batch that need most.
        tokens_per_s_per_gpu: of true tokens.
        num_microbatches: mean over the global batches.
        largest_cp_size: of all plans.
    """

    setting: Setting
    batches_s: tuple[float, ...]
    peak_bytes: float
    tokens_per_s_per_gpu: float
    num_microbatches: float
    largest_cp_size: int

    @property
    def iteration_s(self) -> float:
        """Mean over the global batches."""
        return sum(self.batches_s) / len(self.batches_s)


def fastest_first(points: Iterable[Point]) -> list[Point]:
    """Return the points by their seconds; of equally fast ones that which needs least memory comes first."""
    return sorted(points, key=lambda one: (one.iteration_s, one.peak_bytes))  # stable: ties keep their order


def evaluate_first(setting: Setting, job: SweepJob) -> Point | Refused:
    """Return `evaluate` of the first global batch alone."""
    return evaluate(setting, replace(job, batches=job.batches[:1]))


def evaluate(setting: Setting, job: SweepJob) -> Point | Refused:
    """Return what `setting` gives, or why it cannot run; a pure function."""
    try:
        problem = job.problem(setting)
        plans = [plan_batch(problem, batch) for batch in job.batches]
    except InfeasibleSampleError:
        return Refused("the longest sample fits no CP group", MORE_ROOM)
    except UnsupportedFeatureError:
        return Refused(
            "no allowed exchange serves the CP size that the longest sample needs", "give another --cp-comm-type"
        )
    memory = job.memory(setting)
    peak_bytes = max(stage.total_bytes for planned in plans for stage in memory.peak(planned.plan))
    if peak_bytes > memory.available_bytes:
        return Refused("a plan needs more memory than there is", MORE_ROOM)
    total_s = sum(planned.predicted_s for planned in plans)
    return Point(
        setting=setting,
        batches_s=tuple(planned.predicted_s for planned in plans),
        peak_bytes=peak_bytes,
        tokens_per_s_per_gpu=sum(planned.plan.num_tokens for planned in plans) / total_s / setting.topology.world_size,
        num_microbatches=sum(planned.plan.num_microbatches for planned in plans) / len(plans),
        largest_cp_size=max(max(planned.plan.cp_histogram) for planned in plans),
    )


def least_s(setting: Setting, job: SweepJob) -> float:
    """Return seconds of the first global batch that no plan of any policy with the limit and layout stays below.

    Attention of a pool has no bubble: of it the bound has the work alone.

    Limits: found by a quick search, not proven for pipelines; `_SLACK` allows for that. The work of a pool is that of
    the exchanges without one.
    """
    try:
        prices = job.prices(setting)
        bound = lower_bound(job.batches[0], prices, "quick")
        bound_s = bound.work_s if setting.has_pool else bound.seconds
    except (InfeasibleSampleError, UnsupportedFeatureError):
        return 0.0  # `evaluate` says why
    return _SLACK * (bound_s + prices.reduction.least_s)
