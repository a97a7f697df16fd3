"""`dynamic-cp plan`: draw or read a global batch, find the token limit, plan, report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp import __version__
from dynamic_cp.decide.cli.options import json_option, option, options_in, output_option, subcommand, taken
from dynamic_cp.decide.cli.parameters import POOL, BatchInput, JobInput, batch_options, job_options, planner_options
from dynamic_cp.decide.cli.simulate import searched, why_fastest
from dynamic_cp.decide.cli.tables import Progress, can_draw, console, heading, note, percent, progress, seconds
from dynamic_cp.decide.files import STDOUT, check_apart, check_writable, write_json, write_text
from dynamic_cp.decide.stage_splits import in_words
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError, did_you_mean
from dynamic_cp.types import (
    POOL_POLICIES,
    STATIC_POLICIES,
    Hardware,
    Plan,
    PlannedBatch,
    PoolUse,
    Problem,
    Topology,
    counted,
)

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
_SHOWN_LINES = 8
"""Micro-batches that the terminal shows."""
_S_PER_LANE, _S_PER_SAMPLE, _OF_PIPELINES = 2e-5, 7e-5, 3
"""CPU seconds of a plan with all exchanges, and how many times as long one of a pipeline takes.

Source: plans of 16384 to 1048576 lanes, llama-3-8b, 2 cores of an AMD EPYC, 2026-11-29.
"""
_SAID_FROM_S = 20.0


@subcommand(
    "plan",
    """
  dynamic-cp plan --lengths lengths.npy --gpus 16
  dynamic-cp plan --lengths github --global-batch-size 512 --lanes 64 --tp 2 --recompute full --bound
  dynamic-cp plan --lengths lengths.txt --lanes 4 --tp 4 --max-tokens-per-rank 8192 --output plan.json
