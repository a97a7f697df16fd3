"""Every policy at its own fastest setting, found by a sweep: for `sweep`, and for the commands that take --gpus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynamic_cp.decide.cli.tables import Progress
from dynamic_cp.types import (
    Sample,
)

if TYPE_CHECKING:
    from dynamic_cp.decide.sweep import Found, Space, Sweep, SweepJob

Batches = tuple[tuple[Sample, ...], ...]


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
