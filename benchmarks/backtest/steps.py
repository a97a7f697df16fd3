"""A published run, built by hand in its layout and priced by the shipped hardware files: seconds and memory of a step.

Sequences have a fixed length, so there is nothing to plan: each micro-batch gives every CP group as many sequences as
the run's micro-batch size. Not priced: the optimizer's step, data and logging, which published seconds contain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from benchmarks.backtest.runs import Run
from dynamic_cp.memory.memory_model import MemoryModel, StageMemory
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import (
    Bucket,
    CpCommType,
    DataParallel,
    Hardware,
    MicroBatch,
    Plan,
    PlanOptions,
    Problem,
    Recompute,
    Sample,
)
from dynamic_cp.types.problem import RecomputeModule

LOGITS_OF_FUSED_LOSS = 0.25
"""Two bytes of a logit, of eight: --cross-entropy-loss-fusion with TransformerEngine's kernel overwrites them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """What the project says of a run. Its memory is that on the run's own hardware.

    Attributes:
        iteration_s: seconds of a step.
        reduction_s: those of them in which lanes reduce gradients or gather parameters and nothing hides it.
    """

    run: Run
    iteration_s: float
    reduction_s: float

    @property
    def ratio(self) -> float:
        """Modelled over published seconds; above 1 the model is too slow."""
        return self.iteration_s / self.run.published_s

    @property
    def peak_bytes(self) -> float:
        """Memory of the rank that needs most."""
        return max(stage.total_bytes for stage in stages_of(self.run))

    @property
    def available_bytes(self) -> float:
        """Memory that planning allows."""
        return MemoryModel(problem_of(self.run)).available_bytes

    @property
    def is_refused(self) -> bool:
        """Whether the memory model refuses the run."""
        return self.peak_bytes > self.available_bytes


def problem_of(run: Run, hardware: Hardware | None = None) -> Problem:
    """Return the problem that the run is priced for, on other hardware if one is given."""
    return Problem(
        topology=run.topology,
        model=run.model,
        hardware=hardware or run.hardware,
        options=PlanOptions(
            max_tokens_per_rank=run.micro_batch_size * run.seqlen // run.cp,
            static_cp_size=run.cp,
            cp_comm_types=(cast(CpCommType, run.exchange),),
            recompute=cast(Recompute, run.recompute),
            recompute_modules=cast("tuple[RecomputeModule, ...]", run.recompute_modules),
            tp_comm_overlap="tp_comm_overlap" in run.source.flags,
            fp8=run.precision != "bf16",
            fp8_param="fp8_param_gather" in run.source.flags,
        ),
        policy="static",
        data_parallel=data_parallel_of(run),
    )


def data_parallel_of(run: Run) -> DataParallel:
    """Return how lanes share gradients and parameters, as the flags of its source say."""
    flags = run.source.flags
    return DataParallel(
        overlap_grad_reduce="overlap_grad_reduce" in flags,
        overlap_param_gather="overlap_param_gather" in flags,
        state=run.source.state,
    )


def plan_of(run: Run) -> Plan:
    """Return the run's global batch: sequences in order, as many for each CP group and micro-batch."""
    topology = run.topology
    num_groups = topology.num_lanes // run.cp
    num_micro_batches = run.global_batch_size // (num_groups * run.micro_batch_size)
    sequences = iter(range(run.global_batch_size))

    def bucket(group: int) -> Bucket:
        samples = tuple(Sample(sample_id=next(sequences), seqlen=run.seqlen) for _ in range(run.micro_batch_size))
        exchange = cast(CpCommType, run.exchange if run.cp > 1 else "p2p")
        return Bucket(first_lane=group * run.cp, cp_size=run.cp, samples=samples, cp_comm_type=exchange)

    return Plan(
        topology=topology,
        max_tokens_per_rank=run.micro_batch_size * run.seqlen // run.cp,
        micro_batches=tuple(
            MicroBatch(buckets=tuple(bucket(group) for group in range(num_groups))) for _ in range(num_micro_batches)
        ),
        policy="static",
    )


def modelled(run: Run, hardware: Hardware | None = None, *, overlaps: bool = True) -> Modelled:
    """Return the seconds of a step of `run`. Without `overlaps`, gradients and parameters never overlap."""
    problem, plan = problem_of(run, hardware), plan_of(run)
    if not overlaps:
        exposed = replace(problem.data_parallel, overlap_grad_reduce=False, overlap_param_gather=False)
        problem = replace(problem, data_parallel=exposed)
    timeline = simulate(plan, CostModel(problem))
    return Modelled(run=run, iteration_s=timeline.iteration_s, reduction_s=timeline.gradient_reduction_s)


@cache
def stages_of(run: Run) -> tuple[StageMemory, ...]:
    """Return the memory of each stage as published runs have it: a fused loss where the source says so, and kernels of
    Mamba that compute again what this project's keep unless core attention is recomputed."""
    problem = problem_of(run)
    linear, options = run.model.linear_attention, problem.options
    if linear is not None and not linear.has_delta_rule and run.recompute != "full":
        repeated = (*options.repeated, cast(RecomputeModule, "core_attn"))
        options = replace(options, recompute="selective", recompute_modules=repeated)
    stages = MemoryModel(replace(problem, options=options)).peak(plan_of(run))
    if "cross_entropy_loss_fusion" not in run.source.flags:
        return stages
    return tuple(one._replace(logits_bytes=LOGITS_OF_FUSED_LOSS * one.logits_bytes) for one in stages)


def slower(hardware: Hardware, factor: float, start: str = "") -> Hardware:
    """Return hardware on which products and attention take `factor` times as long, those whose names start so."""
    names = [name for name in hardware.__dataclass_fields__ if name.startswith(start)]
    rates = [name for name in names if name.endswith("flops_per_s") and name[:4] != "peak"]
    return replace(hardware, **{name: getattr(hardware, name) / factor for name in rates})
