"""The cost model against published runs: docs/backtest.md.

    python -m benchmarks.backtest                        # every table, about a minute
    python -m benchmarks.backtest --only steps memory    # some, in seconds
    python -m benchmarks.backtest --markdown             # all, into docs/backtest.md between its markers
    python -m benchmarks.backtest --check                # 1 where the model is further off than errors.LIMITS allows

Runs and figures stand in published.json, each with its source; hardware files say which price was fitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.backtest import causes, errors, layouts, variable
from benchmarks.backtest.runs import Run, read_runs
from benchmarks.backtest.steps import Modelled, modelled
from benchmarks.planner.report import inserted

PAGE = Path(__file__).parents[2] / "docs" / "backtest.md"
SECTIONS = ("steps", "memory", "variable", "layout")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="tables to make")
    parser.add_argument("--markdown", action="store_true", help=f"put the tables into {PAGE.name}; the prose stays")
    parser.add_argument("--check", action="store_true", help="only the limits")
    options = parser.parse_args(arguments)
    runs = read_runs()
    results = [modelled(run) for run in runs]
    broken = errors.broken_limits(results)
    if not options.check:
        tables = {name: text for section in options.only for name, text in tables_of(section, runs, results).items()}
        if options.markdown:
            PAGE.write_text(inserted(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
        print("\n\n".join(tables.values()))
    for line in broken:
        print(f"limit: {line}", file=sys.stderr)
    return int(options.check and bool(broken))


def tables_of(section: str, runs: Sequence[Run], results: Sequence[Modelled]) -> dict[str, str]:
    """Return the Markdown of each table of a section."""
    if section == "steps":
        return {
            "backtest-goals": errors.goals_markdown(results),
            "backtest-spread": errors.spread_markdown(results),
            "backtest-causes": causes.markdown(causes.measure(runs)),
            "backtest-pairs": errors.pairs_markdown(results),
            "backtest-steps": errors.steps_markdown(results),
            "backtest-sources": errors.sources_markdown(results),
        }
    if section == "memory":
        return {"backtest-memory": errors.memory_markdown(results)}
    if section == "layout":
        return {"backtest-layout": layouts.markdown(layouts.measure(runs))}
    pairs = variable.read_variable()
    return {"backtest-variable": variable.markdown(pairs, [variable.measure(pair) for pair in pairs])}


if __name__ == "__main__":
    sys.exit(main())
