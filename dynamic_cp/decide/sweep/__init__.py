"""Searches the settings of a job for a given number of GPUs and global batches.

Read in this order:

- `space`: layouts that fit, and the settings that fit in memory in each
- `evaluate`: time and memory of a setting, a bound on its time, and whether a gain survives prices that are wrong
- `journal`: what was planned, in a file
- `workers`: several processes that do so
- `search`: the fastest setting of each policy, and settings that save memory
- `flags`: those of pretrain_gpt.py for a setting
- `job_files`: files that start it
"""

from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep.evaluate import Point, evaluate
from dynamic_cp.decide.sweep.flags import launch_flags
from dynamic_cp.decide.sweep.search import TRAINED_POLICIES, Found, Sweep, pareto_front, speedup_over, sweep
from dynamic_cp.decide.sweep.space import Space, layouts_of, settings_of

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
