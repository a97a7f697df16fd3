"""Draws measured against fitted: layers by tokens, attention by length, and every number against its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp.decide.calibration.measurements import Calibration, Point, Setup
from dynamic_cp.decide.report.drawing import FONT_PT, SMALL_PT, WIDE_IN, add_handles, format_tokens, new_figure, save
from dynamic_cp.decide.report.theme import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_HEIGHT_IN = 3.5
_BAND = 0.1
_MARKERS = {"forward": "o", "backward": "s", "both": "D"}
_LABELS = {
    "linear": "layer without attention",
    "causal": "attention, causal",
    "full": "ring step, no mask",
    "ring": "whole ring, a check",
    "edges": "head and loss",
    "links": "links",
    "buckets": "tiny micro-batch",
    "packs": "random packs",
    "held_out": "other packs, a check",
}
"""Section -> its name in the legend; colours follow this order."""


def _color(section: str, theme: Theme) -> str:
    return theme.ink if section == "held_out" else theme.series_color(list(_LABELS).index(section))


def save_picture(path: str, setup: Setup, calibration: Calibration) -> None:
    """Write the picture to `path` (.svg or .png). InvalidInputError: another ending, or a place that cannot be written;
    UnsupportedFeatureError: matplotlib is not installed."""
    save(path, partial(measured_against_fitted, setup, calibration), LIGHT)


def measured_against_fitted(setup: Setup, calibration: Calibration, theme: Theme) -> Figure:
    """Return the picture of a calibration: dots are measured, lines are the cost model with the new coefficients."""
    figure = new_figure(WIDE_IN, _HEIGHT_IN)
    ranks = "" if setup.num_ranks == 1 else f", {setup.num_ranks} ranks at once"
    figure.suptitle(f"{setup.device}{ranks}, {setup.date}", x=0.01, ha="left", fontsize=FONT_PT + 1, fontweight="bold")
    layers, attention, everything = figure.subplots(1, 3)
    _draw_curves(layers, _points(calibration, ("linear",)), theme)
    layers.set_title("Layer without attention")
    layers.set_xlabel("tokens")
    layers.set_ylabel("ms")
    _draw_curves(attention, _points(calibration, ("causal", "full"), single=True), theme)
    attention.set_title("Attention of one sequence")
    attention.set_xlabel("tokens of a rank")
    attention.set_ylabel("ms")
    _draw_all(everything, calibration.points, theme)
    everything.set_title("Predicted / measured (%)")
    _add_legend(figure, calibration, theme)
    return figure


def _points(calibration: Calibration, sections: Sequence[str], *, single: bool = False) -> list[Point]:
    return [
        one
        for one in calibration.points
        if one.measurement.section in sections and (not single or len(one.measurement.seqlens) == 1)
    ]


def _draw_curves(panel: Axes, points: Sequence[Point], theme: Theme) -> None:
    for section in sorted({one.measurement.section for one in points}):
        color = _color(section, theme)
        for direction, marker in _MARKERS.items():
            chosen = sorted(
                (one for one in points if one.measurement.section == section and one.direction == direction),
                key=lambda one: one.measurement.tokens,
            )
            if not chosen:
                continue
            tokens = [one.measurement.tokens for one in chosen]
            filled = color if direction == "forward" else theme.background
            panel.plot(tokens, [1e3 * one.predicted_s for one in chosen], color=color, linewidth=1.2)
            panel.plot(
                tokens, [1e3 * one.measured_s for one in chosen], linestyle="none", marker=marker, markersize=4.2,
                color=color, markerfacecolor=filled,
            )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({one.measurement.tokens for one in points})
    _plain_numbers(panel.yaxis)
    shown = ticks[:: -(-len(ticks) // 4)]
    panel.set_xticks(shown, [format_tokens(tokens) for tokens in shown])
    panel.minorticks_off()
    panel.grid()


def _draw_all(panel: Axes, points: Sequence[Point], theme: Theme) -> None:
    """Draw predicted / measured of every number: a flat band is easier to judge than a diagonal."""
    measured = [1e3 * one.measured_s for one in points]
    low, high = min(measured) / 1.6, max(measured) * 1.6
    panel.axhspan(100 - 100 * _BAND, 100 + 100 * _BAND, color=theme.band, zorder=0)
    panel.axhline(100, color=theme.muted, linewidth=0.8)
    for name in _LABELS:
        chosen = [one for one in points if one.measurement.section == name]
        is_check = name == "held_out"
        panel.plot(
            [1e3 * one.measured_s for one in chosen],
            [100 * one.predicted_s / one.measured_s for one in chosen],
            linestyle="none", marker=_MARKERS["both"] if is_check else ".", markersize=5.0 if is_check else 4.0,
            color=_color(name, theme), zorder=4 if is_check else 3,
            alpha=1.0 if is_check else 0.75,
        )  # fmt: skip
    ratios = np.array([one.predicted_s / one.measured_s for one in points])
    reach = max(0.3, min(1.0, float(np.percentile(np.abs(ratios - 1), 97)) * 1.15))
    panel.set_ylim(100 - 100 * reach, 100 + 100 * reach)
    panel.set_xlim(low, high)
    panel.set_xscale("log")
    _plain_numbers(panel.xaxis)
    panel.minorticks_off()
    panel.set_xlabel("measured (ms)")
    # Above the panel, because dots would cover it inside.
    panel.set_title(f"band: ±{_BAND:.0%}", loc="right", color=theme.muted, fontsize=SMALL_PT)
    panel.grid(axis="y")


def _plain_numbers(axis: Axis) -> None:
    """Label powers of ten, at most five; on an axis of less than two powers of ten also 2 and 5 times each."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    least, most = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if most < 100 * least else (1.0,), numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _add_legend(figure: Figure, calibration: Calibration, theme: Theme) -> None:
    from matplotlib.lines import Line2D

    def dot(label: str, color: str, marker: str, face: str) -> Line2D:
        return Line2D(
            [], [], linestyle="none", marker=marker, color=color, markerfacecolor=face, markersize=4.5, label=label
        )

    present = {one.measurement.section for one in calibration.points}
    handles = [
        dot(label, _color(name, theme), _MARKERS["both"] if name == "held_out" else "o", _color(name, theme))
        for name, label in _LABELS.items()
        if name in present
    ]
    handles += [dot("forward", theme.muted, "o", theme.muted), dot("backward", theme.muted, "s", theme.background)]
    handles.append(Line2D([], [], color=theme.muted, linewidth=1.2, label="cost model"))
    add_handles(figure, handles, width_in=WIDE_IN)
