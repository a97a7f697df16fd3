"""Policies side by side on the same global batches: seconds, where they go, speed-ups and what to conclude.

compare_policies uses one layout for all policies, compare_settings one for each. Read in this order: `parts` (how an
iteration is split), `values` (what a comparison holds, and speed-ups with intervals), `job` (one comparison, and one
plan in it), `compare` (plans every batch with every policy), `settle` (what would settle an open verdict), `verdict`
(what to conclude), `as_dict` (plain data).
"""

from dynamic_cp.decide.comparison.as_dict import SCHEMA_VERSION, judgement_to_dict, setting_to_dict, to_dict
from dynamic_cp.decide.comparison.compare import (
    COMPARED_BY_DEFAULT,
    compare_policies,
    compare_settings,
    compared_policies,
)
from dynamic_cp.decide.comparison.parts import PART_LABELS, TimeParts, time_parts
from dynamic_cp.decide.comparison.values import (
    BatchOutcome,
    Comparison,
    PlanOutcome,
    PolicyOutcome,
    PoolOutcome,
    Speedup,
    speedup_of,
)
from dynamic_cp.decide.comparison.verdict import Verdict, verdict_of

__all__ = [
    "COMPARED_BY_DEFAULT",
    "PART_LABELS",
    "SCHEMA_VERSION",
    "BatchOutcome",
    "Comparison",
    "PlanOutcome",
    "PolicyOutcome",
    "PoolOutcome",
    "Speedup",
    "TimeParts",
    "Verdict",
    "compare_policies",
    "compare_settings",
    "compared_policies",
    "judgement_to_dict",
    "setting_to_dict",
    "speedup_of",
    "time_parts",
    "to_dict",
    "verdict_of",
]
