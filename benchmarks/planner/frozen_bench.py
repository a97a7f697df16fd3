"""Tables A: the frozen cases in absolute seconds, the goals on them, and tiny instances against their optima."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from benchmarks.planner.frozen import frozen_cases, frozen_problem, lengths_of, tiny_instances
from benchmarks.planner.problem import cold_ms, num_empty_places, timed
from benchmarks.planner.report import Row, percent, table
from dynamic_cp.decide.bounds import lower_bound

BASELINES = {
    "static": "first_fit_s",
    "balanced": "balanced_s",
    "megatron_dev": "megatron_dev_tuned_s",
    "megatron_0161": "megatron_0161_s",
}
"""Baseline -> its seconds in cases.json: an independent program made and priced these plans."""


def measure_cases(wanted: Callable[[str], bool], *, cold: bool) -> list[Row]:
    """Return a row for each wanted case and seed."""
    cases = [case for case in frozen_cases() if wanted(f"{case['case']}.seed{case['seed']}")]
    rows, problems = [], []
    for case in cases:
        name = f"{case['case']}.seed{case['seed']}"
        problem = frozen_problem(name, case, lengths_of(case))
        problems.append(problem)
        fast, fast_ms = timed(problem)
        thorough, thorough_ms = timed(problem, num_repeats=1, search="thorough")
        bound = lower_bound(problem.samples, problem.cost_model)
        rows.append(
            {
                "case": case["case"],
                "seed": case["seed"],
                "pp": case["pp"],
                "fast_s": problem.seconds(fast.plan),
                "thorough_s": problem.seconds(thorough.plan),
                "best_known_s": case["best_known_s"],
                "frozen_bound_s": case["lower_bound_s"],
                "bound_s": bound.seconds,
                "bound_binds": bound.binds,
                **{f"{name}_s": case[key] for name, key in BASELINES.items()},
                "num_microbatches": fast.plan.num_microbatches,
                "num_empty_places": num_empty_places(fast.plan),
                "share_of_empty_places": num_empty_places(fast.plan) / (fast.plan.num_microbatches * case["lanes"]),
                "fast_ms": fast_ms,
                "thorough_ms": thorough_ms,
                "cold_ms": None,
                "reason": fast.reason,
            }
        )
    if cold:
        first = [index for index, row in enumerate(rows) if row["seed"] == 0]
        # Without what is cached: the process that plans has only imported the planner.
        for index, cold_one in zip(first, cold_ms([replace(problems[index]) for index in first]), strict=True):
            rows[index]["cold_ms"] = cold_one
    return rows


def measure_tiny(count: int | None = None) -> list[Row]:
    """Return a row for each of the first `count` tiny instances (None: all)."""
    rows = []
    for instance in tiny_instances()[:count]:
        problem = frozen_problem(instance["name"], instance, instance["lengths"])
        fast, thorough = (problem.planned(search=search).plan for search in ("fast", "thorough"))
        rows.append(
            {
                "instance": instance["name"],
                "pp": instance["pp"],
                "lanes": instance["lanes"],
                "samples": len(problem.seqlens),
                "fast_s": problem.seconds(fast),
                "thorough_s": problem.seconds(thorough),
                "optimum_s": instance["optimum_or_best_s"],
                "is_proved": instance["proved_optimal"],
                "num_empty_places": num_empty_places(fast),
            }
        )
    return rows


def measure_goals(cases: Sequence[Row], tiny: Sequence[Row]) -> list[Row]:
    """Return figure, goal and what was reached; figures without a case are left out."""
    goals: list[Row] = []

    def add(
        figure: str, values: Iterable[float], reduce: Callable[[list[float]], float], goal: float, unit: str = ""
    ) -> None:
        found = list(values)
        if found:
            reached = reduce(found)
            met = bool(reached <= goal)
            goals.append({"figure": figure, "goal": goal, "reached": reached, "unit": unit, "is_met": met})

    def of(case: str) -> list[Row]:
        return [row for row in cases if row["case"] == case]

    def best_known(rows: Iterable[Row], effort: str) -> list[float]:
        return [row[f"{effort}_s"] / row["best_known_s"] for row in rows]

    for case, goal in (("github_pp1_n64_128k", 1.006), ("cc_pp1_n64_32k", 1.028), ("cc_pp1_n64_128k", 1.015)):
        over_bound = [row["fast_s"] / row["frozen_bound_s"] for row in of(case)]
        add(f"{case}: fast / frozen bound, mean", over_bound, fmean, goal)
        add(f"{case}: fast, worst", (row["fast_ms"] for row in of(case)), max, 10, "ms")
    piped = [row for row in cases if row["pp"] > 1]
    add("PP 4 and 8: fast / best known, mean", best_known(piped, "fast"), fmean, 1.0)
    add("PP 4 and 8: fast / best known, worst seed", best_known(piped, "fast"), max, 1.02)
    add("PP 4 and 8: fast, mean", (row["fast_ms"] for row in piped), fmean, 40, "ms")
    add("PP 4 and 8: fast, worst", (row["fast_ms"] for row in piped), max, 40, "ms")
    add("PP 4 and 8: thorough / best known, mean", best_known(piped, "thorough"), fmean, 0.985)
    add("PP 4 and 8: thorough, mean", (row["thorough_ms"] for row in piped), fmean, 500, "ms")
    add("PP 4 and 8: thorough, worst", (row["thorough_ms"] for row in piped), max, 500, "ms")
    for effort in ("fast", "thorough"):
        over_optimum = [row[f"{effort}_s"] / row["optimum_s"] for row in tiny]
        add(f"tiny instances: {effort} / optimum, mean", over_optimum, fmean, 1.005)
        add(f"tiny instances: {effort} / optimum, worst", over_optimum, max, 1.02)
    flat = [row for row in cases if row["pp"] == 1 and not row["case"].startswith("speed_")]
    add("PP 1, 2048 samples on 64 lanes: fast, worst", (row["fast_ms"] for row in flat), max, 5, "ms")
    speed = [row for row in cases if row["case"].startswith("speed_")]
    add("32 768 samples on 4096 lanes: fast, worst", (row["fast_ms"] for row in speed), max, 200, "ms")
    add("32 768 samples on 4096 lanes: fast / best known, worst", best_known(speed, "fast"), max, 0.98)
    return goals


def cases_markdown(rows: Sequence[Row]) -> str:
    """Return the table of all cases, each the mean over its seeds (worst seed); the JSON file has every seed."""

    def over_baseline(seeds: Sequence[Row], baseline: str) -> str:
        if seeds[0][f"{baseline}_s"] is None:
            return "–"
        return f"{fmean(row[f'{baseline}_s'] / row['fast_s'] for row in seeds):.2f}"

    def over_best_known(seeds: Sequence[Row], effort: str) -> str:
        ratios = [row[f"{effort}_s"] / row["best_known_s"] for row in seeds]
        return f"{fmean(ratios):.4f} ({max(ratios):.4f})"

    cells = []
    for case, group in groupby(rows, key=lambda row: row["case"]):
        seeds = list(group)
        cold_ms = seeds[0]["cold_ms"]
        cells.append(
            [
                case,
                len(seeds),
                f"{fmean(row['fast_s'] for row in seeds):.3f}",
                *(over_best_known(seeds, effort) for effort in ("fast", "thorough")),
                f"{fmean(row['fast_s'] / row['bound_s'] for row in seeds):.3f}",
                *(over_baseline(seeds, baseline) for baseline in BASELINES),
                f"{fmean(row['fast_ms'] for row in seeds):.0f}",
                f"{fmean(row['thorough_ms'] for row in seeds):.0f}",
                "" if cold_ms is None else f"{cold_ms:.0f}",
            ]
        )
    return table(
        "case | seeds | fast s | fast / best known | thorough / best known | / bound | × static | × balanced "
        "| × dev tuned | × 0.16.1 | warm ms | thorough ms | cold ms",
        cells,
    )


def goals_markdown(goals: Sequence[Row]) -> str:
    """Return the table of goals."""
    return table(
        "figure | goal | reached | ",
        (
            [
                row["figure"],
                f"≤ {row['goal']:g} {row['unit']}".strip(),
                f"{row['reached']:.1f} ms" if row["unit"] else f"{row['reached']:.4f}",
                "met" if row["is_met"] else f"missed by {percent(row['reached'] / row['goal'] - 1, 2)}",
            ]
            for row in goals
        ),
        left=1,
    )


def tiny_markdown(rows: Sequence[Row]) -> str:
    """Return the table of the tiny instances whose fast plan is not the optimum."""
    return table(
        "instance | PP | lanes | samples | optimum s | fast / optimum | thorough / optimum | empty places",
        (
            [
                row["instance"],
                row["pp"],
                row["lanes"],
                row["samples"],
                f"{row['optimum_s']:.4f}" + ("" if row["is_proved"] else " (best known)"),
                f"{row['fast_s'] / row['optimum_s']:.4f}",
                f"{row['thorough_s'] / row['optimum_s']:.4f}",
                row["num_empty_places"],
            ]
            for row in rows
            if row["fast_s"] > 1.0001 * row["optimum_s"]
        ),
    )
