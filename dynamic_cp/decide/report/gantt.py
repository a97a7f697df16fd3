"""Pipeline Gantt of several policies on one time axis: who computes what when, and which lanes a CP group joins.

A bar is an operation of a bucket on a stage. It spans the lanes of its CP group, and its colour is the CP size: muted
in forward, strong in backward, grey for padding alone. Idle time shows the band behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dynamic_cp.arrays import Ints
from dynamic_cp.decide.report.drawing import (
    SMALL_PT,
    WIDE_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    format_s,
    name_cells,
    stacked,
    time_unit,
)
from dynamic_cp.decide.report.theme import Theme
from dynamic_cp.pipeline.schedule import KINDS, places_of
from dynamic_cp.pipeline.timeline import Timeline, durations_ns
from dynamic_cp.types import counted, largest_power_of_two

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dynamic_cp.pool.search import PlannedTasks  # compiled: most pictures have no pool

_MAX_ROWS = 64
_MAX_BARS = 4000
_MAX_NUMBERS = 240
_NUMBER_PT, _ARROW_PT = 6.5, 44
_TICK_GAP = 0.05
"""Gap between the bar of a tick and the next stage, in rows."""
_DATA_SHARE = 0.87
"""Share of the width that the time axis takes."""


class _Window(NamedTuple):
    """The places that are drawn: some lanes of some stages."""

    stages: range
    lanes: range

    @property
    def rows_of_stage(self) -> int:
        """Rows from a stage to the next: its lanes and a gap."""
        return len(self.lanes) + (1 if len(self.lanes) > 1 else 0)

    @property
    def num_rows(self) -> int:
        return len(self.stages) * self.rows_of_stage

    def row(self, stage: int, lane: int) -> int:
        return self.stages.index(stage) * self.rows_of_stage + lane - self.lanes.start


def gantt(timelines: Sequence[tuple[str, Timeline]], theme: Theme, *, width_in: float = WIDE_IN) -> Figure:
    """Return the picture of (policy, timeline) pairs, one above the other. If there are too many places, it shows the
    aligned block of lanes that ends last, since that decides how long the iteration takes, and says so."""
    windows = [_window(timeline) for _, timeline in timelines]
    heights = [_height_in(window) for window in windows]
    figure, panels = stacked(width_in, heights, each_in=0.42, rest_in=1.05, sharex=True)
    longest_s = max(timeline.makespan_s for _, timeline in timelines)
    factor, unit = time_unit(longest_s)
    sizes: set[int] = set()
    has_empty = False
    for panel, height, window, (name, timeline) in zip(panels, heights, windows, timelines, strict=True):
        drawn = _draw(panel, timeline, window, theme, factor, inches=(width_in, height, longest_s * factor))
        sizes |= drawn - {0}
        has_empty |= 0 in drawn
        _describe(panel, name, timeline, window, theme, width_in)
        _mark_end(panel, timeline.makespan_s, longest_s, factor, window, theme, width_in)
    _name_time(panels, longest_s * factor, unit)
    entries = [*cp_legend(sizes, theme), *[("only padding", theme.empty)] * has_empty, ("idle", theme.band)]
    add_legend(figure, entries, width_in=width_in, title="CP size (forward muted, backward strong)")
    return figure


def _height_in(window: _Window) -> float:
    return min(2.5, max(0.75, 0.055 * window.num_rows, 0.14 * min(8, len(window.stages))))


def _window(timeline: Timeline) -> _Window:
    """Return the places to draw: all stages (at most 64), and as many lanes as rows and bars allow."""
    topology = timeline.plan.topology
    stages = topology.pp_size
    if stages > _MAX_ROWS:
        return _Window(range(_MAX_ROWS), range(_last_lane(timeline), _last_lane(timeline) + 1))
    bars_of_lane = 2 * timeline.plan.num_microbatches * topology.vp_size * stages
    num_lanes = min(topology.num_lanes, max(1, _MAX_ROWS // stages), max(1, _MAX_BARS // bars_of_lane))
    if num_lanes == topology.num_lanes:
        return _Window(range(stages), range(num_lanes))
    num_lanes = largest_power_of_two(num_lanes)
    first = _last_lane(timeline) // num_lanes * num_lanes
    return _Window(range(stages), range(first, min(first + num_lanes, topology.num_lanes)))


def _last_lane(timeline: Timeline) -> int:
    return int(timeline.ends_ns.max(axis=0).argmax())


def _draw(
    panel: Axes, timeline: Timeline, window: _Window, theme: Theme, factor: float, inches: tuple[float, float, float]
) -> set[int]:
    """Draw the bars and return their CP sizes, 0 for empty places."""
    end = timeline.makespan_s * factor
    for stage in window.stages:
        top = window.row(stage, window.lanes.start)
        add_rectangles(panel, [Rectangle(0, end, top, top + len(window.lanes))], theme.band, zorder=1)
    durations = durations_ns(timeline.grid, timeline.graph)
    bars: dict[tuple[int, bool], list[Rectangle]] = defaultdict(list)
    numbers: list[_Number] = []
    width_in, height_in, limit = inches
    pt_per_time, pt_per_row = _DATA_SHARE * width_in * 72 / limit, height_in * 72 / window.num_rows
    to_unit = factor / 1e9
    for index, (stage, operation) in enumerate(places_of(timeline.graph)):
        if stage not in window.stages:
            continue
        for bucket in timeline.plan.micro_batches[operation.micro_batch].buckets:
            first = max(bucket.first_lane, window.lanes.start)
            last = min(bucket.lanes.stop, window.lanes.stop)
            if first >= last:
                continue
            cp_size, forward = (bucket.cp_size if bucket.samples else 0), operation.kind == "F"
            start = (timeline.ends_ns[index, first] - durations[index, first]) * to_unit
            for ends_ns, lanes in _runs(timeline.ends_ns[index, first:last], first):
                stop, top = ends_ns * to_unit, window.row(stage, lanes.start)
                # A third of a point parts lanes that no group joins.
                gap = min(0.2, 0.35 / pt_per_row)
                bar = Rectangle(start, stop, top + gap, top + len(lanes) - gap)
                bars[cp_size, forward].append(bar)
                roomy = (stop - start) * pt_per_time > 5 + 4.2 * len(str(operation.micro_batch))
                if roomy and len(lanes) * pt_per_row > _NUMBER_PT + 1 and cp_size:
                    numbers.append(_Number(bar, str(operation.micro_batch), _ink_on(theme, cp_size, forward)))
    shown = [
        (theme.cp_color(cp_size, forward=forward) if cp_size else theme.empty, rectangles)
        for (cp_size, forward), rectangles in sorted(bars.items())
    ]
    _draw_bars(panel, shown, numbers, theme, linewidth=min(0.35, 0.12 * pt_per_row))
    return {cp_size for cp_size, _ in bars}


def _runs(ends_ns: Ints, first_lane: int) -> list[tuple[int, range]]:
    """Return (end, lanes) of neighbours that end together: one run, unless the lanes of a group take unequal times."""
    runs: list[tuple[int, range]] = []
    for lane, end_ns in enumerate(ends_ns.tolist(), start=first_lane):
        same = bool(runs) and runs[-1][0] == end_ns
        start = runs.pop()[1].start if same else lane
        runs.append((end_ns, range(start, lane + 1)))
    return runs


def _ink_on(theme: Theme, cp_size: int, forward: bool) -> str:
    """Return the text colour that contrasts more with the bar behind it."""
    index = min(cp_size.bit_length() - 1, len(theme.cp_sizes) - 1)
    return (theme.cp_inks_forward if forward else theme.cp_inks)[index]


def _describe(panel: Axes, name: str, timeline: Timeline, window: _Window, theme: Theme, width_in: float) -> None:
    split = timeline.split
    facts = f"{format_s(timeline.makespan_s)} · {split.bubble_fraction:.0%} idle"
    if width_in > 6:
        facts = f"{format_s(timeline.makespan_s)} · {counted(timeline.plan.num_microbatches, 'micro-batch')} · "
        facts += f"idle {split.bubble_fraction:.0%}"
        parts = (
            ("pipeline", split.pipeline_bubble_fraction),
            ("CP wait", split.cp_wait_fraction),
            ("DP wait", split.dp_wait_fraction),
        )
        named = ", ".join(f"{part} {value:.0%}" for part, value in parts if value >= 0.005)
        facts += f" ({named})" if named else ""
    facts = _left_out(window, timeline) + facts
    _name_rows(panel, name, facts, theme)
    panel.set_ylim(window.num_rows, -0.3)
    panel.tick_params(axis="x", length=3)
    _label_rows(panel, window, timeline)


def _name_rows(panel: Axes, name: str, facts: str, theme: Theme) -> None:
    panel.set_title(name, fontweight="bold", color=theme.ink, pad=5)
    panel.set_title(facts, loc="right", fontsize=SMALL_PT, color=theme.muted, pad=5)
    panel.spines[["left", "bottom"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _name_time(panels: Sequence[Axes], longest: float, unit: str) -> None:
    panels[0].set_xlim(0, longest * 1.004)
    panels[-1].set_xlabel(f"time since the start of the iteration ({unit})")


class _Number(NamedTuple):
    bar: Rectangle
    words: str
    color: str


def _draw_bars(
    panel: Axes,
    bars: Sequence[tuple[str, Sequence[Rectangle]]],
    numbers: Sequence[_Number],
    theme: Theme,
    *,
    linewidth: float,
) -> None:
    """Draw (colour, bars) pairs, and their numbers unless there are too many to be read."""
    for color, rectangles in bars:
        add_rectangles(panel, rectangles, color, edgecolor=theme.background, linewidth=linewidth, zorder=2)
    for bar, words, color in numbers if len(numbers) <= _MAX_NUMBERS else ():
        where = (bar.x0 + bar.x1) / 2, (bar.y0 + bar.y1) / 2
        number = panel.text(
            *where, words, ha="center", va="center_baseline", fontsize=_NUMBER_PT, color=color, clip_on=True, zorder=3
        )
        number.set_in_layout(False)  # measuring hundreds of texts would take most of the time


def _label_rows(panel: Axes, window: _Window, timeline: Timeline) -> None:
    lanes = window.lanes
    if timeline.plan.topology.pp_size > 1:
        stages = window.stages[:: -(-len(window.stages) // 8)]
        places = [window.row(stage, lanes.start) + len(lanes) / 2 for stage in stages]
        panel.set_yticks(places, [str(stage) for stage in stages])
        panel.set_ylabel("stage")
    else:
        name_cells(panel.yaxis, lanes, max(1, len(lanes) // 4))
        panel.set_ylabel("lane")


def _left_out(window: _Window, timeline: Timeline) -> str:
    """Return which places are drawn, if not all."""
    topology, lanes = timeline.plan.topology, window.lanes
    text = ""
    if len(window.stages) < topology.pp_size:
        text += f"stages 0–{window.stages[-1]} of {topology.pp_size} · "
    if len(lanes) < topology.num_lanes:
        which = f"lane {lanes.start}" if len(lanes) == 1 else f"lanes {lanes.start}–{lanes.stop - 1}"
        text += f"{which} of {topology.num_lanes} · "
    return text


def _mark_end(
    panel: Axes, end_s: float, longest_s: float, factor: float, window: _Window, theme: Theme, width_in: float
) -> None:
    panel.axvline(end_s * factor, color=theme.ink, linewidth=1.0, zorder=4)
    if (1 - end_s / longest_s) * _DATA_SHARE * width_in * 72 < _ARROW_PT:
        return
    middle = window.num_rows / 2
    arrow = {"arrowstyle": "<->", "color": theme.muted, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 2}
    panel.annotate("", (end_s * factor, middle), (longest_s * factor, middle), arrowprops=arrow)
    where = (end_s + longest_s) / 2 * factor, middle
    panel.annotate(
        f"{longest_s / end_s:.2f}x", where, (0, 4), textcoords="offset points", ha="center", va="bottom",
        fontweight="bold",
    )  # fmt: skip


def cp_legend(sizes: set[int], theme: Theme) -> list[tuple[str, str]]:
    """Return (label, colour) of CP sizes, ascending. The largest colour stands for all larger sizes, too; sizes that
    are no powers of two (placed buckets) have the colour of the next smaller one."""
    largest = 1 << (len(theme.cp_sizes) - 1)
    labels: dict[str, list[str]] = defaultdict(list)
    for size in sorted({min(size, largest) for size in sizes}):
        or_more = " or more" if size == largest and max(sizes) > largest else ""
        labels[theme.cp_color(size)].append(f"{size}{or_more}")
    return [(", ".join(of_color), color) for color, of_color in labels.items()]


def tick_gantt(pools: Sequence[tuple[str, PlannedTasks]], theme: Theme, *, width_in: float = WIDE_IN) -> Figure:
    """Return the picture of (policy, plan of a pool) pairs, one above the other: what each stage runs in each tick.

    A bar is a tick on a stage: from its first layer, at which all stages meet, to the end of what the stage does behind
    its last layer. Forward is muted, backward strong; a stage that only serves others is grey. Numbers are
    micro-batches, with chunks as in 1.3: chunk 1 of micro-batch 3.
    """
    heights = [min(2.5, max(0.9, 0.22 * pool.plan.topology.pp_size)) for _, pool in pools]
    figure, panels = stacked(width_in, heights, each_in=0.42, rest_in=1.05, sharex=True)
    longest_s = max(pool.makespan_s for _, pool in pools)
    factor, unit = time_unit(longest_s)
    for panel, (name, pool) in zip(panels, pools, strict=True):
        plan = pool.plan
        _draw_ticks(panel, pool, theme, factor, _DATA_SHARE * width_in * 72 / (longest_s * factor))
        number = counted(plan.num_microbatches, "micro-batch")
        facts = f"{format_s(pool.makespan_s)} · {number} · {len(pool.spans)} ticks"
        _name_rows(panel, name, facts, theme)
        name_cells(panel.yaxis, range(plan.topology.pp_size), 1)
        panel.set_ylim(plan.topology.pp_size, -0.1)
        panel.set_ylabel("stage")
        panel.axvline(pool.makespan_s * factor, color=theme.ink, linewidth=1.0, zorder=4)
    _name_time(panels, longest_s * factor, unit)
    entries = [("forward", theme.cp_color(1, forward=True)), ("backward", theme.cp_color(1))]
    add_legend(figure, [*entries, ("only serves", theme.empty), ("waits", theme.band)], width_in=width_in)
    return figure


def _draw_ticks(panel: Axes, pool: PlannedTasks, theme: Theme, factor: float, pt_per_time: float) -> None:
    plan = pool.plan
    topology, to_unit = plan.topology, factor / 1e9
    bars: dict[str, list[Rectangle]] = defaultdict(list)
    numbers: list[_Number] = []
    for span in pool.spans:
        forward = span.tick.kind == KINDS[0]
        for stage in range(topology.pp_size):
            unit = span.tick.unit(stage, topology.pp_size, topology.vp_size, plan.num_microbatches)
            start, stop = span.start_ns * to_unit, span.stage_ends_ns[stage] * to_unit
            color = theme.empty if unit is None else theme.cp_color(1, forward=forward)
            bar = Rectangle(start, stop, stage + _TICK_GAP, stage + 1 - _TICK_GAP)
            bars[color].append(bar)
            if unit is None:
                continue
            words = f"{unit.chunk}.{unit.micro_batch}" if topology.vp_size > 1 else str(unit.micro_batch)
            if (stop - start) * pt_per_time > 3 + 4.2 * len(words):
                ink = (theme.cp_inks_forward if forward else theme.cp_inks)[0]
                numbers.append(_Number(bar, words, ink))
    band = [
        Rectangle(0, pool.makespan_s * factor, stage + _TICK_GAP, stage + 1 - _TICK_GAP)
        for stage in range(topology.pp_size)
    ]
    add_rectangles(panel, band, theme.band, zorder=1)
    _draw_bars(panel, sorted(bars.items()), numbers, theme, linewidth=0.35)
