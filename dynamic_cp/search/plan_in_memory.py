"""Plans a global batch within the memory of the device: for the command and for `plan_lengths`.

The trainer finds its limit once, before it knows a plan (`megatron/trainer/setup/memory.py`), by the same memory model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.search.search import plan_batch
from dynamic_cp.types import PlannedBatch, Problem, Sample


def plan_in_memory(
    samples: Sequence[Sample], problem: Problem, *, limit_from_memory: bool = False, check_memory: bool = True
) -> tuple[PlannedBatch, MemoryModel]:
    """Return the plan of `search.plan_batch`, and the memory model that says what it needs.

    Args:
        samples, problem: as there.
        limit_from_memory: take the largest limit that memory holds instead of that of the options.
        check_memory: refuse a plan that memory does not hold; one of hardware that does not say how much it has cannot
            be checked.

    Raises:
        MemoryLimitError: the plan, or the smallest limit, needs more memory than there is.
        InvalidInputError: that hardware, and the limit is to follow from memory.
        DynamicCPError: as `search.plan_batch`.
    """
    if limit_from_memory and len(samples):  # without any, planning says so
        limit = MemoryModel(problem).max_tokens_per_rank(max(sample.seqlen for sample in samples))
        problem = replace(problem, options=replace(problem.options, max_tokens_per_rank=limit))
    planned = plan_batch(problem, samples)
    memory = MemoryModel(problem)
    if check_memory and problem.hardware.hbm_bytes:
        memory.check_plan_fits(planned.plan)
    return planned, memory
