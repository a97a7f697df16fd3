"""Table C: the setup for which NVIDIA published its gain, planned and priced by us.

Published (blog of Megatron-Core's dynamic CP): Llama 13B, global batch 2048, PP 8, CP 8, full recomputation; GitHub
195.88 -> 289.32 TFLOPS per GPU, CommonCrawl 139.17 -> 174.39. Unpublished: the lengths, the number of data-parallel
ranks, the token limit. So lengths like them, cut at 128k as in NVIDIA's script, are planned for, and lanes are swept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from benchmarks.planner.problem import Problem
from benchmarks.planner.report import Row, table
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pricing.work import plan_flops, tflops_per_rank
from dynamic_cp.types import Plan, PlanOptions, Topology

GITHUB, COMMON_CRAWL = (195.88, 289.32), (139.17, 174.39)
"""(static, dynamic) TFLOPS per GPU of the blog."""
PUBLISHED = {
    "lognormal-github": GITHUB,
    "github_bal": GITHUB,
    "lognormal-cc": COMMON_CRAWL,
    "webprose_ccfit": COMMON_CRAWL,
}
"""Lengths of ours -> what was published for lengths that they may resemble."""

CP_SIZE = 8
MAX_SEQLEN = 131072
LANES = (8, 16, 32, 64)
PACK_LIMIT, SCRIPT_LIMIT = MAX_SEQLEN // CP_SIZE, 65536
"""Tokens per rank: what packs of 128k at CP 8 hold, and what NVIDIA's script of the dynamic run gives."""


def measure(
    lanes: Sequence[int] = LANES,
    num_samples: int = 2048,
    workloads: Sequence[str] = tuple(PUBLISHED),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Row]:
    """Return a row for each kind of lengths, number of lanes and seed."""
    return [
        _row(workload, num_lanes, num_samples, seed) for workload in workloads for num_lanes in lanes for seed in seeds
    ]


def _row(workload: str, num_lanes: int, num_samples: int, seed: int) -> Row:
    problem = Problem(
        name=f"{workload} on {num_lanes} lanes",
        seqlens=draw_lengths(workload, num_samples, seed, MAX_SEQLEN, min_seqlen=256),
        topology=Topology(num_lanes=num_lanes, pp_size=8),
        model=load_model("llama-2-13b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(
            max_tokens_per_rank=PACK_LIMIT, static_cp_size=CP_SIZE, recompute="full", cp_comm_types=("p2p",)
        ),
    )
    plans = {policy: problem.planned(policy).plan for policy in ("static", "balanced", "megatron-dev", "dynamic")}
    wide = replace(problem, options=replace(problem.options, max_tokens_per_rank=SCRIPT_LIMIT))
    plans["dynamic-64k"] = wide.planned().plan
    published_static, published_dynamic = PUBLISHED[workload]
    return {
        "workload": workload,
        "lanes": num_lanes,
        "seed": seed,
        "gpus": problem.topology.world_size,
        "samples": num_samples,
        "longest": int(problem.seqlens.max()),
        "tokens": int(problem.seqlens.sum()),
        **{f"{policy}_tflops": _tflops(problem, plan) for policy, plan in plans.items()},
        "published_static_tflops": published_static,
        "published_dynamic_tflops": published_dynamic,
    }


def _tflops(problem: Problem, plan: Plan) -> float:
    true, _ = plan_flops(problem.model, plan)
    iteration_s = simulate(plan, problem.cost_model).iteration_s
    return tflops_per_rank(true.model_flops, iteration_s, problem.topology.world_size)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: TFLOPS per GPU and gains over static packing, each the mean over seeds (range of the gains)."""
    policies = ("static", "balanced", "megatron-dev", "dynamic", "dynamic-64k")
    cells = []
    for (workload, lanes), group in groupby(rows, key=lambda row: (row["workload"], row["lanes"])):
        seeds = list(group)
        cells.append(
            [
                workload,
                f"{lanes} ({seeds[0]['gpus']})",
                *(f"{fmean(row[f'{policy}_tflops'] for row in seeds):.0f}" for policy in policies),
                *(_gain(seeds, policy, "static") for policy in ("megatron-dev", "dynamic")),
                _gain(seeds, "dynamic", "megatron-dev"),
            ]
        )
    return table(
        "lengths | lanes (GPUs) | static | balanced | dev tuned | dynamic | dynamic, 64k limit | dev / static "
        "| dynamic / static | dynamic / dev",
        cells,
    )


def _gain(seeds: Sequence[Row], policy: str, over: str) -> str:
    gains = [row[f"{policy}_tflops"] / row[f"{over}_tflops"] for row in seeds]
    return f"{fmean(gains):.2f} ({min(gains):.2f}..{max(gains):.2f})"
