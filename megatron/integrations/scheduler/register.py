"""Puts the planner in the place of Megatron-Core's own scheduler, for every framework that asks for that one."""

from __future__ import annotations

import importlib
import logging

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.integrations import untested
from megatron.integrations.scheduler.job import Job
from megatron.integrations.scheduler.planned import scheduler_class

logger = logging.getLogger(__name__)

NAME = "dynamic_cp_planner"
THEIRS = "default_dynamic_cp"
"""The one name that Megatron-Core accepts with dynamic context parallelism; it means our class once that was chosen."""
SCHEDULERS = ("scheduler_map", "DefaultDynamicCPScheduler")
"""What data_schedule defines where a scheduler can be added that gives each micro-batch CP sizes."""

_MODULE = "megatron.core.datasets.data_schedule"


def register(job: Job, *, as_theirs: bool = True) -> type:
    """Add the scheduler to Megatron-Core's `scheduler_map` as "dynamic_cp_planner"; return it.

    Args:
        job: see `job_of`; without a model it is taken from the configuration that `run()` is given.
        as_theirs: also under Megatron-Core's own name, the only one that its configuration accepts, and as the
            DefaultDynamicCPScheduler that verl imports.

    Raises:
        UnsupportedFeatureError: this Megatron-Core has no such table or base class.
    """
    module = importlib.import_module(_MODULE)
    for symbol in SCHEDULERS:
        if not hasattr(module, symbol):
            raise UnsupportedFeatureError(f"{_MODULE} has no {symbol}: use a checkout of dev from August 2026 on")
    base = module.DefaultDynamicCPScheduler
    chosen = scheduler_class(job, getattr(base, "replaces", base))
    module.scheduler_map[NAME] = chosen
    if as_theirs:
        module.scheduler_map[THEIRS] = chosen
        module.DefaultDynamicCPScheduler = chosen
    for line in untested("verl"):
        logger.warning("dynamic CP: %s", line)
    return chosen
