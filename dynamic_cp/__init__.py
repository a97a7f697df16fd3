"""Planner for dynamic context parallelism: describe -> price -> pack -> simulate -> choose.

Pure functions over frozen values. No torch and no megatron is imported anywhere below this package. What plans is
imported at its first use: describing alone needs no compiled code.
"""

from importlib import import_module
from typing import Any

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

_AT_FIRST_USE = {
    "CostModel": "dynamic_cp.cost_model",
    "MemoryModel": "dynamic_cp.memory_model",
    "check_plan": "dynamic_cp.validate",
    "format_plan": "dynamic_cp.serialize",
    "load_hardware": "dynamic_cp.catalog",
    "load_model": "dynamic_cp.catalog",
    "lower_bound": "dynamic_cp.bounds",
    "plan_global_batch": "dynamic_cp.search",
    "PlanArrays": "dynamic_cp.plan_arrays",
    "plan_lengths": "dynamic_cp.plan_arrays",
    "simulate": "dynamic_cp.simulator",
}

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
    *_AT_FIRST_USE,
]


def __getattr__(name: str) -> Any:
    if name in _AT_FIRST_USE:
        return getattr(import_module(_AT_FIRST_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
