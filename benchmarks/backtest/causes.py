"""What the errors are made of: the same runs with one price after the other changed, each a bound and no claim.

None of these is shipped: they say how far the distance to published seconds would move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.backtest.errors import groups_of, spread
from benchmarks.backtest.runs import Run
from benchmarks.backtest.steps import Modelled, modelled
from benchmarks.planner.report import percent, table
from dynamic_cp.types import Hardware

SHOWN = ("dense, fitted", "dense, held out", "experts", "long context", "weak scaling")
EXPOSED = 0.25
"""Share of the collectives of TP that stays exposed where they overlap: what fitted dense runs agree with best."""
_FREE = 1e15


def _overlapped(hardware: Hardware) -> Hardware:
    return replace(
        hardware,
        collective_bandwidth_in_node_bytes_per_s=hardware.collective_bandwidth_in_node_bytes_per_s / EXPOSED,
    )


def _free_links(hardware: Hardware) -> Hardware:
    return replace(hardware, bandwidth_in_node_bytes_per_s=_FREE, bandwidth_across_nodes_bytes_per_s=_FREE)


def _as_shipped(hardware: Hardware) -> Hardware:
    return hardware


CAUSES: Mapping[str, tuple[Callable[[Hardware], Hardware], bool]] = {
    "as shipped": (_as_shipped, True),
    "reduction hidden": (_as_shipped, False),
    f"and {EXPOSED} of TP collectives exposed": (_overlapped, False),
    "and no exchange of experts or CP": (lambda hardware: _free_links(_overlapped(hardware)), False),
}
"""What is changed -> (hardware, whether the reduction counts)."""


def measure(runs: Sequence[Run]) -> dict[str, list[Modelled]]:
    """Return the runs as each change prices them."""
    return {
        name: [_priced(run, change, with_reduction) for run in runs]
        for name, (change, with_reduction) in CAUSES.items()
    }


def _priced(run: Run, change: Callable[[Hardware], Hardware], with_reduction: bool) -> Modelled:
    result = modelled(run, change(run.hardware))
    if with_reduction:
        return result
    return replace(result, iteration_s=result.iteration_s - result.reduction_s, reduction_s=0.0)


def markdown(priced: Mapping[str, Sequence[Modelled]]) -> str:
    """Return median ratio and rms error of groups under each change."""
    rows = []
    for name, results in priced.items():
        groups = groups_of(results)
        errors = [spread([one.ratio for one in groups[group]]) for group in SHOWN]
        rows.append([name, *(f"{one.median:.2f}, {percent(one.rms, 1)}" for one in errors)])
    return table(" | ".join(["median ratio, rms error", *SHOWN]), rows)
