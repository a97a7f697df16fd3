"""Planner for dynamic context parallelism: describe -> price -> pack -> simulate -> choose.

Pure functions over frozen values. No torch and no megatron is imported anywhere below this package.
"""

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.types import (
    Bucket,
    Hardware,
    MicroBatch,
    ModelShape,
    Plan,
    PlannedBatch,
    PlanOptions,
    Sample,
    Topology,
)

__all__ = [
    "Bucket",
    "DynamicCPError",
    "Hardware",
    "MicroBatch",
    "ModelShape",
    "Plan",
    "PlanOptions",
    "PlannedBatch",
    "Sample",
    "Topology",
]
