"""Plans a global batch within the memory of the device: for the command and for `plan_lengths`.

The trainer finds its limit once, before it knows a plan (`megatron/trainer/setup/memory.py`), by the same memory model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.search.search import plan_batch
from dynamic_cp.types import Hardware, ModelShape, PlannedBatch, PlanOptions, Problem, Sample, Topology


def plan_in_memory(
    samples: Sequence[Sample],
    *,
    topology: Topology,
    model: ModelShape,
    hardware: Hardware,
    options: PlanOptions,
    policy: str = "dynamic",
    limit_from_memory: bool = False,
    distributed_optimizer: bool = True,
    check_memory: bool = True,
) -> tuple[PlannedBatch, MemoryModel]:
    """Return the plan of `choice.plan_batch`, and the memory model that says what it needs.

    Args:
        samples, topology, model, hardware, options, policy: as there.
        limit_from_memory: take the largest limit that memory holds instead of that of `options`.
        distributed_optimizer: the optimizer state is sharded over the lanes.
        check_memory: refuse a plan that memory does not hold; one of hardware that does not say how much it has cannot
            be checked.

    Raises:
        MemoryLimitError: the plan, or the smallest limit, needs more memory than there is.
        InvalidInputError: that hardware, and the limit is to follow from memory.
        DynamicCPError: as `choice.plan_batch`.
    """

    problem = Problem(
        topology=topology,
        model=model,
        hardware=hardware,
        options=options,
        policy=policy,
        distributed_optimizer=distributed_optimizer,
    )
    if limit_from_memory and len(samples):  # without any, planning says so
        limit = MemoryModel(problem).max_tokens_per_rank(max(sample.seqlen for sample in samples))
        problem = replace(problem, options=replace(options, max_tokens_per_rank=limit))
    planned = plan_batch(problem, samples)
    memory = MemoryModel(problem)
    if check_memory and hardware.hbm_bytes:
        memory.check_plan_fits(planned.plan)
    return planned, memory
