"""The cost model against published runs: docs/backtest.md, with all tables on docs/figures/backtest.md.

    python -m benchmarks.backtest                        # every table, about a minute
    python -m benchmarks.backtest --only steps memory    # some, in seconds
    python -m benchmarks.backtest --markdown             # all, between the markers of these pages
    python -m benchmarks.backtest --check                # 1 where the model is further off than errors.LIMITS allows

Runs and figures stand in published.json, each with its source; hardware files say which price was fitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.backtest import causes, errors, layouts, peaks, variable
from benchmarks.backtest.runs import Run, read_runs
from benchmarks.backtest.steps import Modelled, modelled
from benchmarks.planner.report import inserted

DOCS = Path(__file__).parents[2] / "docs"
PLACES = {"backtest-goals": "backtest.md", "backtest-spread": "backtest.md", "backtest-sentence": "../README.md"}
"""Table -> its page; those of all others are on figures/backtest.md."""
SECTIONS = ("steps", "memory", "variable", "layout")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="tables to make")
    parser.add_argument("--markdown", action="store_true", help="put the tables into the pages; the prose stays")
    parser.add_argument("--check", action="store_true", help="only the limits")
    options = parser.parse_args(arguments)
    runs = read_runs()
    results = [modelled(run) for run in runs]
    broken = errors.broken_limits(results)
    if not options.check:
        tables = {name: text for section in options.only for name, text in tables_of(section, runs, results).items()}
        if options.markdown:
            write(tables)
        print("\n\n".join(tables.values()))
    for line in broken:
        print(f"limit: {line}", file=sys.stderr)
    return int(options.check and bool(broken))


def write(tables: Mapping[str, str]) -> None:
    """Put each table between its markers."""
    of_page: dict[str, dict[str, str]] = {}
    for name, text in tables.items():
        of_page.setdefault(PLACES.get(name, "figures/backtest.md"), {})[name] = text
    for name, own in of_page.items():
        page = DOCS / name
        page.write_text(inserted(page.read_text(encoding="utf-8"), own), encoding="utf-8")


def tables_of(section: str, runs: Sequence[Run], results: Sequence[Modelled]) -> dict[str, str]:
    """Return the Markdown of each table of a section."""
    if section == "steps":
        return {
            "backtest-goals": errors.goals_markdown(results),
            "backtest-spread": errors.spread_markdown(results),
            "backtest-sentence": errors.sentence_markdown(results),
            "backtest-kernels": peaks.kernels_markdown(results),
            "backtest-waits": errors.waits_markdown(results),
            "backtest-causes": causes.markdown(causes.measure(runs)),
            "backtest-pairs": errors.pairs_markdown(results),
            "backtest-steps": errors.steps_markdown(results),
            "backtest-sources": errors.sources_markdown(results),
        }
    if section == "memory":
        return {
            "backtest-memory": errors.memory_markdown(results),
            "backtest-peaks": peaks.markdown(peaks.read_peaks()),
        }
    if section == "layout":
        return {"backtest-layout": layouts.markdown(layouts.measure(runs))}
    pairs = variable.read_variable()
    return {"backtest-variable": variable.markdown(pairs, [variable.measure(pair) for pair in pairs])}


if __name__ == "__main__":
    sys.exit(main())
