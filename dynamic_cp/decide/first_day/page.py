"""The page of a first day: predicted beside measured, as Markdown that needs no other file, and as HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from dynamic_cp.decide.calibration import Measurements, calibrate
from dynamic_cp.decide.calibration.picture import measured_against_fitted
from dynamic_cp.decide.first_day.day import PARTS, PICTURE, POLICIES, Day, State, measurements_of
from dynamic_cp.decide.report.drawing import format_s, inline_svg
from dynamic_cp.decide.report.page import render
from dynamic_cp.decide.report.run import read_run
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.models.hardware_numbers import KIND_OF
from dynamic_cp.types import Hardware

NUM_WARM_UP = 2
"""First steps that do not count, because loading and compiling are not predicted."""
_OF_ERRORS = ("what", "where", "largest error in norm", "allowed")
_OF_FITS = ("part", "", "numbers", "median error", "p95", "predicted / measured")
_ALT = "Measured times, and the cost model's"


class Section(NamedTuple):
    """A table, and what is said below it; `picture` draws an SVG element, None: there is none."""

    title: str
    labels: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    picture: Callable[[], str] | None = None


class Page(NamedTuple):
    """What both forms of the page show."""

    title: str
    about: str
    sections: Sequence[Section]

    def as_markdown(self) -> str:
        """Return the page as Markdown; its picture is the file beside it."""
        lines = [f"# {self.title}", "", self.about, ""]
        for one in self.sections:
            rows = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in one.rows)
            head = f"| {' | '.join(one.labels)} |", f"|{' --- |' * len(one.labels)}"
            lines += [f"## {one.title}", "", *head, *rows, ""]
            lines += [f"**{one.note}**", ""] * bool(one.note)
            lines += [f"![{_ALT}]({PICTURE})", ""] * (one.picture is not None)
        return "\n".join(lines)

    def as_html(self, command: str) -> str:
        """Return the page as one HTML document; UnsupportedFeatureError: jinja2 is not installed."""
        return render(
            "first_day_page.html",
            title=self.title,
            facts=self.about,
            command=command,
            inputs={},
            sections=self.sections,
        )


def page_of(day: Day, device: str, states: Mapping[str, State]) -> Page:
    """Return the page of the parts that ran, now or earlier; `device` is the name of the device."""
    ended = {name for name, state in states.items() if not state.why}
    about = (
        f"{date.today().isoformat()}, {day.num_ranks} ranks, TP {day.tp_size}, {day.model} with "
        f"{day.trained.num_layers} layers, {day.num_samples} samples a step of up to {day.longest} tokens, "
        f"{day.max_tokens} tokens per rank. Calibration started from {day.hardware}."
    )
    parts = (
        (name, PARTS[name], f"failed: {state.why}" if state.why else "ok", f"{state.seconds:.0f}")
        for name, state in states.items()
    )
    found = (
        *_section("Parts", ("part", "what it is", "result", "seconds"), parts),
        *_section("Steps and memory", ("", "predicted", "measured", "measured / predicted"), _steps(day, ended)),
        *_section("Kernels", _OF_ERRORS, _errors(day, "kernels", states)),
        *_section("Exchanges", _OF_ERRORS, _errors(day, "exchanges", states)),
        *(_calibration(day) if "calibration" in ended else ()),
    )
    return Page(f"First day on {device}", about, found)


def _section(title: str, labels: Sequence[str], rows: Iterable[Sequence[str]], **more: Any) -> Iterator[Section]:
    """Yield a section; nothing if it has no rows."""
    if found := list(rows):
        yield Section(title, labels, found, **more)


def _steps(day: Day, ended: set[str]) -> Iterator[Sequence[str]]:
    """Yield mean seconds of a step in each run, the gain of dynamic CP, what disturbed the runs, and peak memory."""
    names = {"static": f"static CP {day.static_cp_size}", "dynamic": "dynamic CP"}
    seconds: dict[str, tuple[float, float]] = {}
    rest: list[Sequence[str]] = []
    for policy in POLICIES:
        if policy not in ended:
            continue
        records = read_run(day.folder / policy)
        counted = records[NUM_WARM_UP:] or records
        predicted = sum(one.predicted_s for one in counted) / len(counted)
        measured = sum(one.measured_s for one in counted) / len(counted)
        seconds[policy] = predicted, measured
        what = f"a step with {names[policy]}"
        yield what, format_s(predicted), format_s(measured), f"{measured / predicted:.2f}"
        if known := [one.share_of_others for one in counted if one.share_of_others is not None]:
            share = f"{sum(known) / len(known):.0%}"
            rest.append((f"cores that other processes took from {names[policy]}", "0%", share, ""))
        if peak := max(one.peak_bytes or 0 for one in records):
            rest.append(_compared(f"memory with {names[policy]}", day.peak_bytes / 1e9, peak / 1e9, "{:.1f} GB"))
    if len(seconds) == len(POLICIES):
        predicted, measured = (static / dynamic for static, dynamic in zip(*seconds.values(), strict=True))
        yield _compared("dynamic CP is faster", predicted, measured, "{:.2f} times")
    yield from rest


def _compared(what: str, predicted: float, measured: float, form: str) -> Sequence[str]:
    return what, form.format(predicted), form.format(measured), f"{measured / predicted:.2f}"


def _errors(day: Day, part: str, states: Mapping[str, State]) -> Iterator[Sequence[str]]:
    path = day.folder / f"{part}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_bytes()) if part in states and path.exists() else []
    for row in rows:
        error = f"{row['error']:.1e} " if "error" in row else ""
        yield row["what"], row["where"], (error + row.get("why", "")).strip(), f"{row['allowed']:.2g}"


def _calibration(day: Day) -> Iterator[Section]:
    """Yield how well the coefficients fit, and each coefficient beside its old value."""
    base, measured = load_hardware(day.hardware), Measurements.load(measurements_of(day))
    found = calibrate(base, measured, name=day.measured_hardware.stem)
    errors = (
        (
            *(one.name, "fitted" if one.fitted else "check", str(one.num_points)),
            *(f"{one.median:.1%}", f"{one.p95:.1%}", f"{one.predicted_over_measured:.3f}"),
        )
        for one in found.errors
    )
    draw = partial(measured_against_fitted, measured.setup, found)
    is_drawn, wrong = (day.folder / PICTURE).exists(), found.why_not_good()
    picture = partial(inline_svg, draw, name="calibration", label=_ALT) if is_drawn else None
    note = f"Not good yet: {wrong}." if wrong else ""
    yield from _section("Calibration", _OF_FITS, errors, note=note, picture=picture)
    numbers = (name for name in found.changed if getattr(base, name) != getattr(found.hardware, name))
    changed = ((name, *(_number(values, name) for values in (base, found.hardware))) for name in numbers)
    yield from _section(f"Hardware file {day.measured_hardware}", ("number", day.hardware, "measured"), changed)


def _number(values: Hardware, name: str) -> str:
    """Return a number of a hardware file as text; a rate of 0 was measured by nobody."""
    value, kind = getattr(values, name), KIND_OF[name]
    return "not measured" if not value and kind.unit.endswith("/s") else kind.describe(value)
