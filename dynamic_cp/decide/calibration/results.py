"""What a calibration found: the new hardware, and every measured number beside what the cost model says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynamic_cp.decide.calibration.measurements import Measurement
from dynamic_cp.types import Hardware

GOOD_ERROR = 0.10
"""Median error of what was not fitted, up to which plans may trust a calibration: the goal for whole iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured number and what the calibrated cost model says."""

    measurement: Measurement
    direction: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions are from what was measured.

    Attributes:
        name: of the part.
        fitted: whether the numbers were used for the fit; False is a check.
        num_points: numbers compared, > 0.
        median, p95: of |predicted - measured| / measured.
        predicted_over_measured: of the sums.
    """

    name: str
    fitted: bool
    num_points: int
    median: float
    p95: float
    predicted_over_measured: float

    @classmethod
    def of(cls, name: str, points: Sequence[Point], *, fitted: bool) -> FitError:
        """Return the error of `points`, at least one."""
        measured = np.array([one.measured_s for one in points])
        predicted = np.array([one.predicted_s for one in points])
        relative = np.abs(predicted - measured) / measured
        return cls(
            name=name,
            fitted=fitted,
            num_points=len(points),
            median=float(np.median(relative)),
            p95=float(np.percentile(relative, 95)),
            predicted_over_measured=float(predicted.sum() / measured.sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration found.

    Attributes:
        hardware: the base with the measured coefficients in place of its own.
        changed: names of the coefficients that were measured.
        kept: group of coefficients -> why they are still those of the base.
        errors: part by part.
        points: behind the errors.
        notes: what a reader should know.
    """

    hardware: Hardware
    changed: tuple[str, ...]
    kept: dict[str, str]
    errors: tuple[FitError, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def why_not_good(self) -> str | None:
        """Return what is wrong and what to do, None where it predicts what it was not fitted to."""
        error = self.error("held_out")
        if error is None or error.median <= GOOD_ERROR:
            return None
        return (
            f"held-out packs are predicted with a median error of {error.median:.1%}, above {GOOD_ERROR:.0%}: measure "
            "again, with nothing else on the machine and without --quick, and look at --plot for the part that is off"
        )

    def error(self, name: str) -> FitError | None:
        """Return the error of a part; None if it was not measured."""
        return next((one for one in self.errors if one.name == name), None)
