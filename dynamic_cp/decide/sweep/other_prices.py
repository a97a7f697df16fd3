"""Whether a gain survives prices that are wrong: the best settings of each policy, planned anew under other prices.

A cost model that is wrong by a known amount may still choose right. Each set of prices stands for an error that a
back-test against published runs has found, or for something that jobs differ in (`docs/backtest.md`). Every policy
keeps its fastest settings and takes under each set the one that is the fastest there.

Limits: settings that only another set of prices would have found are not tried; of each policy the fastest are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.comparison.speedup import OtherPrice, speedup_of
from dynamic_cp.decide.sweep.evaluate import Point, evaluate, fastest_first
from dynamic_cp.decide.sweep.space import Refused
from dynamic_cp.pricing.linear_attention import core_flops_per_s
from dynamic_cp.setting import STATIC_POLICIES, Setting
from dynamic_cp.types import Hardware

Counted = Callable[[Callable[[Setting, SweepJob], Point | Refused], Sequence[Setting], str], list[Point | Refused]]

_NUM_SETTINGS = 3
"""Settings of each policy that are planned anew."""
_ATTENTION_ERROR = 1.3
"""Published runs with long contexts say that attention inside a CP group is as fast as priced, or up to 2.8 times
slower (one table, in FP8)."""


@dataclass(frozen=True, slots=True)
class PriceSet:
    """Other prices.

    Attributes:
        name: what differs, for a sentence that begins with "with".
        change: of the job.
    """

    name: str
    change: Callable[[SweepJob], SweepJob]


def _with_hardware(job: SweepJob, factor: float, names: Sequence[str]) -> SweepJob:
    """Return the job on hardware whose rates of these names are `factor` times as high."""
    given: dict[str, Any] = {name: getattr(job.hardware, name) * factor for name in names}
    return replace(job, hardware=replace(job.hardware, **given))


def _with_linear_attention(job: SweepJob, factor: float) -> SweepJob:
    """Return the job on hardware that computes linear attention `factor` times as fast; of others the same."""
    if job.model.linear_attention is None:
        return job
    rate = factor * core_flops_per_s(job.hardware)
    return replace(job, hardware=replace(job.hardware, linear_attention_flops_per_s=rate))


_ATTENTION = [name for name in Hardware.__slots__ if name.startswith("attention") and name.endswith("flops_per_s")]
_LINKS = [name for name in Hardware.__slots__ if "bandwidth" in name and name != "memory_bandwidth_bytes_per_s"]

PRICE_SETS = (
    PriceSet("TP collectives overlapped in all jobs", lambda job: replace(job, tp_overlap="all")),
    PriceSet("TP collectives overlapped in static jobs alone", lambda job: replace(job, tp_overlap="static")),
    PriceSet("attention 30% slower", lambda job: _with_hardware(job, 1 / _ATTENTION_ERROR, _ATTENTION)),
    PriceSet("attention 30% faster", lambda job: _with_hardware(job, _ATTENTION_ERROR, _ATTENTION)),
    PriceSet("linear attention half as fast", lambda job: _with_linear_attention(job, 0.5)),
    PriceSet("linear attention twice as fast", lambda job: _with_linear_attention(job, 2.0)),
    PriceSet("links half as fast", lambda job: _with_hardware(job, 0.5, _LINKS)),
    PriceSet(
        "gradients reduced in the open",
        lambda job: replace(
            job, data_parallel=replace(job.data_parallel, overlap_grad_reduce=False, overlap_param_gather=False)
        ),
    ),
)
"""Jitter is left out: it lengthens the steps of all policies alike, by what the slowest of all lanes waits for."""


def under_other_prices(job: SweepJob, points: Mapping[str, Collection[Point]], run: Counted) -> tuple[OtherPrice, ...]:
    """Return the gain of the dynamic policy under each of PRICE_SETS that differs from the job's own prices.

    None where the dynamic policy or all static ones are missing.

    Args:
        job: what was planned.
        points: policy -> what was planned for it.
        run: calls a function for each setting; its last argument says what is done.
    """
    static = [name for name in STATIC_POLICIES if points.get(name)]
    if not points.get("dynamic") or not static:
        return ()
    settings = [point.setting for name in ("dynamic", *static) for point in fastest_first(points[name])[:_NUM_SETTINGS]]
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


def evaluate_under(number: int, setting: Setting, job: SweepJob) -> Point | Refused:
    """Return `evaluate` under one of PRICE_SETS."""
    return evaluate(setting, PRICE_SETS[number].change(job))
