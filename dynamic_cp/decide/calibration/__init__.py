"""From measured seconds of one device to a hardware file: least squares, errors, a picture. Pure, without torch.

megatron/decide/calibration measures. Read in this order:

- `measurements`: what was measured, and on what; JSON from which an interrupted dynamic-cp profile continues; and what
  comes out: hardware, errors, points
- `least_squares`: the robust fit
- `fit`: measurements -> coefficients, each with its source, and how well they fit
- `picture`: measured against fitted
"""

from dynamic_cp.decide.calibration.fit import calibrate
from dynamic_cp.decide.calibration.measurements import Calibration, FitError, Measurement, Measurements, Setup

__all__ = ["Calibration", "FitError", "Measurement", "Measurements", "Setup", "calibrate"]
