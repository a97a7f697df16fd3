"""The documented path of `PlanSource`, which is in `plans/plan_source.py`."""

from megatron.dynamic_cp.plans.plan_source import PlanSource

__all__ = ["PlanSource"]
