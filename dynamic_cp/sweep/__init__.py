"""Searches the settings of a job for a given number of GPUs and global batches.

layouts and settings that memory holds (space.py) -> their time and memory, or a bound on it (evaluate.py), in several
processes (workers.py) -> the fastest of each policy, and what saves memory beside it (search.py) -> flags of
pretrain_gpt.py (flags.py)
"""

from dynamic_cp.setting import Setting
from dynamic_cp.sweep.evaluate import Point, evaluate
from dynamic_cp.sweep.flags import launch_flags
from dynamic_cp.sweep.job import SweepJob
from dynamic_cp.sweep.search import TRAINED_POLICIES, Found, Sweep, pareto_front, speedup_over, sweep
from dynamic_cp.sweep.space import Space, layouts_of, settings_of

__all__ = [
    "TRAINED_POLICIES",
    "Found",
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
    "speedup_over",
    "sweep",
]
