"""Time and memory of one setting: plan every global batch and simulate it; or only bound the time from below.

A cost model with known errors may still choose right. To see that, the best settings of each policy are planned again
under other prices. Each set of prices stands for an error that a back-test against published runs has found, or for
something in which jobs differ (`docs/backtest.md`). Under each set a policy takes the fastest of its best settings,
the dynamic one also at the layouts and limits of the static ones; settings that only these prices would have found are
not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.comparison.values import OtherPrice, speedup_of
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep.space import MORE_ROOM, Refused
from dynamic_cp.errors import InfeasibleSampleError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.pricing.linear_prices import core_flops_per_s
from dynamic_cp.search.search import plan_batch
from dynamic_cp.types import STATIC_POLICIES, Hardware
from dynamic_cp.types.experts import Dispatcher

_SLACK = 0.97
"""Lowers a pipeline's bound, which is the least over only those numbers of micro-batches that were tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a setting gives: seconds of each global batch, peak memory over ranks and batches, true tokens per second,
    the mean number of micro-batches, and the largest CP size of all plans."""

    setting: Setting
    batches_s: tuple[float, ...]
    peak_bytes: float
    tokens_per_s_per_gpu: float
    num_microbatches: float
    largest_cp_size: int

    @property
    def iteration_s(self) -> float:
        return sum(self.batches_s) / len(self.batches_s)


def fastest_first(points: Iterable[Point]) -> list[Point]:
    """Return the points by their seconds; among equally fast ones, that which needs least memory comes first."""
    return sorted(points, key=lambda one: (one.iteration_s, one.peak_bytes))  # stable: ties keep their order


def evaluate_first(setting: Setting, job: SweepJob) -> Point | Refused:
    return evaluate(setting, replace(job, batches=job.batches[:1]))


def evaluate(setting: Setting, job: SweepJob) -> Point | Refused:
    """Return the figures of `setting`, or why it cannot run; a pure function."""
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
    """Return a lower bound on the seconds of the first global batch, for plans of any policy at this token limit and
    layout. For pipelines it comes from a quick search, which is no proof; `_SLACK` allows for that. Attention of a pool
    has no bubble, so its bound is the work alone, priced as for exchanges without a pool."""
    try:
        prices = job.prices(setting)
        bound = lower_bound(job.batches[0], prices, "quick")
        bound_s = bound.work_s if setting.has_pool else bound.seconds
    except (InfeasibleSampleError, UnsupportedFeatureError):
        return 0.0  # `evaluate` says why
    return _SLACK * (bound_s + prices.reduction.least_s)


Counted = Callable[[Callable[[Setting, SweepJob], Point | Refused], Sequence[Setting], str], list[Point | Refused]]

_NUM_SETTINGS = 3
"""Number of settings of each policy that are planned again."""


@dataclass(frozen=True, slots=True)
class PriceSet:
    """Other prices: `change` gives the job that has them; `name`, after "with" in a sentence, says what differs."""

    name: str
    change: Callable[[SweepJob], SweepJob]


def _with_hardware(job: SweepJob, factor: float, names: Sequence[str]) -> SweepJob:
    """Return the job on hardware with the named numbers multiplied by `factor`."""
    given: dict[str, Any] = {name: getattr(job.hardware, name) * factor for name in names}
    return replace(job, hardware=replace(job.hardware, **given))


def _with_linear_attention(job: SweepJob, factor: float) -> SweepJob:
    """Return the job with linear attention `factor` times as fast; unchanged if the model has none."""
    if job.model.linear_attention is None:
        return job
    rate = factor * core_flops_per_s(job.hardware)
    return replace(job, hardware=replace(job.hardware, linear_attention_flops_per_s=rate))


def _with_experts(job: SweepJob, dispatcher: Dispatcher, overlapped: bool) -> SweepJob:
    """Return the job whose tokens travel to experts so; unchanged if the model has none."""
    if job.model.experts is None:
        return job
    experts = replace(job.model.experts, dispatcher=dispatcher, overlapped=overlapped)
    return replace(job, model=replace(job.model, experts=experts))


_ATTENTION = [name for name in Hardware.__slots__ if name.startswith("attention") and name.endswith("flops_per_s")]
_HOST = [name for name in Hardware.__slots__ if name.startswith("host_") or name == "overhead_s_per_bucket_stage"]
_LINKS = [name for name in Hardware.__slots__ if "bandwidth" in name and name != "memory_bandwidth_bytes_per_s"]

PRICE_SETS = (
    PriceSet("TP collectives overlapped in all jobs", lambda job: replace(job, tp_overlap="all")),
    PriceSet("TP collectives overlapped in static jobs alone", lambda job: replace(job, tp_overlap="static")),
    PriceSet("attention half as fast", lambda job: _with_hardware(job, 0.5, _ATTENTION)),
    PriceSet("attention 30% faster", lambda job: _with_hardware(job, 1.3, _ATTENTION)),
    PriceSet("linear attention half as fast", lambda job: _with_linear_attention(job, 0.5)),
    PriceSet("linear attention twice as fast", lambda job: _with_linear_attention(job, 2.0)),
    PriceSet("the host half as fast", lambda job: _with_hardware(job, 2.0, _HOST)),
    PriceSet("links half as fast", lambda job: _with_hardware(job, 0.5, _LINKS)),
    PriceSet("all-to-all between experts", lambda job: _with_experts(job, "alltoall", False)),
    PriceSet("HybridEP between experts, overlapped", lambda job: _with_experts(job, "hybridep", True)),
    PriceSet(
        "gradients reduced in the open",
        lambda job: replace(
            job, data_parallel=replace(job.data_parallel, overlap_grad_reduce=False, overlap_param_gather=False)
        ),
    ),
)
"""Jitter is left out: it lengthens the steps of all policies alike, by the wait for the slowest of all lanes."""


def under_other_prices(job: SweepJob, points: Mapping[str, Collection[Point]], run: Counted) -> tuple[OtherPrice, ...]:
    """Return the gain of the dynamic policy under each of PRICE_SETS that changes the job, from the best `points` of
    each policy; () if the dynamic policy or all static ones have none."""
    static = [name for name in STATIC_POLICIES if points.get(name)]
    if not points.get("dynamic") or not static:
        return ()
    settings = [point.setting for name in ("dynamic", *static) for point in fastest_first(points[name])[:_NUM_SETTINGS]]
    settings = list(dict.fromkeys([*settings, *(_made_dynamic(one, job) for one in settings if one.is_static)]))
    outcomes = []
    for number, prices in enumerate(PRICE_SETS):
        if prices.change(job) == job:
            continue
        planned = run(partial(evaluate_under, number), settings, prices.name)
        found = [point for point in planned if isinstance(point, Point)]
        ours = fastest_first(point for point in found if point.setting.policy == "dynamic")
        theirs = fastest_first(point for point in found if point.setting.policy != "dynamic")
        if ours and theirs:
            seconds = ours[0].batches_s, theirs[0].setting.policy, theirs[0].batches_s
            outcomes.append(OtherPrice(prices.name, speedup_of("dynamic", *seconds)))
    return tuple(outcomes)


def _made_dynamic(static: Setting, job: SweepJob) -> Setting:
    """Return the layout of a static job for the dynamic policy, whose plans may be the static ones, if memory holds
    them beside more groups."""
    setting = replace(static, policy="dynamic", static_cp_size=None, max_cp_size=static.static_cp_size)
    try:
        most = job.memory(setting).max_tokens_per_rank(job.max_seqlen)
    except MemoryLimitError:
        return setting  # which `evaluate` refuses
    return replace(setting, max_tokens_per_rank=min(static.max_tokens_per_rank, most))


def evaluate_under(number: int, setting: Setting, job: SweepJob) -> Point | Refused:
    return evaluate(setting, PRICE_SETS[number].change(job))
