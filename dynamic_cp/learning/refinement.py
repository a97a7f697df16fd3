"""Online refinement: measured bucket times correct the coefficients of the cost model.

A robust least-squares fit of seven factors (`Multipliers`) on the cost model itself: there is no second formula.
Residuals are logarithms of measured / predicted, so a microsecond and a second weigh the same relative to themselves;
Huber weights bound what an outlier can do (a garbage collection, a neighbour on the machine). Each factor is pulled
towards its present value as if that were known to about 40%: factors that the observations cannot tell apart do not
move. One change is at most a factor of 2, all changes together at most 4. Coefficients change only when `refine` is
called, at iterations that are stated in advance, so plans stay a function of the seed and the saved factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import log

import numpy as np
import numpy.typing as npt

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.learning.multipliers import MOST, TERMS, Multipliers
from dynamic_cp.learning.observations import Observation, PredictionError, PricedObservations
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Hardware, ModelShape, PlanOptions, Problem, Topology

Floats = npt.NDArray[np.float64]

MOST_AT_ONCE = 2.0
"""Most by which one refinement changes a factor."""
MIN_OBSERVATIONS = 16
"""Fewer usable observations change nothing."""

_PRIOR_SPREAD = np.array([log(1.4)] * 4 + [log(1.2)] * 3)
"""Expected error of a factor (standard deviation of its logarithm); of backward apart, half as much."""
_MOST_INDEPENDENT = 64
"""Observations count as no more than this many: those of one hour on one machine have errors in common."""
_SMALLEST_NOISE = 0.01
_HUBER = 1.345
"""In units of the residuals' robust standard deviation; 95% efficient on normal noise (Huber 1964)."""
_MAD_TO_SIGMA = 1.4826
_MAX_ITERATIONS = 30
_STEP = 1e-4
_DIGITS = 4
"""Decimals of factors: finer differences are noise, and `source` shows all digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinedHardware:
    """What a refinement found.

    Attributes:
        multipliers: of the hardware file; what a checkpoint keeps.
        before, after: errors of the predictions with the previous and with these coefficients.
        at_bound: factors that wanted to change more than they may.
        reason: why nothing changed, or "".
    """

    hardware: Hardware
    multipliers: Multipliers
    before: PredictionError
    after: PredictionError
    num_ignored: int
    at_bound: tuple[str, ...]
    reason: str = ""

    def describe(self) -> str:
        used = f"{self.before.num_observations} buckets ({self.num_ignored} ignored)"
        if self.reason:
            return f"hardware {self.hardware.name} not refined from {used}: {self.reason}; {self.before.describe()}"
        bound = f"; at their bound: {', '.join(self.at_bound)}" if self.at_bound else ""
        return (
            f"hardware {self.hardware.name} refined from {used}: {self.before.describe()} -> "
            f"{self.after.describe()}; {self.multipliers.describe()}{bound}"
        )


def refine(
    base: Hardware,
    observations: Iterable[Observation],
    *,
    model: ModelShape,
    topology: Topology,
    options: PlanOptions,
    iterations: tuple[int, int],
    present: Multipliers | None = None,
) -> RefinedHardware:
    """Return the hardware that fits `observations` best within the bounds; the same for any order of them.

    Args:
        base: the hardware file of the run.
        observations: times of buckets on any stages; those that cannot be are ignored and counted.
        model, topology, options: of the run; options as the planner has them.
        iterations: first and last whose times these are, for the record.
        present: the factors in use; None = those of the file.

    Raises InvalidInputError: `iterations` are no range.

    Source: iteratively reweighted least squares with Huber's weights (Huber 1964, "Robust Estimation of a Location
    Parameter"), Gauss-Newton steps projected on the bounds.

    Limits: memory-bound edges (embedding, loss), TP collectives and pipeline hops keep their coefficients; what is
    wrong with them ends up in the other factors that have a similar effect."""
    first, last = iterations
    if not 1 <= first <= last:
        raise InvalidInputError(f"iterations {first} to {last} are not a range: give 1 <= first <= last")
    present = present or Multipliers()
    cost_model = partial(_cost_model, base, model, topology, options)
    in_use, every = cost_model(present), list(observations)
    priced = PricedObservations(every, in_use)
    before = priced.error(in_use)
    unchanged = RefinedHardware(
        hardware=present.apply(base),
        multipliers=present,
        before=before,
        after=before,
        num_ignored=priced.num_ignored,
        at_bound=(),
    )
    # A last stage whose head has no price would look like slow layers.
    last_stage = (topology.pp_size - 1, topology.vp_size - 1)
    whole = topology.pp_size == 1 or base.head_flops_per_s > 0
    fitting = PricedObservations((one for one in every if whole or (one.stage, one.chunk) != last_stage), in_use)
    if len(fitting) < MIN_OBSERVATIONS:
        reason = f"{len(fitting)} can be fitted, at least {MIN_OBSERVATIONS} are needed"
        return replace(unchanged, reason=reason)
    found = _fitted(fitting, cost_model, present)
    if found is None:
        return replace(unchanged, reason="no factors fit better than the present ones")
    fitted, at_bound = found
    fitted = replace(fitted, first_iteration=first, last_iteration=last, num_observations=len(fitting))
    after = priced.error(cost_model(fitted))
    return replace(unchanged, hardware=fitted.apply(base), multipliers=fitted, after=after, at_bound=at_bound)


def _fitted(
    observations: PricedObservations, cost_model: Callable[[Multipliers], CostModel], present: Multipliers
) -> tuple[Multipliers, tuple[str, ...]] | None:
    """Return the factors that fit best, and which of them are at their bound; None: none fit better than `present`."""

    def residuals(logarithms: Floats) -> Floats:
        predicted = observations.predicted_s(cost_model(_multipliers(np.exp(logarithms))))
        return np.asarray(np.log(observations.measured_s / predicted).ravel())

    start = np.log(present.values)
    low = np.maximum(start - log(MOST_AT_ONCE), -log(MOST))
    high = np.minimum(start + log(MOST_AT_ONCE), log(MOST))
    found = _fit(residuals, start, low, high)
    fitted = _multipliers(np.asarray(np.round(np.exp(found), _DIGITS), np.float64))
    at_start, at_end = residuals(start), residuals(np.log(fitted.values))
    scale = _scale(at_start)
    if _huber_sum(at_end / scale) >= _huber_sum(at_start / scale):
        return None
    return fitted, tuple(name for name, x, *bounds in zip(TERMS, found, low, high, strict=True) if x in bounds)


def _cost_model(
    base: Hardware, model: ModelShape, topology: Topology, options: PlanOptions, multipliers: Multipliers
) -> CostModel:
    return CostModel(Problem(topology=topology, model=model, hardware=multipliers.apply(base), options=options))


def _multipliers(values: Floats) -> Multipliers:
    """Return the factors `values`, clipped to the bounds that rounding may exceed."""
    bounded = np.clip(values, 1 / MOST, MOST).tolist()
    return Multipliers(**dict(zip(TERMS, bounded, strict=True)))


def _fit(residuals: Callable[[Floats], Floats], start: Floats, low: Floats, high: Floats) -> Floats:
    """Return the logarithms in low .. high that minimise Huber's loss of the residuals plus the pull towards `start`.
    Gauss-Newton; a factor that would leave its bound is fixed for the step, and the others are solved without it."""
    x = start
    pull = 1 / _PRIOR_SPREAD**2
    for _ in range(_MAX_ITERATIONS):
        r = residuals(x)
        scale = _scale(r)
        weights = 1 / np.maximum(1.0, np.abs(r) / (_HUBER * scale))
        weights *= min(1.0, _MOST_INDEPENDENT / len(r)) / scale**2
        jacobian = _jacobian(residuals, x, r, high)
        gradient = jacobian.T @ (weights * r) + pull * (x - start)
        curvature = jacobian.T @ (weights[:, None] * jacobian) + np.diag(pull)
        free = ~((x <= low) & (gradient > 0) | (x >= high) & (gradient < 0))
        step = np.zeros_like(x)
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], -gradient[free])
        moved = np.clip(x + step, low, high)
        change = float(np.abs(moved - x).max())
        x = moved
        if change < 0.1 * 10.0**-_DIGITS:
            break
    return x


def _jacobian(residuals: Callable[[Floats], Floats], x: Floats, at_x: Floats, high: Floats) -> Floats:
    """Return [residual, factor] derivatives, by differences inside the bounds."""
    columns = []
    for index in range(len(x)):
        step = np.zeros_like(x)
        step[index] = _STEP if x[index] + _STEP <= high[index] else -_STEP
        columns.append((residuals(x + step) - at_x) / step[index])
    return np.stack(columns, axis=1)


def _scale(residuals: Floats) -> float:
    """Return the robust standard deviation of residuals around their median: what they share is no noise."""
    spread = np.abs(residuals - np.median(residuals))
    return max(_SMALLEST_NOISE, _MAD_TO_SIGMA * float(np.median(spread)))


def _huber_sum(residuals: Floats) -> float:
    """Return the sum of Huber's loss of residuals in standard deviations."""
    size = np.abs(residuals)
    return float(np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())
