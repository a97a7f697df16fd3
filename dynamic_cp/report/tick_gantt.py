"""Gantt of pools on one time axis: what each stage runs in each tick, and where it only serves others.

A bar is a tick on a stage, from its first layer, at which all stages meet, to the end of what the stage does behind the
last one. Forward is muted, backward strong; a stage without a micro-batch is grey. Numbers are micro-batches, with
chunks as in 1.3: chunk 1 of 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamic_cp.disaggregation.search import PlannedTasks
from dynamic_cp.report.drawing import (
    WIDE_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    format_s,
    name_cells,
    stacked,
    time_unit,
)
from dynamic_cp.report.gantt import DATA_SHARE, Number, draw_bars, name_rows, name_time
from dynamic_cp.report.theme import Theme
from dynamic_cp.types import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GAP = 0.05
"""Between a bar and the next stage, in rows."""


def tick_gantt(
    pools: Sequence[tuple[str, PlannedTasks]], theme: Theme, *, width_in: float = WIDE_IN, title: str = ""
) -> Figure:
    """Return the picture of (policy, plan in ticks) pairs, one above the other."""
    heights = [min(2.5, max(0.9, 0.22 * pool.plan.topology.pp_size)) for _, pool in pools]
    figure, panels = stacked(width_in, heights, each_in=0.42, rest_in=1.05, title=title, sharex=True)
    longest_s = max(pool.makespan_s for _, pool in pools)
    factor, unit = time_unit(longest_s)
    for panel, (name, pool) in zip(panels, pools, strict=True):
        plan = pool.plan
        _draw(panel, pool, theme, factor, DATA_SHARE * width_in * 72 / (longest_s * factor))
        facts = f"{format_s(pool.makespan_s)} · {plan.num_microbatches} micro-batches · {len(pool.spans)} ticks"
        name_rows(panel, name, facts, theme)
        name_cells(panel.yaxis, range(plan.topology.pp_size), 1)
        panel.set_ylim(plan.topology.pp_size, -0.1)
        panel.set_ylabel("stage")
        panel.axvline(pool.makespan_s * factor, color=theme.ink, linewidth=1.0, zorder=4)
    name_time(panels, longest_s * factor, unit)
    entries = [("forward", theme.cp_color(1, forward=True)), ("backward", theme.cp_color(1))]
    add_legend(figure, [*entries, ("only serves", theme.empty), ("waits", theme.band)], width_in=width_in)
    return figure


def _draw(panel: Axes, pool: PlannedTasks, theme: Theme, factor: float, pt_per_time: float) -> None:
    plan = pool.plan
    topology, to_unit = plan.topology, factor / 1e9
    bars: dict[str, list[Rectangle]] = defaultdict(list)
    numbers: list[Number] = []
    for span in pool.spans:
        forward = span.tick.kind == KINDS[0]
        for stage in range(topology.pp_size):
            unit = span.tick.unit(stage, topology.pp_size, topology.vp_size, plan.num_microbatches)
            start, stop = span.start_ns * to_unit, span.stage_ends_ns[stage] * to_unit
            color = theme.empty if unit is None else theme.cp_color(1, forward=forward)
            bar = Rectangle(start, stop, stage + _GAP, stage + 1 - _GAP)
            bars[color].append(bar)
            if unit is None:
                continue
            words = f"{unit.chunk}.{unit.micro_batch}" if topology.vp_size > 1 else str(unit.micro_batch)
            if (stop - start) * pt_per_time > 3 + 4.2 * len(words):
                ink = (theme.cp_inks_forward if forward else theme.cp_inks)[0]
                numbers.append(Number(bar, words, ink))
    band = [Rectangle(0, pool.makespan_s * factor, stage + _GAP, stage + 1 - _GAP) for stage in range(topology.pp_size)]
    add_rectangles(panel, band, theme.band, zorder=1)
    draw_bars(panel, sorted(bars.items()), numbers, theme, linewidth=0.35)
