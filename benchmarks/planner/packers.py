"""What each packer of the search is worth: the time of plans without it, over that with all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.planner import experts, h100
from benchmarks.planner.frozen import frozen_cases, frozen_problem, lengths_of
from benchmarks.planner.problem import Problem
from benchmarks.planner.report import Row, table
from dynamic_cp.packing import lane_blocks, level
from dynamic_cp.search import candidates
from dynamic_cp.search.candidates import Search


def _nothing(*_args: Any, **_more: Any) -> Iterator[Any]:
    return iter(())


PACKERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nested": partial(mock.patch.object, candidates, "pack_nested", return_value=None),
    "blocks": partial(mock.patch.object, lane_blocks, "pack_blocks", _nothing),
    "level": partial(mock.patch.object, level, "pack_level", _nothing),
    "static": partial(mock.patch.object, Search, "_better_static", _nothing),
    "balanced": partial(mock.patch.object, Search, "_balanced", _nothing),
    "megatron-dev": partial(mock.patch.object, Search, "_megatron_dev", _nothing),
    "polish": partial(mock.patch.object, Search, "polished", _nothing),
    "anneal": partial(mock.patch.object, Search, "annealed", _nothing),
    "shortened": partial(mock.patch.object, Search, "_shortened", _nothing),
}
"""Packer or refinement -> change of the search that leaves it out."""


def problems() -> Iterator[tuple[str, Problem]]:
    """Yield (group, problem) of the frozen bench, the H100 profile and lanes that share experts."""
    for case in frozen_cases():
        yield "frozen", frozen_problem(f"{case['case']}.seed{case['seed']}", case, lengths_of(case))
    for setting in h100.SETTINGS:
        yield "H100", h100.problem_of(setting)
    for shared in experts.SETTINGS:
        yield "experts", experts.problem_of(shared)


def measure(wanted: Callable[[str], bool]) -> list[Row]:
    """Return a row for each group, with and without a pipeline, and packer: the mean and the worst ratio."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for group, problem in problems():
        if not wanted(problem.name):
            continue
        name = f"{group}, {'PP' if problem.topology.pp_size > 1 else 'no PP'}"
        all_s = problem.planned().predicted_s
        for packer, without in PACKERS.items():
            with without():
                ratios.setdefault((name, packer), []).append(problem.planned().predicted_s / all_s)
    return [
        {"group": group, "packer": packer, "cases": len(of_it), "mean": float(np.mean(of_it)), "worst": max(of_it)}
        for (group, packer), of_it in ratios.items()
    ]


def markdown(rows: Sequence[Row]) -> str:
    """Return groups by packers: mean (worst) time without the packer over that with all; 1 where it never differs."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    cells = {(row["group"], row["packer"]): f"{row['mean']:.3f} ({row['worst']:.3f})" for row in rows}
    cells = {key: "1" if cell == "1.000 (1.000)" else cell for key, cell in cells.items()}
    num_cases = {row["group"]: row["cases"] for row in rows}
    return table(
        " | ".join(["group", "cases", *PACKERS]),
        [[group, num_cases[group], *(cells[group, packer] for packer in PACKERS)] for group in groups],
    )
