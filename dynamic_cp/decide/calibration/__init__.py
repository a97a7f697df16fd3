"""From measured seconds of one device to a hardware file. Pure, without torch; megatron/decide/calibration measures.

Read in this order: `measurements` (what was measured on what, as JSON, and what a calibration finds), `fit`
(from measurements to coefficients and their errors), `picture` (measured against fitted).
"""

from dynamic_cp.decide.calibration.fit import calibrate
from dynamic_cp.decide.calibration.measurements import Calibration, FitError, Measurement, Measurements, Setup

__all__ = ["Calibration", "FitError", "Measurement", "Measurements", "Setup", "calibrate"]
