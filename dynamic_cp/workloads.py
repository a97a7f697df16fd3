"""The documented path of `draw_lengths`, which is in `lengths/workloads.py`."""

from dynamic_cp.lengths.workloads import draw_lengths

__all__ = ["draw_lengths"]
