"""The documented path of `Planner`, which is in `plans/planner.py`."""

from megatron.dynamic_cp.plans.planner import Planner

__all__ = ["Planner"]
