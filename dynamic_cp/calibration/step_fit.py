"""Coefficients from whole steps of a run's own model, measured before its first iteration.

The times of buckets give the shape. They are fitted by `refine`, which also corrects a run while it goes on; it is
called repeatedly, each time from its last result, because each call is bounded. The largest step, as full as most
micro-batches of a run, then scales everything by one factor: members of a group also wait for each other, and no
bucket's time has that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from dynamic_cp.learning.multipliers import MOST, Multipliers
from dynamic_cp.learning.observations import Observation
from dynamic_cp.learning.refinement import refine
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Hardware, ModelShape, Plan, PlanOptions, Topology

_MOST_ROUNDS = 6
_DIGITS = 4


def step_s(plan: Plan, cost_model: CostModel) -> float:
    """Return the seconds that `cost_model` expects of an iteration that runs `plan`."""
    return makespan_ns(plan, cost_model) / 1e9 + cost_model.gradient_reduction_s


def fit_steps(
    base: Hardware,
    observations: Sequence[Observation],
    steps: Sequence[tuple[Plan, float]],
    *,
    model: ModelShape,
    topology: Topology,
    options: PlanOptions,
    name: str,
    source: str,
) -> Hardware:
    """Return `base` with the coefficients that fit best.

    Args:
        base: gives the coefficients that are not fitted, and those where too little was observed.
        observations: of the buckets of all steps.
        steps: (plan, measured seconds) of each step, at least one.
        name: of the new hardware.
        source: on what and when was measured, for each coefficient.
    """
    hardware = base
    for _ in range(_MOST_ROUNDS):
        found = refine(hardware, observations, model=model, topology=topology, options=options, iterations=(1, 1))
        hardware = found.hardware
        if found.reason or not found.at_bound:
            break
    largest = max((plan for plan, _ in steps), key=lambda plan: plan.num_tokens)
    measured_s = min(seconds for plan, seconds in steps if plan == largest)
    factor = measured_s / step_s(largest, CostModel(model, hardware, topology, options))
    factor = min(MOST, max(1 / MOST, factor))
    hardware = Multipliers(linear=factor, attention=factor, exchange=factor, overhead=factor).apply(hardware)
    return _with_sources(hardware, base, name, source)


def _with_sources(hardware: Hardware, base: Hardware, name: str, source: str) -> Hardware:
    """Return `hardware` with rounded numbers, and where each that differs from `base` comes from."""
    sources, values = dict(base.source), {}
    for field in fields(Hardware):
        old, new = getattr(base, field.name), getattr(hardware, field.name)
        if field.name not in ("name", "source") and new != old:
            values[field.name] = float(f"{new:.{_DIGITS}g}")
            sources[field.name] = f"{source}: {new / old:.3g} times the value of hardware {base.name}"
    return replace(base, name=name, source=sources, **values)
