"""Pictures of a training run: predicted against measured, CP sizes and loss over its iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.report.drawing import MEDIUM_IN, WIDE_IN, add_handles, add_legend, new_figure, time_unit
from dynamic_cp.report.gantt import cp_legend
from dynamic_cp.report.run import RunRecord
from dynamic_cp.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 400
_MAX_COLUMNS = 200


def times(records: Sequence[RunRecord], theme: Theme, *, width_in: float = WIDE_IN) -> Figure:
    """Return the picture of measured and predicted seconds over the iterations; a long run shows every n-th.

    Raises:
        InvalidInputError: there are no records.
    """
    shown = _thinned(records)
    figure = new_figure(width_in, 2.9)
    panel = figure.subplots()
    factor, unit = time_unit(float(np.median([one.measured_s for one in shown])))
    number = [one.iteration for one in shown]
    marker = "o" if len(shown) <= 40 else None
    measured = [one.measured_s * factor for one in shown]
    predicted = [one.predicted_s * factor for one in shown]
    # The broad line lies below, so that both are seen where they agree.
    broad, thin = theme.series_color(1), theme.series_color(0)
    panel.plot(number, measured, color=broad, linewidth=3, alpha=0.55, label="measured", marker=marker, markersize=6)
    panel.plot(number, predicted, color=thin, linewidth=1, label="predicted", marker=marker, markersize=2.5)
    highest = max(max(one.predicted_s, one.measured_s) for one in shown)
    # One slow iteration (the first compiles) must not flatten all others.
    usual = float(np.percentile([max(one.predicted_s, one.measured_s) for one in shown], 98))
    panel.set_ylim(0, 1.08 * factor * (highest if highest < 2 * usual else 1.5 * usual))
    _over_iterations(panel, f"time of an iteration ({unit})", number)
    add_handles(figure, panel.lines, width_in=width_in)
    return figure


def agreement(records: Sequence[RunRecord], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of measured against predicted seconds, a dot per iteration; on the diagonal they are equal."""
    shown = _thinned(records)
    figure = new_figure(width_in, 3.1)
    panel = figure.subplots()
    predicted, measured = np.array([(one.predicted_s, one.measured_s) for one in shown]).T
    factor, unit = time_unit(float(np.median(measured)))
    low, high = factor * min(predicted.min(), measured.min()), factor * max(predicted.max(), measured.max())
    ends = (low / 1.1, high * 1.1)
    panel.plot(ends, ends, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
    panel.scatter(predicted * factor, measured * factor, s=14, color=theme.series_color(1), alpha=0.6, linewidths=0)
    if high > 10 * low:
        _use_logarithms(panel)
    panel.set_xlim(ends)
    panel.set_ylim(ends)
    panel.grid()
    panel.set_xlabel(f"predicted ({unit})")
    panel.set_ylabel(f"measured ({unit})")
    return figure


def cp_sizes(records: Sequence[RunRecord], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of the CP sizes of buckets over the iterations, as shares; a long run shows means of several.

    Raises:
        InvalidInputError: no record has a CP histogram.
    """
    known = [one for one in records if one.cp_histogram]
    if not known:
        raise InvalidInputError("0 records have a cp_histogram, at least 1 is needed: was it a dynamic-CP run?")
    sizes = sorted({size for one in known for size in one.cp_histogram})
    counts = np.array([[one.cp_histogram.get(size, 0) for size in sizes] for one in known], np.float64)
    starts = np.arange(0, len(known), -(-len(known) // _MAX_COLUMNS))
    counts = np.add.reduceat(counts, starts, axis=0)
    shares = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    numbers = [known[start].iteration for start in starts.tolist()]
    edges = np.array([*numbers, known[-1].iteration + 1], np.float64)
    figure = new_figure(width_in, 3.0)
    panel = figure.subplots()
    bottom = np.zeros(len(starts))
    for index, size in enumerate(sizes):
        panel.stairs(bottom + shares[:, index], edges, baseline=bottom, fill=True, color=theme.cp_color(size))
        bottom = bottom + shares[:, index]
    panel.set_ylim(0, 100)
    _over_iterations(panel, "buckets (%)", edges)
    panel.grid(visible=False)
    add_legend(figure, cp_legend(set(sizes), theme), width_in=width_in, title="CP size")
    return figure


def losses(records: Sequence[RunRecord], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of the loss over the iterations.

    Raises:
        InvalidInputError: no record has a loss.
    """
    shown = _thinned([one for one in records if one.loss is not None])
    figure = new_figure(width_in, 2.8)
    panel = figure.subplots()
    marker = "o" if len(shown) <= 40 else None
    numbers, values = [one.iteration for one in shown], [one.loss or 0.0 for one in shown]
    panel.plot(numbers, values, color=theme.series_color(2), linewidth=1.4, marker=marker, markersize=3.5)
    _over_iterations(panel, "loss (mean per token)", numbers)
    return figure


def _thinned(records: Sequence[RunRecord]) -> Sequence[RunRecord]:
    if not records:
        raise InvalidInputError("0 records are given, a picture needs at least 1: did the run get that far?")
    return records[:: -(-len(records) // _MAX_POINTS)]


def _use_logarithms(panel: Axes) -> None:
    """Make both axes logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _over_iterations(panel: Axes, label: str, numbers: Sequence[float] | NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.grid()
    panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    spare = 0.02 * (numbers[-1] - numbers[0]) or 0.5
    panel.set_xlim(numbers[0] - spare, numbers[-1] + spare)
    panel.set_xlabel("iteration")
    panel.set_ylabel(label)
