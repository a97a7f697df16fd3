"""Searches the settings of a job for a given number of GPUs and global batches.

layouts (space.py) -> settings that memory holds (space.py) -> their time and memory (evaluate.py)
-> those that no other beats in both (search.py) -> flags of pretrain_gpt.py (flags.py)
"""

from dynamic_cp.sweep.evaluate import Point, SweepJob, evaluate
from dynamic_cp.sweep.flags import launch_flags
from dynamic_cp.sweep.search import Sweep, pareto_front, sweep
from dynamic_cp.sweep.space import Setting, Space, layouts_of, settings_of

__all__ = [
    "Point",
    "Setting",
    "Space",
    "Sweep",
    "SweepJob",
    "evaluate",
    "launch_flags",
    "layouts_of",
    "pareto_front",
    "settings_of",
    "sweep",
]
