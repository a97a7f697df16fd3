"""The documented path of `check_plan`, which is in `plans/validate.py`."""

from dynamic_cp.plans.validate import check_plan

__all__ = ["check_plan"]
