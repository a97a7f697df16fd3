"""Disaggregated attention beside everything else: the tables of docs/figures/attention.md.

    make bench-disaggregated                            # everything, below ten CPU minutes
    python -m benchmarks.disaggregated --only scheduler # some tables
    python -m benchmarks.disaggregated --quick          # seconds, into runs/bench/disaggregated: does it run?

All figures are modelled, but the milliseconds of the scheduler. Tables stand between markers in the page; the prose
stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.blocks.__main__ import on_all_cores
from benchmarks.disaggregated import noise, queues, scheduler, steps, tuned
from benchmarks.disaggregated.setting import Case, K
from benchmarks.planner.__main__ import machine
from benchmarks.planner.report import inserted

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("scheduler", "steps", "networks", "queues", "noise", "tuned")
QUICK_CELLS = (("pretrain", 8, 8 * K), ("prolong", 8, 8 * K))
QUICK_CASE = Case("8B", "prolong", 64 * K, 64, 2, 2, limit=32 * K)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small cells")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="tables to make")
    parser.add_argument("--output", type=Path, help="folder; docs, or with --quick runs/bench/disaggregated")
    options = parser.parse_args(arguments)
    output = options.output or (DOCS.parent / "runs" / "bench" / "disaggregated" if options.quick else DOCS)
    for section in options.only:
        tables = tables_of(section, options.quick)
        where = machine()
        versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("python", "numpy", "numba"))
        first = next(iter(tables))
        made = "Measured" if section == "scheduler" else "Modelled"
        tables[first] = (
            f"{made} {where['date']}, {where['cpu']}, {where['cores']} cores, {versions}.\n\n{tables[first]}"
        )
        write(output, tables)


def tables_of(section: str, quick: bool) -> dict[str, str]:
    """Return the Markdown of each table of a section."""
    if section == "scheduler":
        # On one core, for its times.
        rows = [scheduler.measure(*cell) for cell in (QUICK_CELLS if quick else scheduler.CELLS)]
        return {
            "disaggregated-scheduler-goals": scheduler.goals_markdown(rows),
            "disaggregated-scheduler": scheduler.markdown(rows),
            "disaggregated-tolerance": scheduler.tolerance_markdown(),
            "disaggregated-tile": scheduler.tile_markdown(),
        }
    if section == "steps":
        cases = (QUICK_CASE,) if quick else (*steps.PIPELINES, *steps.BETWEEN, *steps.TWO_STAGES, *steps.ONE_STAGE)
        rows = [steps.measure(QUICK_CASE)] if quick else on_all_cores(steps.measure, cases)
        return {
            "disaggregated-steps-goals": steps.goals_markdown(rows),
            "disaggregated-steps-summary": steps.summary_markdown(rows),
            "disaggregated-steps": steps.markdown(rows),
        }
    if section == "networks":
        rows = [steps.measure_network(QUICK_CASE)] if quick else on_all_cores(steps.measure_network, steps.NETWORKS)
        return {"disaggregated-networks": steps.network_markdown(rows)}
    if section == "queues":
        rows = [queues.measure(QUICK_CASE, 4, 2)] if quick else on_all_cores(queues.measure, queues.CASES)
        return {"disaggregated-queues": queues.markdown(rows)}
    if section == "tuned":
        rows = [tuned.measure(QUICK_CASE)] if quick else on_all_cores(tuned.measure, tuned.CASES)
        return {"disaggregated-tuned": tuned.markdown(rows)}
    return {"disaggregated-noise": noise.markdown()}


def write(output: Path, tables: dict[str, str]) -> None:
    """Print the first table and write all into the page in `output`; other tables keep what they had."""
    print(next(iter(tables.values())), "\n", flush=True)
    page = output / "figures" / "attention.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = (page if page.exists() else DOCS / "figures" / "attention.md").read_text(encoding="utf-8")
    page.write_text(inserted(text, tables), encoding="utf-8")


if __name__ == "__main__":
    main()
