"""The HTML page of a training run: predicted against measured, CP sizes and loss, iteration by iteration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.decide.report.drawing import (
    DASHED,
    MEDIUM_IN,
    WIDE_IN,
    add_handles,
    add_legend,
    format_count,
    format_s,
    new_figure,
    time_unit,
)
from dynamic_cp.decide.report.gantt import cp_legend
from dynamic_cp.decide.report.page import picture, render
from dynamic_cp.decide.report.run import RunRecord
from dynamic_cp.decide.report.theme import Theme
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.serialize import format_cp_sizes
from dynamic_cp.types import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS, _MAX_POINTS, _MAX_COLUMNS = 100, 400, 200
_CLOSE = 0.1
_LABELS = (
    "iteration", "predicted", "measured", "measured / predicted", "loss", "micro-batches", "buckets by CP size",
    "padding", "imbalance", "planning", "exposed", "tokens",
)  # fmt: skip


def render_run_report(
    records: Sequence[RunRecord], *, command: str = "", inputs: Mapping[str, Any] | None = None
) -> str:
    """Return the page of a run as one self-contained HTML document; it shows `command` and `inputs` as they are.
    InvalidInputError: there are no records; UnsupportedFeatureError: matplotlib or jinja2 is not installed."""
    if not records:
        raise InvalidInputError("0 iterations are given, a report needs at least 1: did the run get that far?")
    steady = records[1:] or records  # the first one loads and compiles
    tokens = sum(one.tokens or 0 for one in records)
    first, last = records[0].iteration, records[-1].iteration
    facts = [f"iteration {first}" if first == last else f"iterations {first} to {last}"]
    facts += [f"{format_count(tokens)} tokens"] * (tokens > 0)
    return render(
        "run_page.html",
        title="Training with dynamic context parallelism",
        facts=" · ".join(facts),
        command=command,
        inputs=inputs or {},
        **_summary(steady, len(records) - len(steady)),
        numbers=_numbers(records, steady),
        pictures=_pictures(records),
        **_table(records),
    )


def _summary(steady: Sequence[RunRecord], num_left_out: int) -> dict[str, str]:
    # The summary that a run prints at its end computes the same.
    typical = sum(one.measured_s for one in steady) / sum(one.predicted_s for one in steady)
    spread = statistics.median(abs(one.measured_over_predicted / typical - 1) for one in steady)
    close = abs(typical - 1) <= _CLOSE
    if close:
        headline = f"Iterations take {typical:.2f}× the predicted time: the cost model fits this device."
    else:
        word = "longer" if typical > 1 else "shorter"
        headline = f"Iterations take {typical:.3g}× the predicted time, {word} than the cost model of this device says."
    reason = f"Over {counted(len(steady), 'iteration')} together; half of them are within {spread:.1%} of it."
    if num_left_out:
        reason += " The first one is left out: it loads and compiles."
    if not close and spread <= _CLOSE:
        reason += " The factor is nearly the same for all, so the choice among plans suffers little."
    elif not close:
        reason += " The factor differs from batch to batch, so better plans may exist: calibrate the hardware file."
    exposed = [one.exposed_s for one in steady if one.exposed_s is not None]
    if exposed:
        share = sum(exposed) / sum(one.measured_s for one in steady if one.exposed_s is not None)
        reason += f" Training waited for the planner {share:.2%} of the time."
    return {"state": "yes" if close else "unclear", "headline": headline, "reason": reason}


def _numbers(records: Sequence[RunRecord], steady: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return (name, value) of the figures at the top."""
    measured_s = sum(one.measured_s for one in steady)
    numbers = [
        ("measured, mean", format_s(measured_s / len(steady))),
        ("predicted, mean", format_s(sum(one.predicted_s for one in steady) / len(steady))),
    ]
    if all(one.tokens is not None for one in steady):
        numbers.append(("tokens per second", format_count(sum(one.tokens or 0 for one in steady) / measured_s)))
    known = [one.loss for one in records if one.loss is not None]
    if known:
        numbers.append(("loss, first → last", f"{known[0]:.4f} → {known[-1]:.4f}"))
    for name, label, form in (("imbalance", "imbalance, mean", "{:.3f}"), ("padding", "padding, mean", "{:.2%}")):
        values = [value for one in steady if (value := getattr(one, name)) is not None]
        if values:
            numbers.append((label, form.format(sum(values) / len(values))))
    planning = [one.planner_s for one in steady if one.planner_s is not None]
    if planning:
        numbers.append(("planning, mean", format_s(sum(planning) / len(planning))))
    return numbers


