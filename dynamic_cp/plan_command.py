"""The work of `dynamic-cp plan`: draw or read a global batch, find the token limit, plan, report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dynamic_cp import catalog
from dynamic_cp.bounds import lower_bound
from dynamic_cp.cost_model import CostModel
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.exchanges import PRICED_CP_COMM_TYPES
from dynamic_cp.flops import mfu, plan_flops, tflops_per_rank
from dynamic_cp.lengths import MAX_LENGTH, read_lengths
from dynamic_cp.memory_model import MemoryModel
from dynamic_cp.padding import padding_fraction
from dynamic_cp.search import plan_global_batch
from dynamic_cp.serialize import digest, dumps, format_plan, plan_to_dict
from dynamic_cp.simulator import simulate
from dynamic_cp.types import CpCommType, Hardware, ModelShape, Plan, PlannedBatch, PlanOptions, Sample, Topology
from dynamic_cp.workloads import draw_lengths, workload_names, workload_source

DEFAULT_MAX_SEQLEN = 131072


MAX_SAMPLES = 10_000_000
"""Samples of one global batch: more would take gigabytes and minutes."""


def run(arguments: argparse.Namespace) -> None:
    """Plan what the arguments of `dynamic-cp plan` say, write the files and print the plan with its figures.

    Raises:
        DynamicCPError: bad input, or a plan that does not fit in memory; nothing was written or printed.
    """
    model, hardware = catalog.load_model(arguments.model), catalog.load_hardware(arguments.hardware)
    topology = _topology(arguments)
    samples = global_batch(arguments)
    num_chunks = topology.pp_size * topology.vp_size
    if num_chunks > model.num_layers:
        raise InvalidInputError(
            f"--pp {topology.pp_size} times --vpp {topology.vp_size} is {num_chunks} model chunks, the model has "
            f"{model.num_layers} layers: a chunk needs at least one, lower --pp or --vpp"
        )
    options = _options(arguments, topology)
    if arguments.max_tokens_per_rank == "auto":
        memory = _memory(arguments, model, hardware, topology, options)
        limit = memory.max_tokens_per_rank(max(sample.seqlen for sample in samples))
        options = replace(options, max_tokens_per_rank=limit)
    planned = plan_global_batch(
        samples, topology=topology, model=model, hardware=hardware, options=options, policy=arguments.policy
    )
    memory = _memory(arguments, model, hardware, topology, options)
    if hardware.hbm_bytes:
        memory.check_plan_fits(planned.plan)
    figures = {
        "policy": planned.plan.policy,
        "predicted_s": planned.predicted_s,
        **(_bound_figures(planned.plan, CostModel(model, hardware, topology, options)) if arguments.bound else {}),
        **_plan_figures(planned),
        **_memory_figures(planned.plan, memory, hardware),
        **_flops_figures(planned, model, hardware, options),
        "reason": planned.reason,
        "digest": digest(planned.plan),
    }
    if arguments.output:
        _write(arguments.output, dumps(planned.plan) + "\n")
    report = json.dumps({**figures, "plan": plan_to_dict(planned.plan)}) + "\n"
    if arguments.json and arguments.json != "-":
        _write(arguments.json, report)
    if arguments.json == "-":
        sys.stdout.write(report)
    else:
        sys.stdout.write(format_plan(planned.plan))
        sys.stdout.writelines(f"{name}: {_readable(name, value)}\n" for name, value in figures.items())


def global_batch(arguments: argparse.Namespace) -> tuple[Sample, ...]:
    """Return the samples of `--lengths`: all of a file, or --global-batch-size drawn from a file or a workload."""
    name, num_samples = arguments.lengths, arguments.global_batch_size
    is_formula = name.startswith("lognormal:")
    is_file = not is_formula and name not in workload_names() and ("/" in name or Path(name).suffix != "")
    if num_samples is None:
        if not is_file:
            if not is_formula:
                workload_source(name)  # an unknown name is the first thing to say
            raise InvalidInputError(
                f"--lengths {name} is a workload without a number of samples: give --global-batch-size"
            )
        for flag in ("seed", "max_seqlen", "overlong"):
            if getattr(arguments, flag) is not None:
                raise InvalidInputError(
                    f"--{flag.replace('_', '-')} is about drawing a batch, but all of {name} is one batch: "
                    "give --global-batch-size, or leave it out"
                )
        return _numbered(read_lengths(name))
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise InvalidInputError(
            f"--global-batch-size is {num_samples}, 1 to {MAX_SAMPLES} samples can be planned at once: change it"
        )
    max_seqlen = arguments.max_seqlen
    if max_seqlen is None:
        max_seqlen = MAX_LENGTH if is_file else DEFAULT_MAX_SEQLEN
    drawn = draw_lengths(
        name,
        num_samples,
        arguments.seed or 0,
        max_seqlen,
        # A file's lengths are the user's own; a workload's start where those of the planner's cases do.
        min_seqlen=1 if is_file else min(64, max(1, max_seqlen)),
        overlong=arguments.overlong or "truncate",
    )
    return _numbered(drawn.tolist())


def _numbered(seqlens: Any) -> tuple[Sample, ...]:
    return tuple(Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(seqlens))


def _topology(arguments: argparse.Namespace) -> Topology:
    return Topology(
        num_lanes=arguments.lanes,
        tp_size=arguments.tp,
        pp_size=arguments.pp,
        vp_size=arguments.vpp,
        ranks_per_node=arguments.ranks_per_node,
        sequence_parallel=arguments.tp > 1,
    )


def _options(arguments: argparse.Namespace, topology: Topology) -> PlanOptions:
    """Return the options, with a limit of 1 token where it still has to follow from memory."""
    static_cp_size = arguments.static_cp_size
    if static_cp_size is not None and (static_cp_size < 1 or topology.num_lanes % static_cp_size):
        raise InvalidInputError(
            f"--static-cp-size {static_cp_size} does not divide --lanes {topology.num_lanes}: use a divisor"
        )
    exchange = arguments.cp_comm_type
    return PlanOptions(
        max_tokens_per_rank=1 if arguments.max_tokens_per_rank == "auto" else arguments.max_tokens_per_rank,
        static_cp_size=static_cp_size,
        cp_comm_types=cast("tuple[CpCommType, ...]", PRICED_CP_COMM_TYPES if exchange == "auto" else (exchange,)),
        recompute=arguments.recompute,
        search=arguments.search,
    )


def _memory(
    arguments: argparse.Namespace, model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions
) -> MemoryModel:
    """Return the memory model of the CP sizes that the policy may use."""
    if arguments.policy in ("static", "balanced") and options.static_cp_size is not None:
        options = replace(options, min_cp_size=options.static_cp_size, max_cp_size=options.static_cp_size)
    return MemoryModel(model, hardware, topology, options, distributed_optimizer=not arguments.no_distributed_optimizer)


def _bound_figures(plan: Plan, cost_model: CostModel) -> dict[str, Any]:
    """Return the bound beside what it bounds, the time without the end-of-step gradient reduction."""
    bound = lower_bound(plan.samples, cost_model)
    makespan_s = simulate(plan, cost_model).makespan_s
    return {
        "makespan_s": makespan_s,
        "lower_bound_s": bound.seconds,
        "time_over_bound": makespan_s / bound.seconds,
        "bound_is_proven": bound.is_proven,
    }


def _plan_figures(planned: PlannedBatch) -> dict[str, Any]:
    plan = planned.plan
    return {
        "num_microbatches": plan.num_microbatches,
        "max_tokens_per_rank": plan.max_tokens_per_rank,
        "cp_histogram": {str(cp): count for cp, count in plan.cp_histogram.items()},
        "imbalance": planned.imbalance,
        "padding_fraction": padding_fraction(plan),
    }


def _memory_figures(plan: Plan, memory: MemoryModel, hardware: Hardware) -> dict[str, Any]:
    """Return what the rank of the worst stage needs at its peak, and what it has (None: unknown)."""
    stages = memory.peak(plan)
    stage = max(range(len(stages)), key=lambda index: (stages[index].total_bytes, -index))
    return {
        "peak_bytes": stages[stage].total_bytes,
        "available_bytes": memory.available_bytes if hardware.hbm_bytes else None,
        "peak_stage": stage,
        "peak_parts_bytes": {name.removesuffix("_bytes"): value for name, value in stages[stage]._asdict().items()},
    }


def _flops_figures(
    planned: PlannedBatch, model: ModelShape, hardware: Hardware, options: PlanOptions
) -> dict[str, Any]:
    """Return rates of true tokens and model FLOPs; hardware_flops has padding and recomputation in it."""
    true, padded = plan_flops(model, planned.plan, options.recompute)
    seconds, num_ranks = planned.predicted_s, planned.plan.topology.world_size
    return {
        "tokens_per_s_per_gpu": planned.plan.num_tokens / seconds / num_ranks,
        "tflops_per_gpu": tflops_per_rank(true.model_flops, seconds, num_ranks),
        "mfu": mfu(true.model_flops, seconds, num_ranks, hardware),
        "model_flops": true.model_flops,
        "hardware_flops": padded.hardware_flops,
    }


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if name == "peak_parts_bytes":
        return ", ".join(f"{part} {number / 1e9:.2f} GB" for part, number in value.items() if number)
    if name.endswith("_bytes"):
        return f"{value / 1e9:.2f} GB"
    if name == "mfu":
        return f"{value:.1%}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " ".join(f"{size}x{count}" for size, count in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write(path: str, text: str) -> None:
    """Write `text` to `path` whole or not at all."""
    partial = Path(f"{path}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}: choose a writable place") from error
