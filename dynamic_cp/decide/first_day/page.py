"""The page of a first day: predicted beside measured, as Markdown that needs no other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from dynamic_cp.decide.calibration import Measurements, calibrate
from dynamic_cp.decide.first_day.day import PARTS, PICTURE, POLICIES, Day, State, measurements_of
from dynamic_cp.decide.report.run import read_run
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.models.hardware_numbers import KIND_OF
from dynamic_cp.types import Hardware

NUM_WARM_UP = 2
"""First steps that do not count, because loading and compiling are not predicted."""
_OF_ERRORS = ("what", "where", "largest error in norm", "allowed")
_OF_FITS = ("part", "", "numbers", "median error", "p95", "predicted / measured")


def page_of(day: Day, device: str, states: Mapping[str, State]) -> str:
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
    lines = [
        *(f"# First day on {device}", "", about, ""),
        *_section("Parts", ("part", "what it is", "result", "seconds"), parts),
        *_section("Steps and memory", ("", "predicted", "measured", "measured / predicted"), _steps(day, ended)),
        *_section("Kernels", _OF_ERRORS, _errors(day, "kernels", states)),
        *_section("Exchanges", _OF_ERRORS, _errors(day, "exchanges", states)),
        *(_calibration(day) if "calibration" in ended else ()),
    ]
    return "\n".join(lines)


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; nothing if it has no rows."""
    found = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    if found:
        yield from (f"## {title}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *found, "")


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
        yield _compared(f"a step with {names[policy]}", predicted, measured, "{:.3g} s")
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
        error = f"{row['error']:.2g} " if "error" in row else ""
        yield row["what"], row["where"], (error + row.get("why", "")).strip(), f"{row['allowed']:.2g}"


def _calibration(day: Day) -> Iterator[str]:
    """Yield how well the coefficients fit, and each coefficient beside its old value."""
    base = load_hardware(day.hardware)
    found = calibrate(base, Measurements.load(measurements_of(day)), name=day.measured_hardware.stem)
    errors = (
        (
            *(one.name, "fitted" if one.fitted else "check", str(one.num_points)),
            *(f"{one.median:.1%}", f"{one.p95:.1%}", f"{one.predicted_over_measured:.3f}"),
        )
        for one in found.errors
    )
    yield from _section("Calibration", _OF_FITS, errors)
    if wrong := found.why_not_good():
        yield from (f"**Not good yet**: {wrong}.", "")
    if (day.folder / PICTURE).exists():
        yield from (f"![Measured times, and the cost model's]({PICTURE})", "")
    changed = ((name, *(_number(values, name) for values in (base, found.hardware))) for name in found.changed)
    yield from _section(f"Hardware file {day.measured_hardware}", ("number", day.hardware, "measured"), changed)


def _number(values: Hardware, name: str) -> str:
    """Return a number of a hardware file as text; a rate of 0 was measured by nobody."""
    value, kind = getattr(values, name), KIND_OF[name]
    return "not measured" if not value and kind.unit.endswith("/s") else kind.describe(value)