def _pictures(records: Sequence[RunRecord]) -> list[Any]:
    pictures = [
        picture(
            partial(times, records), name="times", title="Time of an iteration", width_in=WIDE_IN,
            caption="Batches differ in length, so iterations do; the two curves should move together.",
        ),
        picture(
            partial(agreement, records), name="agreement", title="Measured against predicted", width_in=MEDIUM_IN,
            caption="A dot per iteration; on the dashed line both are equal.",
        ),
    ]  # fmt: skip
    if any(one.cp_histogram for one in records):
        caption = "Share of buckets of each CP size; what is not 1 holds the long samples."
        pictures.append(
            picture(partial(cp_sizes, records), name="cp-sizes", title="CP sizes", width_in=MEDIUM_IN, caption=caption)
        )
    if any(one.loss is not None for one in records):
        caption = "Mean per token, as trained: plans do not change it."
        pictures.append(
            picture(partial(losses, records), name="loss", title="Loss", width_in=MEDIUM_IN, caption=caption)
        )
    return pictures


def _table(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the rows of at most _MAX_ROWS iterations, and a note on which they are."""
    step = -(-len(records) // _MAX_ROWS)
    shown = records[::step]
    note = counted(len(records), "iteration") if step == 1 else f"1 in {step} of {len(records)} iterations"
    return {"labels": _LABELS, "rows": [_row(one) for one in shown], "row_note": note}


def _row(one: RunRecord) -> list[str]:
    def known(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        str(one.iteration),
        format_s(one.predicted_s),
        format_s(one.measured_s),
        f"{one.measured_over_predicted:.2f}",
        known(one.loss, "{:.4f}"),
        known(one.num_microbatches, "{}"),
        format_cp_sizes(one.cp_histogram),
        known(one.padding, "{:.2%}"),
        known(one.imbalance, "{:.3f}"),
        "" if one.planner_s is None else format_s(one.planner_s),
        "" if one.exposed_s is None else format_s(one.exposed_s),
        "" if one.tokens is None else format_count(one.tokens),
    ]


def times(records: Sequence[RunRecord], theme: Theme, *, width_in: float = WIDE_IN) -> Figure:
    """Return the picture of measured and predicted seconds over the iterations; a long run shows every n-th.
    InvalidInputError: there are no records."""
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
    # One slow iteration, such as the first, which compiles, must not flatten all others.
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
    panel.plot(ends, ends, color=theme.muted, linewidth=1, linestyle=DASHED)
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
    """Return the picture of the shares of CP sizes among buckets over the iterations; a long run shows means of
    several. InvalidInputError: no record has a CP histogram."""
    known = [one for one in records if one.cp_histogram]
    if not known:
        raise InvalidInputError("0 records have a cp_histogram, at least 1 is needed: was it a dynamic-CP run?")
    sizes = sorted({size for one in known for size in one.cp_histogram})
    counts = np.array([[one.cp_histogram.get(size, 0) for size in sizes] for one in known], np.float64)
    starts = np.arange(0, len(known), -(-len(known) // _MAX_COLUMNS))
    counts = np.add.reduceat(counts, starts, axis=0)
    shares = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    numbers = [known[start].iteration for start in starts.tolist()]
    edges = np.array([*numbers, known[-1].iteration + 1]) - 0.5  # an iteration is as wide as 1, around its number
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
    """Return the picture of the loss over the iterations; InvalidInputError: no record has a loss."""
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
    panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    spare = 0.02 * (numbers[-1] - numbers[0]) or 0.5
    panel.set_xlim(numbers[0] - spare, numbers[-1] + spare)
    panel.set_xlabel("iteration")
    panel.set_ylabel(label)
