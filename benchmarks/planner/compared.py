"""Table E: planners that ours does not contain, on the same prices and the same simulator.

Each is tuned in its favour (see the module of each): megatron-core 0.16.1's own scheduler, a FlexSP-like MILP for each
micro-batch, a WLB-LLM-like packer.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.peers import flexsp, hybrid, wlb
from benchmarks.peers.peer import PeerResult
from benchmarks.planner.problem import Problem, best_static, timed
from benchmarks.planner.report import Row, table
from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.types import PlanOptions, Topology


class Setting(NamedTuple):
    """One line of the table; `with_milp`: small enough for FlexSP."""

    workload: str
    model: str
    pp: int
    lanes: int
    samples: int
    max_seqlen: int
    limit: int
    with_milp: bool = False
    tp: int = 1


K = 1024
SETTINGS = (
    Setting("lognormal-github", "llama-3-8b", 1, 64, 2048, 128 * K, 32 * K, tp=2),
    Setting("lognormal-cc", "llama-3-8b", 1, 64, 2048, 32 * K, 8 * K),
    Setting("github_bal", "llama-3-8b", 1, 64, 2048, 128 * K, 32 * K, tp=2),
    Setting("lognormal-github", "llama-2-13b", 8, 32, 2048, 128 * K, 16 * K),
    Setting("lognormal-cc", "llama-2-13b", 8, 32, 2048, 32 * K, 4 * K),
    Setting("github_bal", "llama-2-13b", 8, 32, 2048, 128 * K, 16 * K),
    Setting("lognormal-github", "llama-3-8b", 1, 8, 128, 32 * K, 8 * K, with_milp=True),
    Setting("lognormal-cc", "llama-3-8b", 1, 8, 128, 32 * K, 8 * K, with_milp=True),
    Setting("github_bal", "llama-2-13b", 4, 8, 128, 32 * K, 8 * K, with_milp=True),
)
PEERS = ("megatron_0161", "wlb", "flexsp")


def measure(settings: Sequence[Setting] = SETTINGS, seconds_per_solve: float = 2.0) -> list[Row]:
    """Return a row for each setting."""
    rows = []
    for setting in settings:
        problem = Problem(
            name=f"{setting.workload} {setting.model} PP {setting.pp}",
            seqlens=draw_lengths(setting.workload, setting.samples, 0, setting.max_seqlen),
            topology=Topology(
                num_lanes=setting.lanes, pp_size=setting.pp, tp_size=setting.tp, sequence_parallel=setting.tp > 1
            ),
            model=load_model(setting.model),
            hardware=load_hardware("h100"),
            options=PlanOptions(max_tokens_per_rank=setting.limit, recompute="full", cp_comm_types=("p2p",)),
        )
        planned, warm_ms = timed(problem)
        row: Row = {
            **setting._asdict(),
            "fast_s": problem.seconds(planned.plan),
            "warm_ms": warm_ms,
            "thorough_s": problem.seconds(problem.planned(search="thorough").plan),
            "bound_s": lower_bound(problem.samples, problem.cost_model).seconds,
            "static_s": best_static(problem, "static").seconds,
            "balanced_s": best_static(problem, "balanced").seconds,
            "megatron_dev_s": problem.seconds(problem.planned("megatron-dev").plan),
        }
        peers: dict[str, Callable[[], PeerResult]] = {
            "megatron_0161": lambda problem=problem: _tuned_0161(problem),
            "wlb": lambda problem=problem: wlb.peer(problem.samples, problem.cost_model),
            "flexsp": lambda problem=problem: flexsp.peer(
                problem.samples, problem.cost_model, seconds_per_solve=seconds_per_solve, num_counts=3
            ),
        }
        for name in PEERS:
            row |= _peer(name, peers[name], setting)
        rows.append(row)
    return rows


def _peer(name: str, peer: Callable[[], PeerResult], setting: Setting) -> Row:
    """Return the peer's seconds, what it says of them, and how long it took."""
    if name == "flexsp" and not setting.with_milp:
        return {"flexsp_s": None, "flexsp_note": "not run: minutes of MILPs", "flexsp_plan_s": None}
    start_s = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PuLP 3 announces PuLP 4
            result = peer()
    except ImportError as error:
        result = PeerResult(None, None, f"not run: {error}")
    plan_s = time.perf_counter() - start_s
    return {f"{name}_s": result.seconds, f"{name}_note": result.note, f"{name}_plan_s": plan_s}


def _tuned_0161(problem: Problem) -> PeerResult:
    """Return the best of three token limits: a smaller one makes its groups larger."""
    found = []
    for limit in (problem.options.max_tokens_per_rank // divisor for divisor in (1, 2, 4)):
        if limit * problem.topology.max_cp_size >= problem.seqlens.max():
            lowered = replace(problem, options=replace(problem.options, max_tokens_per_rank=limit))
            result = hybrid.peer(lowered.samples, lowered.cost_model)
            found.append(result._replace(note=f"limit {limit}, {result.note}"))
    return min(found, key=lambda result: float("inf") if result.seconds is None else result.seconds)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: seconds of an iteration, and in brackets the seconds of planning."""

    def peer(row: Row, name: str) -> str:
        seconds = row[f"{name}_s"]
        return "–" if seconds is None else f"{seconds:.3f} ({row[f'{name}_plan_s']:.1f} s)"

    return table(
        "lengths | model | TP·PP·lanes | samples | bound s | dynamic s | static s | balanced s | dev tuned s "
        "| 0.16.1 s | WLB-like s | FlexSP-like s | best peer / dynamic",
        (
            [
                f"{row['workload']} {row['max_seqlen'] // 1024}k",
                row["model"],
                f"{row['tp']}·{row['pp']}·{row['lanes']}",
                row["samples"],
                f"{row['bound_s']:.3f}",
                f"{row['fast_s']:.3f} ({row['warm_ms']:.0f} ms)",
                f"{row['static_s']:.3f}",
                f"{row['balanced_s']:.3f}",
                f"{row['megatron_dev_s']:.3f}",
                *(peer(row, name) for name in PEERS),
                f"{min(row[f'{name}_s'] for name in PEERS if row[f'{name}_s']) / row['fast_s']:.2f}",
            ]
            for row in rows
        ),
        left=2,
    )
