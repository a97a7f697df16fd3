"""A sweep in a terminal: every policy at its best, what saves memory, the launch line, and the conclusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from dynamic_cp.cli.comparison_tables import gain_cells, gain_columns, show_batches, show_headline
from dynamic_cp.cli.console import can_draw
from dynamic_cp.cli.parameters import BatchInput
from dynamic_cp.cli.tables import heading, make_table, percent
from dynamic_cp.comparison import Comparison, verdict_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dynamic_cp.sweep import Point, Sweep

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
    out.print(_policies(comparison))
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
        show_headline(verdict, out)


def _policies(comparison: Comparison) -> Table:
    several = len(comparison.batches) > 1
    table = make_table(["policy", "s/batch", *gain_columns(several), "GB", "at"])
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    speedups = {one.baseline: one for one in comparison.speedups}
    for one in comparison.policies:
        cells = [f"{one.iteration_s:.3f}", *gain_cells(speedups.get(one.policy), several)]
        cells += [f"{(one.peak_bytes or 0) / 1e9:.1f}", one.setting.words]
        table.add_row(one.name, *cells, style="bold" if one.policy == "dynamic" else "")
    return table


def _front(front: Sequence[Point], out: Console) -> Table:
    wide = out.width >= WIDE
    shares_experts = any(one.setting.topology.ep_size > 1 for one in front)
    sizes = ["TP", "PP", "VPP", *["EP"] * shares_experts]
    columns = ["s/batch", "GB", "tok/s/GPU", *sizes, "lanes", "limit", "recompute", "exchange", "CP"]
    table = make_table([name for name in columns if wide or name != "lanes"], left=0)
    for index, one in enumerate(front):
        topology, setting = one.setting.topology, one.setting
        cells = [
            f"{one.iteration_s:.3f}",
            f"{one.peak_bytes / 1e9:.1f}",
            f"{one.tokens_per_s_per_gpu:.0f}",
            str(topology.tp_size),
            str(topology.pp_size),
            str(topology.vp_size),
            *([str(topology.ep_size)] * shares_experts),
            *([str(topology.num_lanes)] if wide else []),
            str(setting.max_tokens_per_rank),
            setting.recompute,
            setting.cp_comm_type,
            str(one.largest_cp_size) if setting.is_static else f"1-{one.largest_cp_size}",
        ]
        table.add_row(*cells, style="bold" if index == 0 else "")
    return table


def _show_remarks(found: Sweep, out: Console) -> None:
    from rich.text import Text

    out.print()
    out.print(
        Text("all modelled; limit: padded tokens per rank and micro-batch; CP: sizes that the plans use", style="dim")
    )
    refused = found.policies[found.recommended].refused
    if refused:
        out.print()
        out.print(Text(f"{sum(refused.values())} more cannot run:", style="dim"))
        for reason, number in refused.items():
            out.print(Text(f"{number:5d}  {reason}", style="dim"))
    if len(found.front) > 1:
        fastest, least = found.front[0], found.front[-1]
        out.print()
        out.print(
            f"The fastest needs {fastest.peak_bytes / 1e9:.1f} GB; the smallest {least.peak_bytes / 1e9:.1f} GB "
            f"and {percent(least.iteration_s / fastest.iteration_s - 1)} more time."
        )


def _show_line(line: LaunchLine, out: Console) -> None:
    from rich.text import Text

    if line.refusal:
        out.print(Text(f"no launch line, as {line.refusal}", style="dim"))
        return
    notes = list(line.notes)
    if any("$HEAD_NODE" in words for words in line.flags):
        notes.append("HEAD_NODE is the host of node 0, NODE_RANK the number of each node")
    out.print(heading("Recommended"))
    out.print(Text(f"({'; '.join(notes)})", style="dim"))
    out.print()
    if line.before:
        click.echo(line.before)
    click.echo(" \\\n    ".join(line.flags))
