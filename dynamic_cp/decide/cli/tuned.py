"""Every policy at its own fastest setting, found by a sweep: for `sweep`, and for the commands that take --gpus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dynamic_cp.decide.cli.parameters import BatchInput, JobInput
from dynamic_cp.decide.cli.tables import Progress
from dynamic_cp.decide.tried import EXCHANGES, RECOMPUTED
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import (
    AUTO,
    CpCommType,
    Hardware,
    ModelShape,
    Sample,
    StateExchangeUse,
    allowed_exchanges,
)

if TYPE_CHECKING:
    from dynamic_cp.decide.sweep import Found, Space, Sweep, SweepJob

Batches = tuple[tuple[Sample, ...], ...]


def check_memory_is_known(hardware: Hardware) -> None:
    """Refuse hardware that does not say what fits.

    Raises:
        InvalidInputError: it has no hbm_bytes.
    """
    if not hardware.hbm_bytes:
        raise InvalidInputError(
            f"hardware {hardware.name!r} gives no hbm_bytes, so nothing says what fits: use another --hardware, or "
            "simulate with --lanes and --max-tokens-per-rank"
        )


def exchanges_tried(
    cp_comm_type: str | None, model: ModelShape, state_exchange: StateExchangeUse
) -> tuple[tuple[CpCommType, ...], ...]:
    """Return the sets of exchanges that a sweep tries for a value of --cp-comm-type; None: all it has.

    `auto` is what it is in a run of `model`, whose memory has to hold what any of them keeps.
    """
    allowed = allowed_exchanges(cp_comm_type or AUTO, model, state_exchange=state_exchange)
    return (allowed, *EXCHANGES[1:]) if cp_comm_type is None else (allowed,)


def space_of(job: JobInput) -> Space:
    """Return what --gpus searches: all that the other options leave open."""
    from dynamic_cp.decide.sweep import Space

    def alone(value: Any) -> Any:
        return None if value is None else (value,)

    assert job.gpus is not None
    recompute = "block" if job.recompute_method == "block" else job.recompute
    return Space(
        num_gpus=job.gpus,
        ranks_per_node=job.ranks_per_node,
        tp_sizes=alone(job.tp),
        pp_sizes=alone(job.pp),
        vp_sizes=alone(job.vpp),
        ep_sizes=alone(job.ep),
        limits=None if job.limit_from_memory else alone(job.max_tokens_per_rank),
        recompute=alone(recompute) or RECOMPUTED,
        recompute_num_layers=job.recompute_num_layers,
        loss_chunk_tokens=job.loss_chunk_tokens,
        exchanges=exchanges_tried(job.cp_comm_type, job.model_shape, job.states),
        static_cp_size=job.static_cp_size,
    )


def shared_of(job: JobInput, batch: BatchInput, batches: Batches) -> SweepJob:
    """Return what all settings share that --gpus searches."""
    from dynamic_cp.decide.sweep import SweepJob

    check_memory_is_known(job.hardware_values)
    return SweepJob(
        batches=batches,
        max_seqlen=batch.longest_tokens(batches),
        model=job.model_shape,
        hardware=job.hardware_values,
        search=job.effort,
        state_exchange=job.states,
        data_parallel=job.data_parallel,
        tp_overlap=job.tp_overlap,
    )


def searched(
    space: Space,
    shared: SweepJob,
    policies: Sequence[str],
    steps: Progress,
    num_processes: int | None = None,
    *,
    with_other_prices: bool = True,
) -> Sweep:
    """Return the fastest settings of each of `policies`; warns of a policy that has none.

    Args:
        num_processes: None = one per CPU.
        with_other_prices: say what becomes of the gain under them.
    """
    from dynamic_cp.decide.sweep import sweep

    found = sweep(
        space,
        shared,
        policies=policies,
        num_processes=num_processes or len(os.sched_getaffinity(0)),
        with_other_prices=with_other_prices,
        progress=steps,
    )
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