""",
)
@batch_options()
@job_options
@options_in(
    "Planner",
    policy=option(
        "Policy to plan with: dynamic, or for comparison static, balanced or megatron-dev; with a pipeline also "
        "pool (servers of all stages compute attention) and with-pool (dynamic, or a pool where it is faster).",
        default="dynamic",
        metavar="NAME",
    ),
    **POOL,
    bound=option("Also give a lower bound on the time of all plans, and time / bound.", bool),
)
@planner_options
@output_option("Write the plan alone, for `dynamic-cp check` and for ranks.", "FILE.json")
@json_option
def command(
    policy: str,
    noise_margin: float,
    no_ping_pong: bool,
    bound: bool,
    output: str | None,
    json: str | None,
    **given: Any,
) -> None:
    """Plan one global batch; print the plan and its predicted seconds, memory and FLOPs.

    A plan that needs more memory than the hardware has is refused. With --gpus the plan is for the fastest layout. With
    --lanes the static policies take the smallest CP size that holds the longest sample, unless --static-cp-size sets
    another.
    """
    check_writable(output)
    check_writable(json)
    check_apart(output=output, json=json)
    batch, job = taken(given, BatchInput), JobInput.of(given)
    with progress("planning") as steps:
        steps(0, 3, "lengths")
        from dynamic_cp.search.search import POLICIES

        known = (*POLICIES, *POOL_POLICIES)
        if policy not in known:
            near = did_you_mean(policy, known)
            raise InvalidInputError(f"policy {policy!r} is unknown{near}: use one of {', '.join(known)}")
        job.check()
        pool = POOL_POLICIES.get(policy, "off")
        _check_pool(job, pool, bound)
        of_pool = {"pool": pool, "noise_margin": noise_margin, "ping_pong": not no_ping_pong}
        planned, figures = _plan(batch, job, policy if pool == "off" else "dynamic", of_pool, bound, steps)
    _write(planned, figures, output, json)


def _check_pool(job: JobInput, pool: PoolUse, bound: bool) -> None:
    if pool == "off":
        return
    if job.gpus is not None:
        raise UnsupportedFeatureError(
            f"--gpus {job.gpus} looks for a layout by plans without a pool: give --lanes, --tp and --pp"
        )
    if bound:
        raise UnsupportedFeatureError(
            "--bound is one of plans whose attention stays on its stage: leave it out, or plan without a pool"
        )


def _plan(
    batch: BatchInput, job: JobInput, policy: str, of_pool: dict[str, Any], bound: bool, steps: Progress
) -> tuple[PlannedBatch, dict[str, Any]]:
    # Imported here: the planner's compiled code takes longer to import than all the rest.
    from dynamic_cp.decide.plan_in_memory import options_in_memory, plan_in_memory
    from dynamic_cp.plans.padding import padding_fraction
    from dynamic_cp.plans.serialize import digest
    from dynamic_cp.pricing.allowed import allowed_cp_sizes, problem_of_prices
    from dynamic_cp.pricing.cost_model import CostModel

    samples = batch.draw_one()
    model, hardware = job.model_shape, job.hardware_values
    why = f"stages of {in_words(model.pipeline_layers)}" if model.pipeline_layers and job.pp else ""
    if job.gpus is None:
        topology, options, limit_from_memory = job.topology, job.options, job.limit_from_memory
        if policy in STATIC_POLICIES:
            options = replace(options, max_cp_size=None)
    else:
        shared = job.sweep_job(batch, (samples,))
        found = searched(job.space, shared, (policy,), steps)
        setting = found.best[policy].setting
        model = replace(model, pipeline_layers=setting.pipeline_layers)
        topology, options, limit_from_memory = setting.topology, shared.options_of(setting), False
        why = f"{setting.layout}, exchange {setting.cp_comm_type}: {why_fastest(found.policies[policy])}"
    options = replace(options, **of_pool)
    steps(1, 3, "plan")
    problem = Problem(
        topology=topology,
        model=model,
        hardware=hardware,
        options=options,
        policy=policy,
        data_parallel=job.data_parallel,
    )
    finds_limit = limit_from_memory and policy == "dynamic" and options.pool == "off"
    num_plans = len(allowed_cp_sizes(topology, options)) if finds_limit else 1
    if text := how_long(topology, len(samples), num_plans):
        click.echo(f"dynamic-cp: {text}", err=True)
    if finds_limit:
        problem, limit_from_memory = replace(problem, options=options_in_memory(problem, (samples,))), False
    planned, memory = plan_in_memory(samples, problem, limit_from_memory=limit_from_memory)
    options = replace(problem.options, max_tokens_per_rank=planned.plan.max_tokens_per_rank)
    steps(2, 3, "lower bound" if bound else "figures")
    priced = replace(problem, options=options, policy="dynamic")
    figures = {
        "inputs": _inputs(batch, job, priced),
        "policy": planned.plan.policy,
        **({"layout": why} if why else {}),
        "predicted_s": planned.predicted_s,
        **(_bound_figures(planned.plan, CostModel(problem_of_prices(priced))) if bound else {}),
        "num_microbatches": planned.plan.num_microbatches,
        "max_tokens_per_rank": planned.plan.max_tokens_per_rank,
        "max_cp_size": options.max_cp_size,
        "cp_histogram": {str(cp): count for cp, count in planned.plan.cp_histogram.items()},
        "imbalance": planned.imbalance,
        "padding_fraction": padding_fraction(planned.plan),
        **_memory_figures(planned.plan, memory, hardware),
        **_flops_figures(planned, priced),
        "reason": planned.reason,
        "digest": digest(planned.plan),
    }
    return planned, figures


def how_long(topology: Topology, num_samples: int, num_plans: int) -> str:
    """Return how long planning takes, once for each largest CP size that is tried; empty where nobody waits."""
    each_s = _S_PER_LANE * topology.num_lanes + _S_PER_SAMPLE * num_samples
    seconds = num_plans * each_s * (_OF_PIPELINES if topology.pp_size > 1 else 1)
    if seconds < _SAID_FROM_S:
        return ""
    remedy = "; with --max-tokens-per-rank it is one plan" * (num_plans > 1)
    took = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    plans = f"up to {num_plans} plans" if num_plans > 1 else "a plan"
    lanes = f"{plans} of {counted(topology.num_lanes, 'lane')} and {counted(num_samples, 'sample')}"
    return f"{lanes} will take about {took} of a core{remedy}"


def _inputs(batch: BatchInput, job: JobInput, problem: Problem) -> dict[str, Any]:
    from dynamic_cp.decide.comparison.as_dict import job_to_dict

    return {
        "model": job.model,
        "hardware": job.hardware_name,
        **job_to_dict(problem),
        **batch.as_dict(),
        **job.data_parallel_as_dict,
        "gpus": job.gpus,
        "tp_overlap": job.tp_overlap,
    }


def _write(planned: PlannedBatch, figures: dict[str, Any], output: str | None, json_path: str | None) -> None:
    from dynamic_cp.plans.serialize import plan_to_dict

    if output:
        data = {"version": __version__, **plan_to_dict(planned.plan)}
        write_text(output, json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n")
    if json_path:
        write_json(json_path, {"schema_version": SCHEMA_VERSION, **figures, "plan": plan_to_dict(planned.plan)})
    if STDOUT not in (json_path, output):
        _show(planned.plan, figures, console())


def _show(plan: Plan, figures: dict[str, Any], out: Console) -> None:
    """Print the first micro-batches and what is expected, with units."""
    from rich.table import Table
    from rich.text import Text

    from dynamic_cp.plans.serialize import format_plan

    more = "…" if can_draw(out) else "..."
    _, *lines = format_plan(plan, placements=False).splitlines()
    lines = lines[: plan.num_microbatches]
    out.print(heading(counted(len(lines), "micro-batch")), note("(sample:tokens; - is an empty place)"))
    out.print()
    is_cut = len(lines) > _SHOWN_LINES or plan.num_placed > 0
    for line in lines[:_SHOWN_LINES]:
        is_cut |= len(line) > out.width
        shown = line if len(line) <= out.width else line[: out.width - len(more)] + more
        out.print(Text(shown), no_wrap=True, overflow="ignore", crop=False)
    if is_cut:
        count = len(lines) - _SHOWN_LINES
        rest = f"{counted(count, 'more micro-batch')}; " if count > 0 else ""
        out.print(note(f"{more} {rest}--output FILE.json or --json - has all of it"))
    out.print()
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(plan, figures):
        table.add_row(Text(name, style="bold"), Text(value))
    out.print(table)


def _rows(plan: Plan, figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (what, its value with its unit)."""
    buckets = ", ".join(f"{count} at CP {size}" for size, count in figures["cp_histogram"].items())
    buckets += f"; {plan.num_placed} placed" if plan.num_placed and plan.extension is None else ""
    rows = [("policy", figures["policy"]), *([("layout", figures["layout"])] if "layout" in figures else [])]
    rows += [("iteration", f"{seconds(figures['predicted_s'])}, predicted")]
    if "lower_bound_s" in figures:
        proven = "" if figures["bound_is_proven"] else " (not proven)"
        text = (
            f"{seconds(figures['lower_bound_s'])}{proven}; the plan takes {seconds(figures['makespan_s'])}, "
            f"{figures['time_over_bound']:.3f} times that, both without the reduction of gradients"
        )
        rows.append(("lower bound", text))
    mfu = "" if figures["mfu"] is None else f", MFU {figures['mfu']:.1%}"
    available = figures["available_bytes"]
    of = "of unknown" if available is None else f"of {available / 1e9:.1f} GB"
    largest = "" if figures["max_cp_size"] is None else f" at CP up to {figures['max_cp_size']}"
    if largest and "layout" not in figures:
        largest += f" (when training: --max-dynamic-cp-size {figures['max_cp_size']})"
    more = plan.extension
    parts = sorted(figures["peak_parts_bytes"].items(), key=lambda one: -one[1])
    shown = ", ".join(f"{part} {number / 1e9:.1f}" for part, number in parts if number >= 5e7)
    return [
        *rows,
        ("per GPU", f"{figures['tokens_per_s_per_gpu']:.0f} tokens/s, {figures['tflops_per_gpu']:.1f} TFLOP/s{mfu}"),
        ("limit", f"{plan.max_tokens_per_rank} padded tokens per rank and micro-batch{largest}"),
        ("buckets", buckets),
        *([] if more is None else [(more.kind, f"{more.describe()}, {plan.num_servers} servers")]),
        ("imbalance", f"{figures['imbalance']:.3f} (busiest lane / mean)"),
        ("padding", f"{percent(figures['padding_fraction'])} of the tokens"),
        (
            "memory",
            f"{figures['peak_bytes'] / 1e9:.1f} GB {of} on pipeline stage {figures['peak_stage']}"
            + (f" ({shown})" if shown else ""),
        ),
        ("choice", figures["reason"]),
        ("digest", figures["digest"]),
    ]


