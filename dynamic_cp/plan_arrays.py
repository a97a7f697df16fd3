"""The documented path of `PlanArrays`, `plan_arrays`, `plan_lengths`, which are in `search/plan_arrays.py`."""

from dynamic_cp.search.plan_arrays import PlanArrays, plan_arrays, plan_lengths

__all__ = ["PlanArrays", "plan_arrays", "plan_lengths"]
