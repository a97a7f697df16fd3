"""Table D: how planning time grows with samples and lanes, the largest memory, and a plot; planning over a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.planner.problem import Problem, peak_bytes, plan_ms, timed
from benchmarks.planner.report import Row, table
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.types import CP_COMM_TYPES, CpCommType, PlanOptions, Topology

LIMIT = 16384
FIT_FROM = 2048
"""Samples or lanes from which on the exponent is fitted; below, fixed costs weigh too much."""


class Series(NamedTuple):
    """Points (samples, lanes) of one curve; `grows` names what the exponent is of."""

    name: str
    pp: int
    grows: str
    points: tuple[tuple[int, int], ...]


def series(largest_samples: int = 131072, largest_lanes: int = 16384) -> list[Series]:
    """Return the curves, each doubling from point to point."""
    samples = [256 << step for step in range((largest_samples // 256).bit_length())]
    lanes = [8 << step for step in range((largest_lanes // 8).bit_length())]
    fixed = min(largest_samples, 32768)
    curves = []
    for pp, num_lanes in ((1, 64), (8, 32)):
        share = 2048 // num_lanes
        curves += [
            Series(f"PP {pp}, {num_lanes} lanes", pp, "samples", tuple((count, num_lanes) for count in samples)),
            Series(
                f"PP {pp}, {share} samples a lane", pp, "samples",
                tuple((count, count // share) for count in samples if count // share >= 8),
            ),
            Series(f"PP {pp}, 8 samples a lane", pp, "lanes", tuple((8 * count, count) for count in lanes)),
            Series(f"PP {pp}, {fixed} samples", pp, "lanes", tuple((fixed, count) for count in lanes)),
        ]  # fmt: skip
    return curves


def measure(curves: Sequence[Series]) -> list[Row]:
    """Return a row for each curve; points are [samples, lanes, milliseconds]."""
    rows = []
    for curve in curves:
        points = []
        for samples, lanes in curve.points:
            problem = _problem(samples, lanes, curve.pp)
            # Large ones once: the small ones of the same curve have loaded the compiled code.
            found_ms = timed(problem)[1] if samples <= 4096 else plan_ms(problem)
            points.append([samples, lanes, found_ms])
        rows.append(
            {"curve": curve.name, "pp": curve.pp, "grows": curve.grows, "points": points, **_fit(points, curve.grows)}
        )
    return rows


def measure_memory(curves: Sequence[Series]) -> Row:
    """Return the peak resident memory of a process that plans the largest problem, without and with a pipeline."""
    largest = {pp: max(curve.points[-1] for curve in curves if curve.pp == pp) for pp in (1, 8)}
    peaks = [peak_bytes(_problem(samples, lanes, pp)) for pp, (samples, lanes) in largest.items()]
    return {
        "largest": [[pp, *point] for pp, point in largest.items()],
        "peak_bytes": peaks,
        "small_peak_bytes": peak_bytes(_problem(256, 8, 1)),
    }


def measure_scale(largest_lanes: int = 16384) -> list[Row]:
    """Return planning time beside the modelled step: 8 samples a lane, all exchanges, without and with a pipeline."""
    rows = []
    for lanes in (32 << step for step in range((largest_lanes // 32).bit_length())):
        row: Row = {"lanes": lanes}
        for pp in (1, 8):
            planned, found_ms = timed(_problem(8 * lanes, lanes, pp, CP_COMM_TYPES), 3 if lanes <= 512 else 1)
            row[f"pp{pp}"] = {"ms": found_ms, "step_s": planned.predicted_s}
        rows.append(row)
    return rows


def scale_markdown(rows: Sequence[Row]) -> str:
    """Return the table of planning time over the step."""

    def cells(one: Row) -> list[str]:
        return [f"{one['ms']:.0f}", f"{one['step_s']:.2f}", f"{one['ms'] / one['step_s'] / 1e3:.2f}"]

    return table(
        "lanes | PP 1: ms | step, s | share | PP 8: ms | step, s | share",
        ([f"{row['lanes']}", *cells(row["pp1"]), *cells(row["pp8"])] for row in rows),
        left=1,
    )


def _problem(samples: int, lanes: int, pp: int, exchanges: tuple[CpCommType, ...] = ("p2p",)) -> Problem:
    return Problem(
        name=f"{samples} samples on {lanes} lanes",
        seqlens=draw_lengths("lognormal-github", samples, 0, 131072),
        topology=Topology(num_lanes=lanes, pp_size=pp),
        model=load_model("llama-2-13b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=LIMIT, recompute="full", cp_comm_types=exchanges),
    )


def _fit(points: Sequence[Sequence[float]], grows: str) -> Row:
    """Return the exponent of time over what grows, and the steepest step over that of n log n."""
    sizes = np.array([point[0] if grows == "samples" else point[1] for point in points], np.float64)
    times = np.array([point[2] for point in points])
    large = sizes >= FIT_FROM
    if large.sum() < 3:
        large[:] = True
    exponent = np.polyfit(np.log(sizes[large]), np.log(times[large]), 1)[0] if large.sum() > 1 else float("nan")
    steps = (times[1:] / times[:-1])[large[:-1]]
    return {"exponent": float(exponent), "steepest_doubling": float(steps.max()) if len(steps) else None}


def markdown(rows: Sequence[Row], memory: Row | None) -> str:
    """Return the table of curves and a line on memory."""
    text = table(
        "curve | grows | from ms | to ms | exponent from 2048 on | steepest doubling",
        (
            [
                row["curve"],
                f"{row['grows']} {_size(row, 0)} … {_size(row, -1)}",
                f"{row['points'][0][2]:.1f}",
                f"{row['points'][-1][2]:.0f}",
                f"{row['exponent']:.2f}",
                f"× {row['steepest_doubling']:.2f}" if row["steepest_doubling"] else "",
            ]
            for row in rows
        ),
        left=2,
    )
    if memory:
        peaks = ", ".join(
            f"{peak / 1e6:.0f} MB (PP {pp}, {samples} samples on {lanes} lanes)"
            for (pp, samples, lanes), peak in zip(memory["largest"], memory["peak_bytes"], strict=True)
        )
        text += f"\n\nLargest resident size of the planning process: {peaks}; Python, numpy, numba and the compiled "
        text += f"planner alone take {memory['small_peak_bytes'] / 1e6:.0f} MB of it."
    return text


def plot(rows: Sequence[Row], file: Path) -> bool:
    """Draw the curves into `file`; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "planner", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, grows in zip(axes, ("samples", "lanes"), strict=True):
        for row in rows:
            if row["grows"] == grows:
                sizes = [point[0 if grows == "samples" else 1] for point in row["points"]]
                label = f"{row['curve']} (n^{row['exponent']:.2f})"
                axis.plot(sizes, [point[2] for point in row["points"]], "o-" if row["pp"] == 1 else "s--", label=label)
        if grows == "samples":
            sizes = np.array([2048.0, 131072.0])
            curve = sizes * np.log(sizes)
            axis.plot(sizes, 4 * curve / curve[0], ":", color="grey", label="slope of n log n")
        axis.set(xscale="log", yscale="log", xlabel=grows)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("CPU milliseconds of one plan, warm")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _size(row: Row, index: int) -> str:
    return f"{row['points'][index][0 if row['grows'] == 'samples' else 1]}"
