"""Planner for dynamic context parallelism: describe -> price -> pack -> simulate -> choose. Pure functions over frozen
values, without torch and megatron. Planning code is imported at its first use, as describing needs no compiled code."""

from importlib import import_module
from typing import TYPE_CHECKING

from dynamic_cp import _moved
from dynamic_cp.errors import DynamicCPError
from dynamic_cp.types import (
    Bucket,
    Hardware,
    MicroBatch,
    ModelShape,
    Plan,
    PlannedBatch,
    PlanOptions,
    Problem,
    Sample,
    StateDtypes,
    Topology,
)

if TYPE_CHECKING:  # type checkers read these; at run time `__getattr__` imports them
    from dynamic_cp.decide.bounds import lower_bound
    from dynamic_cp.decide.plan_arrays import PlanArrays, plan_lengths
    from dynamic_cp.memory.memory_model import MemoryModel
    from dynamic_cp.models.catalog import load_hardware, load_model
    from dynamic_cp.pipeline.simulator import simulate
    from dynamic_cp.plans.serialize import format_plan
    from dynamic_cp.plans.validate import check_plan
    from dynamic_cp.pricing.cost_model import CostModel
    from dynamic_cp.search.search import plan_global_batch

__all__ = [
    "Bucket", "CostModel", "DynamicCPError", "Hardware", "MemoryModel", "MicroBatch", "ModelShape", "Plan",
    "PlanArrays", "PlanOptions", "PlannedBatch", "Problem", "Sample", "StateDtypes", "Topology", "check_plan",
    "format_plan", "load_hardware", "load_model", "lower_bound", "plan_global_batch", "plan_lengths", "simulate",
]  # fmt: skip

__version__ = "0.1.0"
_moved.install()

_AT_FIRST_USE = {
    "CostModel": "dynamic_cp.pricing.cost_model",
    "MemoryModel": "dynamic_cp.memory.memory_model",
    "PlanArrays": "dynamic_cp.decide.plan_arrays",
    "check_plan": "dynamic_cp.plans.validate",
    "format_plan": "dynamic_cp.plans.serialize",
    "load_hardware": "dynamic_cp.models.catalog",
    "load_model": "dynamic_cp.models.catalog",
    "lower_bound": "dynamic_cp.decide.bounds",
    "plan_global_batch": "dynamic_cp.search.search",
    "plan_lengths": "dynamic_cp.decide.plan_arrays",
    "simulate": "dynamic_cp.pipeline.simulator",
}
"""Name -> module; the same as in the block for type checkers."""

if not TYPE_CHECKING:  # if type checkers saw it, every misspelt name would be Any

    def __getattr__(name: str) -> object:
        if name in _AT_FIRST_USE:
            return getattr(import_module(_AT_FIRST_USE[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
