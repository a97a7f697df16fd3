"""Busy seconds of every lane, sorted: how evenly policies share the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp.report.drawing import FONT_PT, MEDIUM_IN, SMALL_PT, format_s, new_figure, time_unit
from dynamic_cp.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_POINTS = 512


def imbalance(
    lane_busy_s: Sequence[tuple[str, Sequence[float]]],
    theme: Theme,
    *,
    width_in: float = MEDIUM_IN,
    title: str = "",
) -> Figure:
    """Return the picture of (policy, busy seconds of each lane) pairs: lanes from busiest to idlest, means dashed.

    `Timeline.lane_busy_s` has the seconds. Beyond 512 lanes a curve goes through 512 of them, ends included.
    """
    figure = new_figure(width_in, 2.9 + 0.2 * len(lane_busy_s) + (0.3 if title else 0.0))
    panel = figure.subplots()
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_PT + 2, fontweight="bold")
    longest_s = max(max(busy_s) for _, busy_s in lane_busy_s)
    factor, unit = time_unit(longest_s)
    for index, (name, busy_s) in enumerate(lane_busy_s):
        ordered = np.sort(np.asarray(busy_s, np.float64))[::-1]
        mean_s = float(ordered.mean())
        color = theme.series_color(index)
        points = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_POINTS)).round().astype(int))
        # A lane is a step from its place to the next; one lane alone is a line as well.
        places = np.append(points, len(ordered)) / len(ordered) * 100
        heights = np.append(ordered[points], ordered[-1]) * factor
        ratio = ordered[0] / mean_s if mean_s else 1.0
        label = f"{name}: busiest {format_s(ordered[0])}, mean {format_s(mean_s)}, max/mean {ratio:.2f}"
        panel.step(places, heights, where="post", color=color, linewidth=1.8, label=label)
        panel.axhline(mean_s * factor, color=color, linewidth=1, linestyle=(0, (4, 3)))
    panel.set_ylim(0, 1.08 * longest_s * factor or 1)
    panel.set_xlim(0, 100)
    panel.grid(axis="y")
    lanes = {len(busy_s) for _, busy_s in lane_busy_s}
    of = f" of {lanes.pop()}" if len(lanes) == 1 else ""
    panel.set_xlabel(f"lanes{of}, from busiest to idlest (%)")
    panel.set_ylabel(f"busy time of a lane ({unit})")
    figure.legend(loc="outside lower left", ncols=1, handlelength=1.4, fontsize=SMALL_PT)
    return figure
