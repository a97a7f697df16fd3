"""The HTML report of a training run: predicted against measured, iteration by iteration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.serialize import format_cp_sizes
from dynamic_cp.report.drawing import MEDIUM_IN, WIDE_IN, format_count, format_s
from dynamic_cp.report.files import write_whole
from dynamic_cp.report.page import picture, render
from dynamic_cp.report.run import RunRecord
from dynamic_cp.report.run_pictures import agreement, cp_sizes, losses, times

_MAX_ROWS = 100
_CLOSE = 0.1
_LABELS = (
    "iteration", "predicted", "measured", "measured / predicted", "loss", "micro-batches", "buckets by CP size",
    "padding", "imbalance", "planning", "exposed", "tokens",
)  # fmt: skip


def render_run_report(
    records: Sequence[RunRecord], *, command: str = "", inputs: Mapping[str, Any] | None = None
) -> str:
    """Return the page of a run as one self-contained HTML document.

    Args:
        records: of `read_run`, at least one.
        command: what to type to get the page again.
        inputs: name -> value, shown as they are.

    Raises:
        InvalidInputError: there are no records.
        UnsupportedFeatureError: matplotlib or jinja2 is not installed.
    """
    if not records:
        raise InvalidInputError("0 iterations are given, a report needs at least 1: did the run get that far?")
    steady = records[1:] or records  # the first one loads and compiles
    tokens = sum(one.tokens or 0 for one in records)
    first, last = records[0].iteration, records[-1].iteration
    facts = [f"iteration {first}" if first == last else f"iterations {first} to {last}"]
    facts += [f"{format_count(tokens)} tokens"] * (tokens > 0)
    return render(
        "run.html",
        title="Training with dynamic context parallelism",
        facts=" · ".join(facts),
        command=command,
        inputs=inputs or {},
        **_summary(steady, len(records) - len(steady)),
        numbers=_numbers(records, steady),
        pictures=_pictures(records),
        **_table(records),
    )


def write_run_report(
    path: str | Path, records: Sequence[RunRecord], *, command: str = "", inputs: Mapping[str, Any] | None = None
) -> None:
    """Write `render_run_report(...)` to `path`, whole or not at all.

    Raises:
        InvalidInputError: no records, or a place that cannot be written.
        UnsupportedFeatureError: matplotlib or jinja2 is not installed.
    """
    write_whole(path, render_run_report(records, command=command, inputs=inputs).encode())


def _summary(steady: Sequence[RunRecord], num_left_out: int) -> dict[str, str]:
    # As in the summary at the end of a run.
    typical = sum(one.measured_s for one in steady) / sum(one.predicted_s for one in steady)
    spread = statistics.median(abs(one.measured_over_predicted / typical - 1) for one in steady)
    close = abs(typical - 1) <= _CLOSE
    if close:
        headline = f"Iterations take {typical:.2f}× the predicted time: the cost model fits this device."
    else:
        word = "longer" if typical > 1 else "shorter"
        headline = f"Iterations take {typical:.3g}× the predicted time, {word} than the cost model of this device says."
    reason = f"Over {_counted(len(steady))} together; half of them are within {spread:.1%} of it."
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


def _counted(number: int) -> str:
    return f"{number} iteration{'' if number == 1 else 's'}"


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
        numbers.append(("loss, first → last", f"{known[0]:.2f} → {known[-1]:.2f}"))
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
    """Return rows of some iterations, and which they are."""
    step = -(-len(records) // _MAX_ROWS)
    shown = records[::step]
    note = _counted(len(records)) if step == 1 else f"1 in {step} of {len(records)} iterations"
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
