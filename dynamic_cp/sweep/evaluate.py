"""Time and memory of one setting: plan every global batch and simulate it."""

from __future__ import annotations

from dataclasses import dataclass

from dynamic_cp.errors import InfeasibleSampleError
from dynamic_cp.memory_model import MemoryModel
from dynamic_cp.search import plan_global_batch
from dynamic_cp.sweep.space import Refused, Setting
from dynamic_cp.types import Hardware, ModelShape, PlanOptions, Sample, SearchEffort


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """What all settings share.

    Attributes:
        batches: global batches, each of which every setting plans.
        policy: of the planner.
    """

    batches: tuple[tuple[Sample, ...], ...]
    model: ModelShape
    hardware: Hardware
    policy: str = "dynamic"
    search: SearchEffort = "fast"
    distributed_optimizer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a setting gives.

    Attributes:
        iteration_s: mean over the global batches.
        peak_bytes: of the rank and batch that need most.
        tokens_per_s_per_gpu: of true tokens.
        num_microbatches: mean over the global batches.
        largest_cp_size: of all plans.
    """

    setting: Setting
    iteration_s: float
    peak_bytes: float
    tokens_per_s_per_gpu: float
    num_microbatches: float
    largest_cp_size: int


def options_of(setting: Setting, job: SweepJob) -> PlanOptions:
    """Return the planner's options for a setting."""
    return PlanOptions(
        max_tokens_per_rank=setting.max_tokens_per_rank,
        static_cp_size=setting.static_cp_size,
        min_cp_size=setting.static_cp_size or 1,
        max_cp_size=setting.static_cp_size,
        recompute=setting.recompute,
        cp_comm_types=setting.cp_comm_types,
        search=job.search,
    )


def evaluate(setting: Setting, job: SweepJob) -> Point | Refused:
    """Return what `setting` gives, or why it cannot run; a pure function."""
    options = options_of(setting, job)
    memory = MemoryModel(
        job.model, job.hardware, setting.topology, options, distributed_optimizer=job.distributed_optimizer
    )
    plans = []
    try:
        for batch in job.batches:
            plans.append(
                plan_global_batch(
                    batch,
                    topology=setting.topology,
                    model=job.model,
                    hardware=job.hardware,
                    options=options,
                    policy=job.policy,
                )
            )
    except InfeasibleSampleError:
        return Refused("the longest sample fits no CP group")
    peak_bytes = max(stage.total_bytes for planned in plans for stage in memory.peak(planned.plan))
    if peak_bytes > memory.available_bytes:
        return Refused("a plan needs more memory than there is")
    total_s = sum(planned.predicted_s for planned in plans)
    return Point(
        setting=setting,
        iteration_s=total_s / len(plans),
        peak_bytes=peak_bytes,
        tokens_per_s_per_gpu=sum(planned.plan.num_tokens for planned in plans) / total_s / setting.topology.world_size,
        num_microbatches=sum(planned.plan.num_microbatches for planned in plans) / len(plans),
        largest_cp_size=max(max(planned.plan.cp_histogram) for planned in plans),
    )
