"""Runs with sequences of many lengths: the published gain of a dynamic CP size beside the modelled one.

No list of lengths is published, so similar ones are drawn; the seed matters as much as a price does. Published gains
are over packing at one CP size; "as they ran it" is the greedy of Megatron's branch dev, as reimplemented here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.backtest.runs import FILE, Source, model_of, source_of
from benchmarks.planner.problem import Problem
from benchmarks.planner.report import table
from dynamic_cp.arrays import Ints
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pricing.work import plan_flops, tflops_per_rank
from dynamic_cp.types import Plan, PlanOptions, Topology

POLICIES = ("static", "megatron-dev", "dynamic")
FIGURES = {"ms": "lower", "s": "lower", "K tokens/s": "higher", "TFLOP/s/GPU": "higher"}
"""Unit of a published figure -> whether the larger or the smaller one is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableRun:
    """A published pair of runs, static and dynamic, on lengths that vary.

    Attributes:
        published: (static, dynamic) figures in `unit`; () where only gains are published.
        gain: published gain, in words where it is a range.
        problem: what is planned here; None: a page of this project has the figures, `elsewhere`.
        split: as of `Run`.
        why: why the two differ, in a line.
    """

    name: str
    source: Source
    gain: str
    split: str
    assumed: str
    why: str
    published: tuple[float, ...] = ()
    unit: str = "ms"
    problem: Mapping[str, Any] | None = None
    elsewhere: str = ""


def read_variable() -> tuple[VariableRun, ...]:
    """Return the published pairs."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    runs = []
    for entry in data["variable"]:
        problem = entry.get("problem")
        if problem:
            problem = problem | {"model": model_of(problem["model"], data["models"], problem.get("changes", {}))}
        source, published = source_of(entry["source"], data["sources"]), tuple(entry.get("published", ()))
        runs.append(VariableRun(**entry | {"source": source, "published": published, "problem": problem}))
    return tuple(runs)


def problem_of(problem: Mapping[str, Any], seed: int) -> Problem:
    """Return a global batch of a pair, as the planner takes it."""
    tp, pp, ep = (problem.get(name, 1) for name in ("tp", "pp", "ep"))
    return Problem(
        name=problem["lengths"],
        seqlens=_lengths(problem, seed),
        topology=Topology(
            num_lanes=problem["gpus"] // (tp * pp), tp_size=tp, pp_size=pp, ep_size=ep, sequence_parallel=tp > 1,
            ranks_per_node=problem.get("gpus_per_node", 8),
        ),
        model=problem["model"],
        hardware=load_hardware(problem["hardware"], problem.get("settings", ())),
        options=PlanOptions(
            max_tokens_per_rank=problem["max_tokens_per_rank"],
            static_cp_size=problem["cp"],
            max_cp_size=problem.get("max_cp"),
            recompute=problem.get("recompute", "none"), cp_comm_types=("p2p",),
        ),
    )  # fmt: skip


def _lengths(problem: Mapping[str, Any], seed: int) -> Ints:
    """Return the lengths of a global batch, drawn up to a number of samples or of tokens."""
    tokens, longest = problem.get("global_batch_tokens"), problem["max_seqlen"]
    number = problem.get("global_batch_size") or tokens
    drawn = draw_lengths(problem["lengths"], min(number, 4096), seed, longest, min_seqlen=problem.get("min_seqlen", 16))
    return drawn if tokens is None else drawn[: max(1, int((drawn.cumsum() <= tokens).sum()))]


def measure(run: VariableRun, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, list[float]]:
    """Return policy -> its figure in the unit of the run, for each seed; empty where a page has the figures."""
    found: dict[str, list[float]] = {}
    for seed in seeds if run.problem else ():
        assert run.problem is not None
        problem = problem_of(run.problem, seed)
        for policy in POLICIES:
            found.setdefault(policy, []).append(_figure(problem, problem.planned(policy).plan, run.unit))
    return found


def _figure(problem: Problem, plan: Plan, unit: str) -> float:
    seconds = simulate(plan, problem.cost_model).iteration_s
    if unit == "TFLOP/s/GPU":
        true, _ = plan_flops(problem.model, plan)
        return tflops_per_rank(true.model_flops, seconds, problem.topology.world_size)
    return {"ms": 1e3 * seconds, "s": seconds, "K tokens/s": plan.num_tokens / seconds / 1e3}[unit]


def gains_of(run: VariableRun, figures: Mapping[str, Sequence[float]], policy: str) -> list[float]:
    """Return how much better `policy` is than static, for each seed."""
    pairs = zip(figures["static"], figures[policy], strict=True)
    return [static / ours if FIGURES[run.unit] == "lower" else ours / static for static, ours in pairs]


def markdown(runs: Sequence[VariableRun], figures: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Return the table of gains."""
    rows = []
    for run, found in zip(runs, figures, strict=True):
        published = " → ".join(f"{figure:g}" for figure in run.published)
        ours = [run.elsewhere, "–", "–"]
        if found:
            ours = [" → ".join(f"{fmean(found[policy]):.4g}" for policy in POLICIES)]
            ours += [_range(gains_of(run, found, policy)) for policy in POLICIES[1:]]
        cells = [run.name, f"{published} {run.unit}" if published else "–", run.gain, *ours]
        rows.append([*cells, f"{run.why} Assumed: {run.assumed}. [{run.source.title}]({run.source.url})"])
    return table(
        "run | published static → dynamic | published gain | modelled static → as they ran it → ours "
        "| gain as they ran it | ours | why they differ, what is assumed, source",
        rows,
    )


def _range(gains: Sequence[float]) -> str:
    return f"{fmean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"
