"""Registers the planner when it is imported: for frameworks that can be told to import a module in every worker.

    VERL_USE_EXTERNAL_MODULES=megatron.integrations.scheduler.from_environment DYNAMIC_CP_MODEL=path/to/config.json ...

Only warns where DYNAMIC_CP_MODEL is not set, or where Megatron-Core is not installed (a driver process).
"""

from __future__ import annotations

import logging
import os

from megatron.integrations.scheduler.job import MODEL, job_of_environment
from megatron.integrations.scheduler.register import register

logger = logging.getLogger(__name__)


def _register() -> None:
    if not os.environ.get(MODEL):
        logger.warning("dynamic CP: %s names no model, so the framework's own scheduler plans", MODEL)
        return
    try:
        register(job_of_environment())
    except ImportError as error:
        logger.warning("dynamic CP: nothing was registered in this process: %s", error)


_register()
