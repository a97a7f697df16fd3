"""Placed attention beside every other way to share attention out: the tables of docs/figures/attention.md.

    make bench-blocks                                   # everything, minutes on 2 cores
    python -m benchmarks.blocks --only steps            # some tables
    python -m benchmarks.blocks --quick                 # seconds, into runs/bench/blocks: does it run?

All figures are modelled, but planning times. Tables stand between markers in the page; the prose stays.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.blocks import ablations, compared, ours, steps
from benchmarks.blocks.setting import H100_NODES, PAPER_NODES, Setting, masked
from benchmarks.planner.__main__ import machine
from benchmarks.planner.report import Row, inserted

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ("compared", "ablations", "steps", "windows")
QUICK = Setting(num_nodes=2, node_lanes=4, num_tokens=16384)
QUICK_CELLS = tuple(compared.Cell("sft_longalign", mask, 0.25) for mask in compared.MASKS)

QUICK_LAYOUT = steps.LAYOUTS[0]._replace(samples=12)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small cells")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="tables to make")
    parser.add_argument("--output", type=Path, help="folder; docs, or with --quick runs/bench/blocks")
    options = parser.parse_args(arguments)
    output = options.output or (DOCS.parent / "runs" / "bench" / "blocks" if options.quick else DOCS)
    for section in options.only:
        tables = measure_quick(section) if options.quick else measure(section)
        where = machine()
        versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("python", "numpy", "numba"))
        first = next(iter(tables))
        tables[first] = (
            f"Modelled {where['date']}, {where['cpu']}, {where['cores']} cores, {versions}.\n\n{tables[first]}"
        )
        write(output, tables)


def measure(section: str) -> dict[str, str]:
    """Return the Markdown of each table of a section."""
    if section == "compared":
        return compared_tables(
            *(
                on_all_cores(partial(compared.measure_cell, setting=setting), cells)
                for setting, cells in ((H100_NODES, compared.CELLS), (PAPER_NODES, compared.PAPER_CELLS))
            )
        )
    if section == "ablations":
        # On one core, for its planning times; the first placements of all compile.
        samples = masked([9000, 500], "causal")
        ours.price(ours.chosen(samples, H100_NODES), H100_NODES)
        return ablation_tables(ablations.measure(H100_NODES))
    if section == "windows":
        return window_tables(on_all_cores(_windows, steps.WINDOW_CASES))
    return step_tables(on_all_cores(_case, steps.CASES))


def measure_quick(section: str) -> dict[str, str]:
    """Return tables of the same form, of a few small cells."""
    if section == "compared":
        rows = [compared.measure_cell(cell, QUICK, 1) for cell in QUICK_CELLS]
        return compared_tables(rows, rows)
    if section == "ablations":
        return ablation_tables(ablations.measure(QUICK, 1))
    if section == "windows":
        return window_tables([steps.measure_windows(steps.WINDOWS[2], "github_bal", QUICK_LAYOUT)])
    return step_tables([steps.measure_case(QUICK_LAYOUT, "github_bal", mask) for mask in steps.MASKS[:2]])


def on_all_cores(measure_one: Callable[..., Row], cases: Iterable[object]) -> list[Row]:
    """Return the rows of all cases, in their order."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(measure_one, cases))


def _case(case: tuple[steps.Layout, str, str]) -> Row:
    return steps.measure_case(*case)


def _windows(case: tuple[steps.Windows, str]) -> Row:
    return steps.measure_windows(*case)


def compared_tables(rows: Sequence[Row], of_paper: Sequence[Row]) -> dict[str, str]:
    return {
        "blocks-goals": compared.goals_markdown(rows),
        "blocks-paper": compared.paper_markdown(of_paper),
        "blocks-shapes": compared.shapes_markdown(rows),
        "blocks-cells": compared.markdown(rows),
    }


def ablation_tables(rows: Sequence[Row]) -> dict[str, str]:
    return {
        "blocks-size": ablations.block_sizes_markdown(rows),
        "blocks-density": ablations.density_markdown(rows),
        "blocks-tolerance": ablations.grid_markdown(rows, "tolerance"),
        "blocks-divisions": ablations.grid_markdown(rows, "divisions"),
        "blocks-candidates": ablations.candidates_markdown(rows),
    }


def step_tables(rows: Sequence[Row]) -> dict[str, str]:
    return {"blocks-steps-summary": steps.summary_markdown(rows), "blocks-steps": steps.markdown(rows)}


def window_tables(rows: Sequence[Row]) -> dict[str, str]:
    return {"blocks-windows": steps.windows_markdown(rows)}


def write(output: Path, tables: dict[str, str]) -> None:
    """Print the first table and write all into the page in `output`; other tables keep what they had."""
    print(next(iter(tables.values())), "\n", flush=True)
    page = output / "figures" / "attention.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = (page if page.exists() else DOCS / "figures" / "attention.md").read_text(encoding="utf-8")
    page.write_text(inserted(text, tables), encoding="utf-8")


if __name__ == "__main__":
    main()
