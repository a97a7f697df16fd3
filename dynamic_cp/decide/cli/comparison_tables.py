"""A comparison and a sweep in a terminal: tables of figures, where the time goes, bars, the verdict, a launch line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynamic_cp.decide.cli.parameters import BatchInput
from dynamic_cp.decide.cli.starting import Starter
from dynamic_cp.decide.cli.tables import Column, can_draw, gb, heading, make_table, note, percent, table_of, tokens
from dynamic_cp.decide.comparison import PART_LABELS, Comparison, PolicyOutcome, Verdict, verdict_of
from dynamic_cp.decide.sweep import Point, Sweep
from dynamic_cp.types import CAUSAL, counted

WIDE, WIDEST = 110, 140
"""Columns from which the table of figures has more of them, and all."""

PARTS: Mapping[str, tuple[str, str]] = {
    "compute": ("c", "green"),
    "launch": ("l", "dark_green"),
    "tensor_parallel": ("t", "cyan"),
    "padding": ("p", "yellow"),
    "exchange": ("x", "red"),
    "expert_exchange": ("e", "bright_red"),
    "pipeline_bubble": ("b", "blue"),
    "cp_wait": ("w", "magenta"),
    "expert_wait": ("v", "bright_yellow"),
    "dp_wait": ("d", "bright_magenta"),
    "gradient_reduction": ("g", "bright_black"),
}
"""Part of an iteration -> its letter in a bar without colours, its colour."""

_MARKS = {"yes": "green", "no": "yellow", "unclear": "yellow"}


def show(comparison: Comparison, batch: BatchInput, out: Console) -> None:
    _show_inputs(comparison, batch, out)
    out.print()
    out.print(_figures(comparison, out))
    if comparison.is_tuned:
        out.print()
        out.print(_settings(comparison, out))
    if all(one.parts is None for one in comparison.policies):
        return
    out.print()
    out.print(heading("Where the time goes"), note("(ms of the mean rank; a column adds up)"))
    out.print()
    out.print(_parts(comparison, out))
    out.print()
    _show_bars(comparison, out)
    verdict = verdict_of(comparison)
    if verdict is not None:
        out.print()
        show_verdict(verdict, out)
    _show_notes(comparison, out)


def _show_inputs(comparison: Comparison, batch: BatchInput, out: Console) -> None:
    topology, setting = comparison.problem.topology, comparison.policies[0].setting
    cross = "×" if can_draw(out) else "x"
    split = "".join(f" {cross} {words}" for words in setting.split)
    layout = f"= {topology.num_lanes} lanes{split}, recompute {setting.recomputed}"
    out.print(
        heading(f"{comparison.model_name} on {topology.world_size} {cross} {comparison.hardware_name}"),
        Text("every policy at its own fastest layout" if comparison.is_tuned else layout),
    )
    show_batches(comparison, batch, out)


def show_batches(comparison: Comparison, batch: BatchInput, out: Console) -> None:
    num_samples = [len(one) for one in comparison.batches]
    num_tokens = sum(sample.seqlen for one in comparison.batches for sample in one)
    each = f"{min(num_samples)}" if min(num_samples) == max(num_samples) else f"{min(num_samples)}-{max(num_samples)}"
    seed = "" if batch.global_batch_size is None else f", seed {batch.seed or 0}"
    counts = f"{counted(len(num_samples), 'global batch')} of {each} samples, {tokens(num_tokens)} tokens"
    mask = "" if batch.mask == CAUSAL.name else f", mask {batch.mask}"
    out.print(f"{batch.lengths}{seed}: {counts}{mask}")


def _figures(comparison: Comparison, out: Console) -> Table:
    several = len(comparison.batches) > 1
    columns: list[Column[PolicyOutcome]] = [
        Column("policy", lambda one: one.name),
        Column("s/batch", lambda one: f"{one.iteration_s:.3f}"),
        *[Column[PolicyOutcome]("± sd" if can_draw(out) else "sd", lambda one: f"{one.stdev('iteration_s'):.3f}")]
        * several,
        *gain_columns(comparison),
        Column("/bound", lambda one: f"{one.mean('time_over_bound'):.3f}"),
        Column("tok/s/GPU", lambda one: f"{one.mean('tokens_per_s_per_gpu'):.0f}"),
        Column("TFLOP/s/GPU", lambda one: f"{one.mean('tflops_per_gpu'):.0f}", WIDE),
        Column("micro-batches", lambda one: f"{one.mean('num_microbatches'):.1f}", WIDE),
        Column("GB", lambda one: f"{gb(one.peak_bytes)}{'' if one.fits_memory else '!'}"),
        Column("limit", lambda one: str(one.max_tokens_per_rank), WIDE),
        Column("plan ms", lambda one: f"{1e3 * (one.mean('plan_s') or 0):.1f}", WIDE),
        Column("sent GB", lambda one: gb(one.mean("sent_bytes")), WIDEST),
        Column("NIC GB", lambda one: gb(one.mean("sent_across_nodes_bytes")), WIDEST),
    ]
    return table_of(comparison.policies, columns, out, is_bold=is_ours)


def gain_columns(comparison: Comparison) -> list[Column[PolicyOutcome]]:
    """Return the columns of speed-ups: the factor, with several batches also its interval."""
    speedups = {one.baseline: one for one in comparison.speedups}

    def ratio(one: PolicyOutcome) -> str:
        return f"{speedups[one.policy].ratio:.2f}x" if one.policy in speedups else ""

    def interval(one: PolicyOutcome) -> str:
        speedup = speedups.get(one.policy)
        return "" if speedup is None else f"{speedup.low:.2f}..{speedup.high:.2f}"

    return [Column("gain", ratio), *[Column("95%", interval)] * (len(comparison.batches) > 1)]


def is_ours(one: PolicyOutcome) -> bool:
    return one.policy == "dynamic"


def _settings(comparison: Comparison, out: Console) -> Table:
    columns: list[Column[PolicyOutcome]] = [
        Column("policy", lambda one: one.name),
        Column("fastest at", lambda one: one.setting.words),
    ]
    return table_of(comparison.policies, columns, out, left=2, is_bold=is_ours)


def _parts(comparison: Comparison, out: Console) -> Table:
    known = [one for one in comparison.policies if one.parts is not None]
    table = make_table(["", "", *(one.name for one in known)], left=2)
    glyphs = _glyphs(out)
    for name, (_, colour) in PARTS.items():
        values = [1e3 * dict(one.parts)[name] for one in known if one.parts is not None]
        if any(abs(value) >= 5e-4 for value in values):
            table.add_row(Text(glyphs[name], style=colour), PART_LABELS[name], *(f"{value:.1f}" for value in values))
    table.add_row("", "iteration", *(f"{1e3 * one.iteration_s:.1f}" for one in known), style="bold")
    return table


def _glyphs(out: Console) -> dict[str, str]:
    """Return what a part is drawn with: a block where colours tell parts apart, else its letter."""
    has_colours = can_draw(out) and out.color_system is not None and not out.no_color
    return {name: "█" if has_colours else letter for name, (letter, _) in PARTS.items()}


def _show_bars(comparison: Comparison, out: Console) -> None:
    known = [one for one in comparison.policies if one.parts is not None]
    label_width = max(len(one.name) for one in known)
    width = min(out.width, 120) - label_width - 2
    longest_s = max(one.iteration_s for one in known)
    glyphs = _glyphs(out)
    for one in known:
        assert one.parts is not None
        line = Text(f"{one.name:<{label_width}}  ")
        reached_s, drawn = 0.0, 0
        for name, seconds in one.parts:
            reached_s += seconds
            end = round(width * reached_s / longest_s)
            line.append(glyphs[name] * (end - drawn), style=PARTS[name][1])
            drawn = max(end, drawn)
        out.print(line, no_wrap=True, overflow="crop")


def show_verdict(verdict: Verdict, out: Console, *, with_reason: bool = True) -> None:
    """Print the judgement as a sentence, why, and what becomes of it under other prices where some were tried."""
    out.print(Text(verdict.headline[0].upper() + verdict.headline[1:] + ".", style=f"bold {_MARKS[verdict.pays]}"))
    for text in (verdict.reason * with_reason, verdict.other_prices):
        if text:
            out.print(Text(text))
    if verdict.settled_by:
        out.print(Text("What would settle it:"))
        for way in verdict.settled_by:
            out.print(Text(f"- {way.what}"))
            if way.command:
                click.echo("    " + " \\\n        ".join(way.command))


def _show_notes(comparison: Comparison, out: Console) -> None:
    notes = [
        f"! {one.name} needs {gb(one.peak_bytes)} GB, {gb(one.available_bytes)} GB "
        "are available: lower --max-tokens-per-rank or recompute more"
        for one in comparison.policies
        if not one.fits_memory
    ]
    notes += [
        f"{one.policy}: CP sizes up to {one.setting.max_cp_size} (--max-dynamic-cp-size {one.setting.max_cp_size}); "
        "larger groups take memory from tokens"
        for one in comparison.policies
        if one.setting.max_cp_size is not None
    ]
    interval = ", with a paired 95% t interval over batches" if len(comparison.batches) > 1 else ""
    notes.append(f"gain: by dynamic CP{interval}; all modelled")
    if out.width >= WIDEST:
        notes.append("sent: for attention by all ranks, forward and backward; NIC: what of it leaves nodes")
    out.print()
    for text in notes:
        out.print(note(text))


_SWEEP_WIDE = 100
"""Columns from which the table of settings has all of them."""


def show_sweep(
    found: Sweep,
    comparison: Comparison,
    batch: BatchInput,
    starter: Starter,
    files: Sequence[tuple[str, str]],
    out: Console,
) -> None:
    """Print what a sweep found, and how to start it; `files`: that do, each with the name of its policy."""
    cross = "×" if can_draw(out) else "x"
    num_gpus = comparison.problem.topology.world_size
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
    _show_line(found, starter, files, out)
    verdict = verdict_of(comparison)
    if verdict is not None:
        out.print()
        show_verdict(verdict, out, with_reason=False)


def show_ended(
    best: Mapping[str, Point], num_batches: int, line: Sequence[str], resume: str | None, out: Console
) -> None:
    """Print what a sweep that was ended has found: its policies are not compared, as each has come elsewhere."""
    out.print(heading("Ended before all settings were tried:"), Text("so far" if best else "nothing was planned yet"))
    if best:
        columns: list[Column[tuple[str, Point]]] = [
            Column("policy", lambda one: one[0]),
            Column("batches", lambda one: f"{len(one[1].batches_s)} of {num_batches}"),
            Column("s/batch", lambda one: f"{one[1].iteration_s:.3f}"),
            Column("GB", lambda one: gb(one[1].peak_bytes)),
            Column("at", lambda one: one[1].setting.words),
        ]
        table = table_of(best.items(), columns, out, is_bold=lambda one: one[0] == "dynamic")
        table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
        out.print()
        out.print(table)
    if line:
        out.print()
        out.print(heading("Fastest so far"))
        click.echo(" \\\n    ".join(line))
    out.print()
    kept = f"the same command goes on from {resume}" if resume else "with --resume FILE it would go on from here"
    out.print(note(kept))


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
        Column("lanes", lambda one: str(one.setting.topology.num_lanes), _SWEEP_WIDE),
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


def _show_line(found: Sweep, starter: Starter, files: Sequence[tuple[str, str]], out: Console) -> None:
    if refusal := starter.why_no_line(found.recommended):
        out.print(note(f"no launch line, as {refusal}"))
        return
    fastest, notes = found.front[0], starter.notes()
    flags, look = starter.line(fastest), starter.look(fastest)
    if any("$HEAD_NODE" in words for words in flags):
        notes.append("HEAD_NODE is the host of node 0, NODE_RANK the number of each node")
    out.print(heading("Recommended"))
    out.print(note(f"({'; '.join(notes)})"))
    out.print()
    if starter.hardware_command:
        click.echo(starter.hardware_command)
    click.echo(" \\\n    ".join(flags))
    if look:
        out.print()
        out.print(note("look at it; report (with --output), plan and trace (without --batches) take the same options:"))
        click.echo(" \\\n    ".join(look))
    if files:
        out.print()
        out.print(note(f"written: {', '.join(f'{path} ({policy})' for path, policy in files)}"))
