"""`dynamic-cp simulate`: policies side by side, each at its own fastest setting with --gpus; does dynamic CP pay?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp.decide.cli.options import json_option, options_in, subcommand, taken
from dynamic_cp.decide.cli.parameters import (
    POOL,
    BatchInput,
    JobInput,
    batch_options,
    job_options,
    planner_options,
    policy_option,
)
from dynamic_cp.decide.cli.tables import Progress, console, progress
from dynamic_cp.decide.files import STDOUT, check_writable, write_json
from dynamic_cp.types import NOISE_MARGIN

if TYPE_CHECKING:
    from dynamic_cp.decide.comparison import Comparison
    from dynamic_cp.decide.sweep import Found, Space, Sweep, SweepJob
    from dynamic_cp.decide.sweep.journal import Journal

DEFAULT_BATCHES = 8


@subcommand(
    "simulate",
    """
  dynamic-cp simulate --lengths github --global-batch-size 256 --gpus 64
  dynamic-cp simulate --lengths lengths.npy --global-batch-size 512 --lanes 8 --pp 4 --batches 16
  dynamic-cp simulate --lengths github --global-batch-size 64 --lanes 16 --tp 2 \\
      --policy dynamic,balanced,megatron-dev --json comparison.json
""",
)
@batch_options(default_batches=DEFAULT_BATCHES)
@job_options
@options_in(
    "Planner",
    policy=policy_option(
        "Policies to compare, comma-separated; also, with attention as tasks of servers of all stages, pool and "
        "with-pool."
    ),
    **POOL,
)
@planner_options
@json_option
def command(policy: str, noise_margin: float, no_ping_pong: bool, json: str | None, **given: Any) -> None:
    """Plan the same global batches with several policies; say how long each takes, where its time goes and what to
    choose.

    With --gpus each policy gets its own fastest layout, limit and CP size, as `dynamic-cp sweep` finds them;
    with --lanes all get the given layout. Seconds come from a cost model and an exact simulator of the schedule, not
    from measurements. Every static policy takes the fastest CP size that holds the longest sample, unless
    --static-cp-size sets another.
    """
    check_writable(json)
    comparison, batch, job = compared(policy, given, noise_margin=noise_margin, ping_pong=not no_ping_pong)
    if json:
        from dynamic_cp.decide.comparison import to_dict

        settings = {
            **job.data_parallel_as_dict,
            "max_tokens_per_rank": job.max_tokens_per_rank,
            "gpus": job.gpus,
            "tp_overlap": job.tp_overlap,
        }
        write_json(json, to_dict(comparison, {**batch.as_dict(), **settings}))
    if json != STDOUT:
        from dynamic_cp.decide.cli.comparison_tables import show

        show(comparison, batch, console())


def policies_in(policy: str) -> tuple[str, ...]:
    """Return the names in a value of --policy, each once; InvalidInputError: an unknown one, or none."""
    from dynamic_cp.decide.comparison import compared_policies

    return compared_policies([name.strip() for name in policy.split(",") if name.strip()])


def compared(
    policy: str,
    given: dict[str, Any],
    *,
    noise_margin: float = NOISE_MARGIN,
    ping_pong: bool = True,
    with_verdict: bool = True,
) -> tuple[Comparison, BatchInput, JobInput]:
    """Return the comparison that the options ask for, and the options of its batches; shows progress.

    Args:
        with_verdict: somebody asks whether dynamic CP pays, so that gains are needed under other prices, too.
    """
    from dynamic_cp.decide.comparison import compare_policies, compare_settings
    from dynamic_cp.pool.prices import TaskOptions

    names = policies_in(policy)
    tasks = TaskOptions(noise_margin=noise_margin, ping_pong=ping_pong)
    batch, job = taken(given, BatchInput), JobInput.of(given)
    job.check()
    with progress("comparing") as steps:
        steps(0, 1, "lengths")
        batches = batch.draw(DEFAULT_BATCHES)
        if job.gpus is not None:
            shared = job.sweep_job(batch, batches)
            found = searched(job.space, shared, names, steps, with_other_prices=with_verdict)
            comparison = compare_settings(
                shared,
                found.settings,
                names=(job.model_name, job.hardware_name),
                task_options=tasks,
                other_prices=found.other_prices,
                progress=steps,
            )
            return comparison, batch, job
        comparison = compare_policies(
            batches,
            topology=job.topology,
            model=job.model_shape,
            hardware=job.hardware_values,
            options=job.options,
            policies=names,
            limit_from_memory=job.limit_from_memory,
            data_parallel=job.data_parallel,
            model_name=job.model_name,
            hardware_name=job.hardware_name,
            task_options=tasks,
            progress=steps,
        )
    return comparison, batch, job


def searched(
    space: Space,
    shared: SweepJob,
    policies: Sequence[str],
    steps: Progress,
    num_processes: int | None = None,
    *,
    with_other_prices: bool = True,
    journal: Journal | None = None,
    tells_end: bool = False,
) -> Sweep:
    """Return the fastest settings of each of `policies`, by one process per CPU; warns of a policy that has none.

    Args:
        tells_end: raise SweepEndedError where a signal ends the search; else what the signal raises.
    """
    from dynamic_cp.decide.sweep import sweep
    from dynamic_cp.decide.sweep.search import SweepEndedError

    try:
        found = sweep(
            space,
            shared,
            policies=policies,
            num_processes=num_processes or len(os.sched_getaffinity(0)),
            with_other_prices=with_other_prices,
            journal=journal,
            progress=steps,
        )
    except SweepEndedError as ended:
        if tells_end:
            raise
        raise ended.cause from None
    for policy, one in found.policies.items():
        if one.best is None:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in one.refused.items())
            click.echo(f"dynamic-cp: warning: no setting of policy {policy} can run: {reasons}", err=True)
    return found


def why_fastest(found: Found) -> str:
    """Return why a policy has its setting: what it won against."""
    assert found.best is not None
    text = f"fastest of {found.num_planned} settings planned"
    if found.next_best is None:
        return text
    slower = found.next_best.iteration_s / found.best.iteration_s - 1
    return f"{text}; next layout: {found.next_best.setting.layout}, {slower:+.1%}"
