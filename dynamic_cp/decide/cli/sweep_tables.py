"""A sweep in a terminal: every policy at its best, what saves memory, the launch line, and the conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from dynamic_cp.decide.cli.comparison_tables import gain_columns, is_ours, show_batches, show_verdict
from dynamic_cp.decide.cli.console import can_draw
from dynamic_cp.decide.cli.parameters import BatchInput
from dynamic_cp.decide.cli.tables import Column, gb, heading, note, percent, table_of
from dynamic_cp.decide.comparison import Comparison, PolicyOutcome, verdict_of
from dynamic_cp.decide.sweep import Point, Sweep

WIDE = 100
"""Columns from which the table of settings has all of them."""


class LaunchLine(NamedTuple):
    """How to start what is recommended.

    Attributes:
        flags: the command, line by line.
        refusal: why there is none, else empty.
        notes: what to know before it is used.
        before: a command that has to run first, if any.
    """

    flags: Sequence[str]
    refusal: str
    notes: Sequence[str]
    before: str


def show(
    found: Sweep,
    comparison: Comparison,
    batch: BatchInput,
    line: LaunchLine,
    out: Console,
) -> None:
    """Print all of it."""
    cross = "×" if can_draw(out) else "x"
    num_gpus = comparison.topology.world_size
    out.print(heading(f"{comparison.model_name} on {num_gpus} {cross} {comparison.hardware_name}"))
    show_batches(comparison, batch, out)
    out.print()
    out.print(f"{found.num_planned} settings planned; every policy at its own fastest:")
    out.print()
    out.print(_policies(comparison, out))
    out.print()
    out.print(f"Settings of policy {found.recommended} that no other beats in both time and memory:")
    out.print()
    out.print(_front(found.front, out))
    _show_remarks(found, out)
    out.print()
    _show_line(line, out)
    verdict = verdict_of(comparison)
    if verdict is not None:
        out.print()
        show_verdict(verdict, out, with_reason=False)


def _policies(comparison: Comparison, out: Console) -> Table:
    columns: list[Column[PolicyOutcome]] = [
        Column("policy", lambda one: one.name),
        Column("s/batch", lambda one: f"{one.iteration_s:.3f}"),
        *gain_columns(comparison),
        Column("GB", lambda one: gb(one.peak_bytes or 0)),
        Column("at", lambda one: one.setting.words),
    ]
    table = table_of(comparison.policies, columns, out, is_bold=is_ours)
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def _front(front: Sequence[Point], out: Console) -> Table:
    shares_experts = any(one.setting.topology.ep_size > 1 for one in front)
    columns: list[Column[Point]] = [
        Column("s/batch", lambda one: f"{one.iteration_s:.3f}"),
        Column("GB", lambda one: gb(one.peak_bytes)),
        Column("tok/s/GPU", lambda one: f"{one.tokens_per_s_per_gpu:.0f}"),
        Column("TP", lambda one: str(one.setting.topology.tp_size)),
        Column("PP", lambda one: str(one.setting.topology.pp_size)),
        Column("VPP", lambda one: str(one.setting.topology.vp_size)),
        *[Column[Point]("EP", lambda one: str(one.setting.topology.ep_size))] * shares_experts,
        Column("lanes", lambda one: str(one.setting.topology.num_lanes), WIDE),
        Column("limit", lambda one: str(one.setting.max_tokens_per_rank)),
        Column("recompute", lambda one: one.setting.recomputed),
        Column("exchange", lambda one: one.setting.cp_comm_type),
        Column("CP", lambda one: f"{'' if one.setting.is_static else '1-'}{one.largest_cp_size}"),
    ]
    return table_of(front, columns, out, left=0, is_bold=lambda one: one is front[0])


def _show_remarks(found: Sweep, out: Console) -> None:
    out.print()
    out.print(note("all modelled; limit: padded tokens per rank and micro-batch; CP: sizes that the plans use"))
    refused = found.policies[found.recommended].refused
    if refused:
        out.print()
        out.print(note(f"{sum(refused.values())} more cannot run:"))
        for reason, number in refused.items():
            out.print(note(f"{number:5d}  {reason}"))
    if len(found.front) > 1:
        fastest, least = found.front[0], found.front[-1]
        out.print()
        out.print(
            f"The fastest needs {gb(fastest.peak_bytes)} GB; the smallest {gb(least.peak_bytes)} GB "
            f"and {percent(least.iteration_s / fastest.iteration_s - 1)} more time."
        )


def _show_line(line: LaunchLine, out: Console) -> None:
    if line.refusal:
        out.print(note(f"no launch line, as {line.refusal}"))
        return
    notes = list(line.notes)
    if any("$HEAD_NODE" in words for words in line.flags):
        notes.append("HEAD_NODE is the host of node 0, NODE_RANK the number of each node")
    out.print(heading("Recommended"))
    out.print(note(f"({'; '.join(notes)})"))
    out.print()
    if line.before:
        click.echo(line.before)
    click.echo(" \\\n    ".join(line.flags))
