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
    FONT_PT,
    SMALL_PT,
    WIDE_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    format_s,
    new_figure,
    time_unit,
)
from dynamic_cp.report.theme import Theme
from dynamic_cp.types import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBER_PT, _DATA_SHARE = 6.5, 0.87
_MAX_NUMBERS = 240
_GAP = 0.05
"""Between a bar and the next stage, in rows."""


def tick_gantt(
    pools: Sequence[tuple[str, PlannedTasks]], theme: Theme, *, width_in: float = WIDE_IN, title: str = ""
) -> Figure:
    """Return the picture of (policy, plan in ticks) pairs, one above the other."""
    heights = [min(2.5, max(0.9, 0.22 * pool.plan.topology.pp_size)) for _, pool in pools]
    figure = new_figure(width_in, sum(heights) + 0.42 * len(pools) + 1.05 + (0.3 if title else 0.0))
    panels = figure.subplots(len(pools), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_PT + 2, fontweight="bold")
    longest_s = max(pool.makespan_s for _, pool in pools)
    factor, unit = time_unit(longest_s)
    for panel, (name, pool) in zip(panels, pools, strict=True):
        plan = pool.plan
        _draw(panel, pool, theme, factor, _DATA_SHARE * width_in * 72 / (longest_s * factor))
        panel.set_title(name, fontweight="bold", color=theme.ink, pad=5)
        facts = f"{format_s(pool.makespan_s)} · {plan.num_microbatches} micro-batches · {len(pool.spans)} ticks"
        panel.set_title(facts, loc="right", fontsize=SMALL_PT, color=theme.muted, pad=5)
        panel.set_ylim(plan.topology.pp_size, -0.1)
        panel.set_yticks([stage + 0.5 for stage in range(plan.topology.pp_size)])
        panel.set_yticklabels([str(stage) for stage in range(plan.topology.pp_size)])
        panel.set_ylabel("stage")
        panel.spines[["left", "bottom"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.axvline(pool.makespan_s * factor, color=theme.ink, linewidth=1.0, zorder=4)
    panels[0].set_xlim(0, longest_s * factor * 1.004)
    panels[-1].set_xlabel(f"time since the start of the iteration ({unit})")
    entries = [("forward", theme.cp_color(1, forward=True)), ("backward", theme.cp_color(1))]
    add_legend(figure, [*entries, ("only serves", theme.empty), ("waits", theme.band)], width_in=width_in)
    return figure


def _draw(panel: Axes, pool: PlannedTasks, theme: Theme, factor: float, pt_per_time: float) -> None:
    plan = pool.plan
    topology, to_unit = plan.topology, factor / 1e9
    bars: dict[str, list[Rectangle]] = defaultdict(list)
    numbers: list[tuple[float, float, str, str]] = []
    for span in pool.spans:
        forward = span.tick.kind == KINDS[0]
        for stage in range(topology.pp_size):
            unit = span.tick.unit(stage, topology.pp_size, topology.vp_size, plan.num_microbatches)
            start, stop = span.start_ns * to_unit, span.stage_ends_ns[stage] * to_unit
            color = theme.empty if unit is None else theme.cp_color(1, forward=forward)
            bars[color].append(Rectangle(start, stop, stage + _GAP, stage + 1 - _GAP))
            if unit is None:
                continue
            words = f"{unit.chunk}.{unit.micro_batch}" if topology.vp_size > 1 else str(unit.micro_batch)
            if (stop - start) * pt_per_time > 3 + 4.2 * len(words):
                ink = (theme.cp_inks_forward if forward else theme.cp_inks)[0]
                numbers.append(((start + stop) / 2, stage + 0.5, words, ink))
    band = [Rectangle(0, pool.makespan_s * factor, stage + _GAP, stage + 1 - _GAP) for stage in range(topology.pp_size)]
    add_rectangles(panel, band, theme.band, zorder=1)
    for color, rectangles in sorted(bars.items()):
        add_rectangles(panel, rectangles, color, edgecolor=theme.background, linewidth=0.35, zorder=2)
    for x, y, words, ink in numbers if len(numbers) <= _MAX_NUMBERS else ():
        number = panel.text(
            x, y, words, ha="center", va="center_baseline", fontsize=_NUMBER_PT, color=ink, clip_on=True, zorder=3
        )
        number.set_in_layout(False)  # measuring hundreds would take most of the time
