"""Measures the planner: the tables of docs/planner.md.

    make bench-planner                                                # everything, some minutes on 2 quiet cores
    python -m benchmarks.planner --only frozen --cases pp8            # a part, into runs/bench/planner
    python -m benchmarks.planner --quick                              # seconds: does it run?

Writes planner.md (tables between its markers; the prose stays), planner.json and images/planner_growth.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.planner import compared, first_use, frozen_bench, growth, h100, published
from benchmarks.planner.report import inserted

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("frozen", "h100", "published", "growth", "compared")
QUICK_CASES = ("real_webprose_ccfit_pp1_n64_128k.seed0", "real_webprose_ccfit_pp4_n32_32k.seed0")
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
    results, tables = measure(options.only, options.cases, quick=options.quick, images=output / "images")
    write(output, results, tables)


def measure(
    sections: Sequence[str], cases: Sequence[str], *, quick: bool, images: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (figures of each section, Markdown of each table)."""
    results: dict[str, Any] = {}
    tables: dict[str, str] = {}

    def wanted(name: str) -> bool:
        return any(part in name for part in cases) and (not quick or name in QUICK_CASES)

    if "frozen" in sections:
        rows = frozen_bench.measure_cases(wanted, cold=not quick)
        tiny = frozen_bench.measure_tiny(3 if quick else None)
        goals = frozen_bench.measure_goals(rows, tiny)
        results["frozen"] = {"cases": rows, "tiny": tiny, "goals": goals}
        tables["frozen-goals"] = frozen_bench.goals_markdown(goals)
        tables["frozen-cases"] = frozen_bench.cases_markdown(rows)
        tables["frozen-tiny"] = frozen_bench.tiny_markdown(tiny)
        print(tables["frozen-goals"], flush=True)
    if "h100" in sections:
        of_name: Callable[[str], bool] = (lambda name: True) if quick else wanted
        rows = h100.measure(of_name, cold=not quick, settings=QUICK_H100 if quick else h100.SETTINGS)
        results["h100"] = {"cases": rows}
        tables["h100"] = h100.markdown(rows)
        print(tables["h100"], flush=True)
    if "published" in sections:
        rows = published.measure((8,), 64) if quick else published.measure()
        results["published"] = {"cases": rows}
        tables["published"] = published.markdown(rows)
        print(tables["published"], flush=True)
    if "growth" in sections:
        curves = growth.series(1024, 32) if quick else growth.series()
        rows = growth.measure(curves)
        memory = None if quick else growth.measure_memory(curves)
        first = None if quick else first_use.measure()
        results["growth"] = {"curves": rows, "memory": memory, "first_use": first}
        tables["growth"] = growth.markdown(rows, memory) + (f"\n\n{first_use.markdown(first)}" if first else "")
        if not growth.plot(rows, images / "planner_growth.svg"):
            print("no plot: matplotlib is not installed")
        print(tables["growth"], flush=True)
    if "compared" in sections:
        rows = compared.measure(QUICK_COMPARED, 0.5) if quick else compared.measure()
        results["compared"] = {"cases": rows}
        tables["compared"] = compared.markdown(rows)
        print(tables["compared"], flush=True)
    stamp = machine()
    for section in results:
        results[section]["measured"] = stamp
        line = f"{stamp['date']}, {stamp['cpu']}, {stamp['cores']} cores, " + ", ".join(
            f"{name} {found}" for name, found in stamp["versions"].items()
        )
        first_table = next(name for name in tables if name.split("-")[0] == section)
        tables[first_table] = f"Measured {line}.\n\n{tables[first_table]}"
    return results, tables


def machine() -> dict[str, Any]:
    """Return date, CPU and versions."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "numba", "pulp", "megatron-core"):
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


def write(output: Path, results: dict[str, Any], tables: dict[str, str]) -> None:
    """Write figures and tables into `output`; sections that were not measured keep what they had."""
    output.mkdir(parents=True, exist_ok=True)
    document, figures = output / "planner.md", output / "planner.json"
    text = (document if document.exists() else DOCS / "planner.md").read_text(encoding="utf-8")
    document.write_text(inserted(text, tables), encoding="utf-8")
    kept = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    figures.write_text(json.dumps(kept | results, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {document} and {figures}")


if __name__ == "__main__":
    main()