def _bound_figures(plan: Plan, cost_model: Any) -> dict[str, Any]:
    """Return the bound beside what it bounds, the time without the end-of-step gradient reduction."""
    from dynamic_cp.decide.bounds import lower_bound
    from dynamic_cp.pipeline.simulator import simulate

    bound = lower_bound(plan.samples, cost_model)
    makespan_s = simulate(plan, cost_model).makespan_s
    return {
        "makespan_s": makespan_s,
        "lower_bound_s": bound.seconds,
        "time_over_bound": makespan_s / bound.seconds,
        "bound_is_proven": bound.is_proven,
    }


def _memory_figures(plan: Plan, memory: Any, hardware: Hardware) -> dict[str, Any]:
    """Return what the rank of the worst stage needs at its peak, and what it has (None: unknown)."""
    stages = memory.peak(plan)
    stage = max(range(len(stages)), key=lambda index: (stages[index].total_bytes, -index))
    return {
        "peak_bytes": stages[stage].total_bytes,
        "available_bytes": memory.available_bytes if hardware.hbm_bytes else None,
        "peak_stage": stage,
        "peak_parts_bytes": {name.removesuffix("_bytes"): value for name, value in stages[stage]._asdict().items()},
    }


def _flops_figures(planned: PlannedBatch, problem: Problem) -> dict[str, Any]:
    """Return rates of true tokens and model FLOPs; hardware_flops has padding and recomputation in it."""
    from dynamic_cp.pricing.work import mfu, plan_flops, tflops_per_rank

    true, padded = plan_flops(problem.model, planned.plan, problem.options.recompute, problem.recomputed_share())
    seconds, num_ranks = planned.predicted_s, planned.plan.topology.world_size
    return {
        "tokens_per_s_per_gpu": planned.plan.num_tokens / seconds / num_ranks,
        "tflops_per_gpu": tflops_per_rank(true.model_flops, seconds, num_ranks),
        "mfu": mfu(true.model_flops, seconds, num_ranks, problem.hardware),
        "model_flops": true.model_flops,
        "hardware_flops": padded.hardware_flops,
    }
