"""The documented path of `Problem`, which is in `types/problem.py`."""

from dynamic_cp.types import Problem

__all__ = ["Problem"]
