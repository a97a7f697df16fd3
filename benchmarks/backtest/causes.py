"""What the errors are made of: the same runs priced again, each time with one price changed.

The changes are not shipped. They are bounds on how far the errors would move, not claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.backtest.errors import errors_of, groups_of
from benchmarks.backtest.runs import Run
from benchmarks.backtest.steps import Modelled, modelled
from benchmarks.planner.report import percent, table
from dynamic_cp.types import Hardware

SHOWN = ("dense, fitted", "dense, held out", "experts", "long context", "weak scaling")
_FREE = 1e15


def _as_run(hardware: Hardware) -> Hardware:
    return hardware


def _all_exposed(hardware: Hardware) -> Hardware:
    return replace(hardware, tp_overlap_exposed_fraction=1.0)


def _free_links(hardware: Hardware) -> Hardware:
    return replace(hardware, bandwidth_in_node_bytes_per_s=_FREE, bandwidth_across_nodes_bytes_per_s=_FREE)


CAUSES: Mapping[str, tuple[Callable[[Hardware], Hardware], bool]] = {
    "nothing overlaps": (_all_exposed, False),
    "gradients and parameters overlap": (_all_exposed, True),
    "TP collectives overlap, too: as shipped": (_as_run, True),
    "and no exchange of experts or CP": (_free_links, True),
}
"""Changed price -> (hardware, whether gradients are reduced beside computation in runs whose source says so)."""


def measure(runs: Sequence[Run]) -> dict[str, list[Modelled]]:
    """Return the runs as each change prices them."""
    return {
        name: [modelled(run, change(run.hardware), overlaps=overlaps) for run in runs]
        for name, (change, overlaps) in CAUSES.items()
    }


def markdown(priced: Mapping[str, Sequence[Modelled]]) -> str:
    """Return median ratio and rms error of groups under each change."""
    rows = []
    for name, results in priced.items():
        groups = groups_of(results)
        errors = [errors_of(groups[group]) for group in SHOWN]
        rows.append([name, *(f"{one.median:.2f}, {percent(one.rms, 1)}" for one in errors)])
    return table(" | ".join(["median ratio, rms error", *SHOWN]), rows)
