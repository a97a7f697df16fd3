"""A comparison in a terminal: one table of figures, one of where the time goes, bars, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynamic_cp.cli.console import can_draw
from dynamic_cp.cli.parameters import BatchInput
from dynamic_cp.cli.tables import heading, make_table, tokens
from dynamic_cp.comparison import PART_LABELS, Comparison, PolicyOutcome, Speedup, Verdict, verdict_of
from dynamic_cp.types import CAUSAL

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
    """Print all of `comparison`."""
    from rich.text import Text

    _show_inputs(comparison, batch, out)
    out.print()
    out.print(_figures(comparison, out))
    if comparison.is_tuned:
        out.print()
        out.print(_settings(comparison))
    if all(one.parts is None for one in comparison.policies):
        return
    out.print()
    out.print(heading("Where the time goes"), Text("(ms of the mean rank; a column adds up)", style="dim"))
    out.print()
    out.print(_parts(comparison, out))
    out.print()
    _show_bars(comparison, out)
    verdict = verdict_of(comparison)
    if verdict is not None:
        out.print()
        _show_verdict(verdict, out)
    _show_notes(comparison, out)


def _show_inputs(comparison: Comparison, batch: BatchInput, out: Console) -> None:
    from rich.text import Text

    topology, options = comparison.topology, comparison.options
    cross = "×" if can_draw(out) else "x"
    split = "".join(f" {cross} {words}" for words in comparison.policies[0].setting.split)
    layout = f"= {topology.num_lanes} lanes{split}, recompute {options.recompute}"
    out.print(
        heading(f"{comparison.model_name} on {topology.world_size} {cross} {comparison.hardware_name}"),
        Text("every policy at its own fastest layout" if comparison.is_tuned else layout),
    )
    show_batches(comparison, batch, out)


def show_batches(comparison: Comparison, batch: BatchInput, out: Console) -> None:
    """Print what is planned."""
    num_samples = [len(one) for one in comparison.batches]
    num_tokens = sum(sample.seqlen for one in comparison.batches for sample in one)
    each = f"{min(num_samples)}" if min(num_samples) == max(num_samples) else f"{min(num_samples)}-{max(num_samples)}"
    seed = "" if batch.global_batch_size is None else f", seed {batch.seed or 0}"
    plural = "batch" if len(num_samples) == 1 else "batches"
    counts = f"{len(num_samples)} global {plural} of {each} samples, {tokens(num_tokens)} tokens"
    mask = "" if batch.mask == CAUSAL.name else f", mask {batch.mask}"
    out.print(f"{batch.lengths}{seed}: {counts}{mask}")


def _figures(comparison: Comparison, out: Console) -> Table:
    wide, widest, several = out.width >= WIDE, out.width >= WIDEST, len(comparison.batches) > 1
    columns = ["policy", "s/batch"]
    columns += ["± sd" if can_draw(out) else "sd"] * several + gain_columns(several)
    columns += ["/bound", "tok/s/GPU"]
    if wide:
        columns += ["TFLOP/s/GPU", "micro-batches"]
    columns += ["GB"]
    if wide:
        columns += ["limit", "plan ms"]
    if widest:
        columns += ["sent GB", "NIC GB"]
    table = make_table(columns)
    speedups = {one.baseline: one for one in comparison.speedups}
    for one in comparison.policies:
        deviation = one.stdev("iteration_s")
        cells = [
            one.name,
            f"{one.iteration_s:.3f}",
            *([] if deviation is None else [f"{deviation:.3f}"]),
            *gain_cells(speedups.get(one.policy), several),
            f"{one.mean('time_over_bound'):.3f}",
            f"{one.mean('tokens_per_s_per_gpu'):.0f}",
        ]
        if wide:
            cells += [f"{one.mean('tflops_per_gpu'):.0f}", _number(one.mean("num_microbatches"), ".1f")]
        cells += [_memory(one)]
        if wide:
            cells += [str(one.max_tokens_per_rank), f"{1e3 * (one.mean('plan_s') or 0):.1f}"]
        if widest:
            cells += _sent_gb(one)
        table.add_row(*cells, style="bold" if one.policy == "dynamic" else "")
    return table


def _settings(comparison: Comparison) -> Table:
    table = make_table(["policy", "fastest at"], left=2)
    for one in comparison.policies:
        table.add_row(one.name, one.setting.words, style="bold" if one.policy == "dynamic" else "")
    return table


def gain_columns(several: bool) -> list[str]:
    """Return the names of the columns of a speed-up; `several`: whether there are several batches."""
    return ["gain", "95%"] if several else ["gain"]


def gain_cells(speedup: Speedup | None, several: bool) -> list[str]:
    """Return the cells of a speed-up: the factor, with several batches also its interval."""
    if speedup is None:
        return ["", ""] if several else [""]
    interval = [] if speedup.low is None else [f"{speedup.low:.2f}..{speedup.high:.2f}"]
    return [f"{speedup.ratio:.2f}x", *interval]


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _sent_gb(outcome: PolicyOutcome) -> list[str]:
    """Return what is sent for attention: all of it, and what leaves nodes."""
    in_node, across = outcome.mean("sent_in_node_bytes"), outcome.mean("sent_across_nodes_bytes")
    if in_node is None or across is None:
        return ["-", "-"]
    return [f"{(in_node + across) / 1e9:.1f}", f"{across / 1e9:.1f}"]


def _memory(outcome: PolicyOutcome) -> str:
    if outcome.peak_bytes is None:
        return "-"
    return f"{outcome.peak_bytes / 1e9:.1f}{'' if outcome.fits_memory else '!'}"


def _parts(comparison: Comparison, out: Console) -> Table:
    from rich.text import Text

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
    from rich.text import Text

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


def _show_verdict(verdict: Verdict, out: Console) -> None:
    from rich.text import Text

    show_headline(verdict, out)
    out.print(Text(verdict.reason))


def show_headline(verdict: Verdict, out: Console) -> None:
    """Print the judgement as a sentence."""
    from rich.text import Text

    out.print(Text(verdict.headline[0].upper() + verdict.headline[1:] + ".", style=f"bold {_MARKS[verdict.pays]}"))


def _show_notes(comparison: Comparison, out: Console) -> None:
    from rich.text import Text

    notes = [
        f"! {one.name} needs {(one.peak_bytes or 0) / 1e9:.1f} GB, {(one.available_bytes or 0) / 1e9:.1f} GB "
        "are available: lower --max-tokens-per-rank or recompute more"
        for one in comparison.policies
        if not one.fits_memory
    ]
    notes += [
        f"{one.policy}: CP sizes up to {one.setting.max_cp_size}, as larger groups take memory from tokens (when "
        f"training: --max-dynamic-cp-size {one.setting.max_cp_size})"
        for one in comparison.policies
        if one.setting.max_cp_size is not None
    ]
    interval = ", with a paired 95% t interval over batches" if len(comparison.batches) > 1 else ""
    notes.append(f"gain: by dynamic CP{interval}; all modelled")
    if out.width >= WIDEST:
        notes.append("sent: for attention by all ranks, forward and backward; NIC: what of it leaves nodes")
    out.print()
    for note in notes:
        out.print(Text(note, style="dim"))
