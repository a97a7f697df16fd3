"""Table C: the set-up with which NVIDIA published its gain, planned and priced by us.

Published (blog of Megatron-Core's dynamic CP): Llama 13B, global batch 2048, PP 8, CP 8, full recomputation; GitHub
195.88 -> 289.32 TFLOPS per GPU, CommonCrawl 139.17 -> 174.39. Unpublished: the lengths, the number of data-parallel
ranks, the token limit. So the lengths are our lognormals, cut at 128k as in NVIDIA's script, and lanes are swept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.planner.problem import Problem
from benchmarks.planner.report import Row, table
from dynamic_cp.catalog import load_hardware, load_model
from dynamic_cp.flops import plan_flops, tflops_per_rank
from dynamic_cp.simulator import simulate
from dynamic_cp.types import Plan, PlanOptions, Topology
from dynamic_cp.workloads import draw_lengths

PUBLISHED = {"lognormal-github": (195.88, 289.32), "lognormal-cc": (139.17, 174.39)}
"""Lengths -> (static, dynamic) TFLOPS per GPU of the blog."""

CP_SIZE = 8
MAX_SEQLEN = 131072
LANES = (8, 16, 32, 64, 128)
DYNAMIC_LIMITS = (16384, 65536)
"""Tokens per rank: what packs of 128k at CP 8 hold, and what NVIDIA's script of the dynamic run gives."""


def measure(lanes: Sequence[int] = LANES, num_samples: int = 2048) -> list[Row]:
    """Return a row for each kind of lengths and number of lanes."""
    return [_row(workload, num_lanes, num_samples) for workload in PUBLISHED for num_lanes in lanes]


def _row(workload: str, num_lanes: int, num_samples: int) -> Row:
    problem = Problem(
        name=f"{workload} on {num_lanes} lanes",
        seqlens=draw_lengths(workload, num_samples, 0, MAX_SEQLEN, min_seqlen=256),
        topology=Topology(num_lanes=num_lanes, pp_size=8),
        model=load_model("llama-2-13b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(
            max_tokens_per_rank=MAX_SEQLEN // CP_SIZE, static_cp_size=CP_SIZE, recompute="full", search="thorough"
        ),
    )
    plans = {policy: problem.planned(policy).plan for policy in ("static", "balanced", "megatron-dev", "dynamic")}
    wide = replace(problem, options=replace(problem.options, max_tokens_per_rank=DYNAMIC_LIMITS[1]))
    plans["dynamic-64k"] = wide.planned().plan
    published_static, published_dynamic = PUBLISHED[workload]
    return {
        "workload": workload,
        "lanes": num_lanes,
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
    """Return the table: TFLOPS per GPU and gains over static packing."""

    def gain(row: Row, policy: str) -> str:
        return f"{row[f'{policy}_tflops'] / row['static_tflops']:.2f}"

    return table(
        "lengths | lanes (GPUs) | static | balanced | dev tuned | dynamic | dynamic, 64k limit | dev / static "
        "| dynamic / static | dynamic 64k / static | dynamic / balanced | published static → dynamic | published gain",
        (
            [
                row["workload"],
                f"{row['lanes']} ({row['gpus']})",
                *(
                    f"{row[f'{policy}_tflops']:.0f}"
                    for policy in ("static", "balanced", "megatron-dev", "dynamic", "dynamic-64k")
                ),
                gain(row, "megatron-dev"),
                gain(row, "dynamic"),
                gain(row, "dynamic-64k"),
                f"{row['dynamic_tflops'] / row['balanced_tflops']:.2f}",
                f"{row['published_static_tflops']:.0f} → {row['published_dynamic_tflops']:.0f}",
                f"{row['published_dynamic_tflops'] / row['published_static_tflops']:.2f}",
            ]
            for row in rows
        ),
    )
