"""From measured seconds of one device to a hardware file: least squares, errors, a picture. Pure, without torch.

    measurements.py   what was measured, and on what; JSON that an interrupted `dynamic-cp profile` goes on with
    least_squares.py  the robust fit
    fit.py            measurements -> coefficients, each with its source, and how well they fit
    results.py        what comes out: hardware, errors, points
    picture.py        measured against fitted
    ladder.py         made-up global batches for a run that calibrates itself before its first iteration
    step_fit.py       what they took -> coefficients

`megatron/dynamic_cp/calibration` measures.
"""

from dynamic_cp.calibration.fit import calibrate
from dynamic_cp.calibration.measurements import Measurement, Measurements, Setup
from dynamic_cp.calibration.results import Calibration, FitError

__all__ = ["Calibration", "FitError", "Measurement", "Measurements", "Setup", "calibrate"]
