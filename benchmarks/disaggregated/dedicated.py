"""Servers without weights beside servers in place: whole steps, and the memory of the rank that needs most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.disaggregated.setting import Case, K, cost_model_of, memory_of
from benchmarks.planner.report import Row, table
from dynamic_cp.disaggregation.dedicated import plan_dedicated, problem_without
from dynamic_cp.disaggregation.prices import TaskOptions
from dynamic_cp.disaggregation.search import plan_tasks
from dynamic_cp.errors import InfeasibleSampleError
from dynamic_cp.types import Problem, Sample

CASES = (
    Case("8B", "pretrain", 512 * K, 64, 1, 2),
    Case("8B", "pretrain", 512 * K, 256, 4, 8),
    Case("8B", "prolong", 512 * K, 256, 4, 8),
    Case("34B", "pretrain", 512 * K, 256, 4, 8),
    Case("8B", "prolong", 128 * K, 256, 4, 8),
)
SHARES = (0.25, 0.5, 0.75)
"""Of all servers: those that are dedicated."""


def measure(case: Case, seed: int = 0) -> Row:
    """Return (servers, seconds, bytes of the fullest rank) of a pool in place, and of numbers of dedicated ones.

    "free" is the fastest number where transfers between nodes take their latency alone.
    """
    samples, problem = case.samples(seed), case.problem()
    pool = plan_tasks(samples, cost_model_of(problem), memory=memory_of(problem))
    row: Row = {"case": case, "pool": (0, pool.makespan_s, pool.peak_bytes)}
    dedicated = list(_dedicated(case, samples, problem))
    row |= {share: next((one for one in dedicated if one[0] == share * _servers(case)), None) for share in SHARES}
    free = case._replace(gb_per_s=1e9)
    for name, found in (("best", dedicated), ("free", list(_dedicated(free, samples, free.problem())))):
        row[name] = min(found, key=lambda one: one[1], default=None)
    return row


def _dedicated(case: Case, samples: Sequence[Sample], problem: Problem) -> Iterator[tuple[int, float, float]]:
    for gone in range(1, problem.topology.num_lanes):
        options = TaskOptions(attention_servers=gone * case.pp)
        try:
            left = problem_without(problem, options.attention_servers)
            found = plan_dedicated(samples, cost_model_of(left), options, memory=memory_of(left))
        except InfeasibleSampleError:
            continue
        yield gone * case.pp, found.makespan_s, found.peak_bytes


def _servers(case: Case) -> int:
    return case.gpus // 8


def markdown(rows: Sequence[Row]) -> str:
    """Return a line for each job."""
    shares = " | ".join(f"{share:.0%} dedicated" for share in SHARES)
    lines = [
        (
            row["case"].name, _cell(row["pool"]), *(_cell(row[share]) for share in SHARES),
            *(_fastest(row[name], row["case"]) for name in ("best", "free")),
        )
        for row in rows
    ]  # fmt: skip
    return table(f"job | all serve in place | {shares} | the fastest number | the same, transfers free", lines)


def _fastest(found: tuple[int, float, float] | None, case: Case) -> str:
    return "no room" if found is None else f"{found[0]} of {_servers(case)}: {found[1]:.2f} s"


def _cell(found: tuple[int, float, float] | None) -> str:
    return "no room" if found is None else f"{found[1]:.2f} s, {found[2] / 1e9:.0f} GB"
