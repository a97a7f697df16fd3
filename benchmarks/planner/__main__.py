"""Measures the planner: the tables of docs/figures/planner.md.

    make bench-planner                                                # everything, some minutes on 2 quiet cores
    python -m benchmarks.planner --only frozen --cases pp8            # a part, into runs/bench/planner
    python -m benchmarks.planner --quick                              # seconds: does it run?

Writes figures/planner.md (tables between its markers; the prose stays), planner.json and images/planner_growth.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.planner import (
    compared,
    exchanges,
    experts,
    first_use,
    frozen_bench,
    growth,
    h100,
    masks,
    packers,
    published,
)
from benchmarks.planner.report import inserted

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("frozen", "h100", "exchanges", "experts", "packers", "published", "growth", "scale", "masks", "compared")
QUICK_CASES = ("real_webprose_ccfit_pp1_n64_128k.seed0", "real_webprose_ccfit_pp4_n32_32k.seed0")
QUICK_EXCHANGES = ("real_webprose_pp8_n32_128k.seed0",)
QUICK_H100 = (h100.Setting("webprose_ccfit", h100.GQA, 4, 1, 8, 32768, 8192, samples=64),)
QUICK_COMPARED = (compared.Setting("lognormal-cc", "llama-3-8b", 1, 4, 24, 8192, 4096, with_milp=True),)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small cases of every table")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="tables to measure")
    parser.add_argument("--cases", nargs="+", default=[""], help="frozen and H100 cases with one of these in the name")
    parser.add_argument("--output", type=Path, help="folder; docs for a whole table, else runs/bench/planner")
    options = parser.parse_args(arguments)
    is_whole = not options.quick and options.cases == [""]
    output = options.output or (DOCS if is_whole else DOCS.parent / "runs" / "bench" / "planner")
    for section in options.only:
        figures, tables = measure(section, options.cases, quick=options.quick, images=output / "images")
        write(output, section, figures, tables)


def measure(section: str, cases: Sequence[str], *, quick: bool, images: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (figures of a section, Markdown of each of its tables)."""

    def wanted(name: str) -> bool:
        return any(part in name for part in cases) and (not quick or name in QUICK_CASES)

    figures: dict[str, Any]
    if section == "frozen":
        rows = frozen_bench.measure_cases(wanted, cold=not quick)
        tiny = frozen_bench.measure_tiny(3 if quick else None)
        goals = frozen_bench.measure_goals(rows, tiny)
        figures = {"cases": rows, "tiny": tiny, "goals": goals}
        tables = {
            "frozen-goals": frozen_bench.goals_markdown(goals),
            "frozen-cases": frozen_bench.cases_markdown(rows),
            "frozen-tiny": frozen_bench.tiny_markdown(tiny),
        }
    elif section == "h100":
        settings = QUICK_H100 if quick else [setting for setting in h100.SETTINGS if wanted(setting.name)]
        rows = h100.measure(settings, cold=not quick)
        figures, tables = {"cases": rows}, {"h100": h100.markdown(rows)}
    elif section == "exchanges":
        found = exchanges.measure(QUICK_EXCHANGES.__contains__ if quick else wanted, is_quick=quick)
        figures = dict(found)
        tables = {
            "exchanges-frozen": exchanges.cases_markdown(found["cases"]),
            "exchanges-nic": exchanges.nic_markdown(found["nic"]),
            "exchanges-chosen": exchanges.chosen_markdown(found["chosen"]),
        }
    elif section == "packers":
        rows = packers.measure(wanted)
        figures, tables = {"cases": rows}, {"packers": packers.markdown(rows)}
    elif section == "experts":
        rows = experts.measure(
            experts.SETTINGS[2:3] if quick else [one for one in experts.SETTINGS if wanted(one.name)]
        )
        figures, tables = {"cases": rows}, {"experts": experts.markdown(rows)}
    elif section == "published":
        rows = (
            published.measure((8,), 64, ("lognormal-github", "webprose_ccfit"), (0,)) if quick else published.measure()
        )
        figures, tables = {"cases": rows}, {"published": published.markdown(rows)}
    elif section == "masks":
        rows = masks.measure(masks.CELLS[:1] if quick else [cell for cell in masks.CELLS if wanted(cell.name)])
        figures, tables = {"cells": rows}, {"masks": masks.markdown(rows)}
    elif section == "scale":
        rows = growth.measure_scale(64 if quick else 16384)
        figures, tables = {"rows": rows}, {"scale": growth.scale_markdown(rows)}
    elif section == "growth":
        curves = growth.series(1024, 32) if quick else growth.series()
        rows = growth.measure(curves)
        memory = None if quick else growth.measure_memory(curves)
        first = None if quick else first_use.measure()
        figures = {"curves": rows, "memory": memory, "first_use": first}
        tables = {"growth": growth.markdown(rows, memory) + (f"\n\n{first_use.markdown(first)}" if first else "")}
        if not growth.plot(rows, images / "planner_growth.svg"):
            print("no plot: matplotlib is not installed")
    else:
        rows = compared.measure(QUICK_COMPARED, 0.5) if quick else compared.measure()
        figures, tables = {"cases": rows}, {"compared": compared.markdown(rows)}
    figures["measured"] = machine()
    where = figures["measured"]
    versions = ", ".join(f"{name} {found}" for name, found in where["versions"].items())
    first_table = next(iter(tables))
    line = f"Measured {where['date']}, {where['cpu']}, {where['cores']} cores, {versions}."
    tables[first_table] = f"{line}\n\n{tables[first_table]}"
    return figures, tables


def machine() -> dict[str, Any]:
    """Return date, CPU and versions."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "numba", "pulp", "highspy", "megatron-core"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"date": date.today().isoformat(), "cpu": cpu, "cores": os.cpu_count(), "versions": versions}


def write(output: Path, section: str, figures: dict[str, Any], tables: dict[str, str]) -> None:
    """Print the first table of a section and write all into `output`; other sections keep what they had."""
    print(f"{section}:\n{next(iter(tables.values()))}\n", flush=True)
    document, data = output / "figures" / "planner.md", output / "planner.json"
    document.parent.mkdir(parents=True, exist_ok=True)
    text = (document if document.exists() else DOCS / "figures" / "planner.md").read_text(encoding="utf-8")
    document.write_text(inserted(text, tables), encoding="utf-8")
    kept = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
    data.write_text(json.dumps(kept | {section: figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
