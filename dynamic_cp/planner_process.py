"""The documented path of `Problem`, which is in `search/planner_process.py`."""

from dynamic_cp.search.planner_process import Problem

__all__ = ["Problem"]
