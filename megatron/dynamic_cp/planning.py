"""The documented path of `PlanSource`, which is in `plans/planning.py`."""

from megatron.dynamic_cp.plans.planning import PlanSource

__all__ = ["PlanSource"]
