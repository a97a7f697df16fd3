"""The documented path of `simulate`, which is in `pipeline/simulator.py`."""

from dynamic_cp.pipeline.simulator import simulate

__all__ = ["simulate"]
