"""Plans a global batch within the memory of the device: for the command and for `plan_lengths`.

The trainer finds its limit before it knows a batch (`megatron/trainer/setup/planned_runtime.py`), by the same memory
model. Who knows the batches (plan, simulate, trace, report, sweep) also looks for the largest CP size that a run should
have, which it is told by --max-dynamic-cp-size: the rule is `options_in_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamic_cp.errors import MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.allowed import allowed_cp_sizes
from dynamic_cp.search.search import plan_batch
from dynamic_cp.types import PlannedBatch, PlanOptions, Problem, Sample


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


def options_in_memory(problem: Problem, batches: Sequence[Sequence[Sample]]) -> PlanOptions:
    """Return the options of a dynamic `problem` with the largest limit of tokens that memory holds.

    Communicators of CP sizes that plans hardly need take memory from tokens. So the largest CP size is that with which
    the batches are fastest, among those that hold the longest sample and leave room for more tokens than larger ones.

    Raises:
        MemoryLimitError: the smallest limit needs more memory than there is.
        InvalidInputError: hardware that does not say how much it has.
    """
    longest = max(sample.seqlen for batch in batches for sample in batch)

    def limited(max_cp_size: int | None) -> Problem:
        one = replace(problem, options=replace(problem.options, max_cp_size=max_cp_size))
        limit = MemoryModel(one).max_tokens_per_rank(longest)
        return replace(one, options=replace(one.options, max_tokens_per_rank=limit))

    found = [limited(problem.options.max_cp_size)]
    for cp_size in reversed(allowed_cp_sizes(problem.topology, problem.options)[:-1]):
        try:
            one = limited(cp_size)
        except MemoryLimitError:
            break  # too small for the longest sample, and so are those below
        if one.options.max_tokens_per_rank > found[-1].options.max_tokens_per_rank:
            found.append(one)
    return found[0].options if len(found) == 1 else min(found, key=lambda one: fits_and_seconds(one, batches)).options


def fits_and_seconds(problem: Problem, batches: Sequence[Sequence[Sample]]) -> tuple[bool, float]:
    """Return (whether memory does not hold it, seconds of all batches): the least is the best."""
    plans = [plan_batch(problem, batch) for batch in batches]
    memory = MemoryModel(problem)
    too_much = problem.hardware.hbm_bytes > 0 and any(
        stage.total_bytes > memory.available_bytes for planned in plans for stage in memory.peak(planned.plan)
    )
    return too_much, sum(planned.predicted_s for planned in plans)
