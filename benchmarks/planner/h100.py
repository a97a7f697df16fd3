"""Table B: real and synthetic lengths with the product's own H100 profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.planner.problem import Problem, best_static, cold_ms, num_empty_places, timed
from benchmarks.planner.report import Row, percent, table
from dynamic_cp import types
from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.types import CP_COMM_TYPES, CpCommType, PlanOptions, Topology


class Setting(NamedTuple):
    """One line of the table."""

    workload: str
    model: str
    pp: int
    vp: int
    lanes: int
    max_seqlen: int
    limit: int
    tp: int = 1
    samples: int = 2048
    exchanges: tuple[CpCommType, ...] = ("p2p",)

    @property
    def name(self) -> str:
        """Unique name, for --cases."""
        exchange = "" if len(self.exchanges) == 1 else "_auto"
        layout = f"tp{self.tp}_pp{self.pp}_vpp{self.vp}_n{self.lanes}"
        return f"{self.workload}_{self.model}_{layout}_{self.max_seqlen >> 10}k{exchange}"


MHA, GQA, DIT = "llama-2-13b", "llama-3-8b", "wan2.1-t2v-14b"
K = 1024
SETTINGS = (
    Setting("lognormal-github", GQA, 1, 1, 64, 128 * K, 32 * K, tp=2),
    Setting("lognormal-github", GQA, 1, 1, 64, 512 * K, 32 * K, tp=2),
    Setting("lognormal-github", GQA, 1, 1, 4096, 128 * K, 32 * K, tp=2, samples=32768),
    Setting("lognormal-github", GQA, 4, 1, 32, 512 * K, 32 * K),
    Setting("lognormal-github", MHA, 1, 1, 64, 128 * K, 32 * K, tp=2),
    Setting("lognormal-github", MHA, 4, 1, 32, 128 * K, 16 * K),
    Setting("lognormal-github", MHA, 8, 1, 32, 128 * K, 16 * K),
    Setting("lognormal-github", MHA, 8, 5, 32, 128 * K, 16 * K),
    Setting("lognormal-github", MHA, 8, 5, 32, 128 * K, 16 * K, exchanges=CP_COMM_TYPES),
    Setting("lognormal-github", MHA, 8, 1, 32, 512 * K, 32 * K),
    Setting("lognormal-github", MHA, 8, 1, 4096, 128 * K, 16 * K, samples=32768),
    Setting("lognormal-github", MHA, 4, 1, 64, 128 * K, 16 * K),
    Setting("lognormal-github", MHA, 4, 1, 128, 128 * K, 16 * K),
    Setting("lognormal-github", MHA, 8, 1, 128, 128 * K, 16 * K),
    Setting("lognormal-cc", MHA, 8, 1, 128, 32 * K, 4 * K),
    Setting("github_bal", MHA, 4, 1, 128, 128 * K, 16 * K),
    Setting("repo_dir", MHA, 4, 2, 64, 128 * K, 16 * K),
    Setting("sft_longalign", GQA, 4, 1, 256, 128 * K, 16 * K),
    Setting("lognormal-cc", GQA, 1, 1, 64, 32 * K, 8 * K),
    Setting("lognormal-cc", GQA, 4, 1, 32, 128 * K, 16 * K),
    Setting("lognormal-cc", MHA, 8, 1, 32, 32 * K, 4 * K),
    Setting("lognormal-cc", MHA, 8, 5, 32, 32 * K, 4 * K),
    Setting("lognormal-cc", MHA, 8, 5, 32, 32 * K, 4 * K, exchanges=CP_COMM_TYPES),
    Setting("github_bal", GQA, 1, 1, 64, 32 * K, 8 * K),
    Setting("github_bal", GQA, 1, 1, 64, 128 * K, 32 * K, tp=2),
    Setting("github_bal", GQA, 4, 1, 32, 128 * K, 16 * K),
    Setting("github_bal", MHA, 1, 1, 64, 128 * K, 32 * K, tp=2),
    Setting("github_bal", MHA, 8, 1, 32, 128 * K, 16 * K),
    Setting("github_bal", MHA, 8, 5, 32, 128 * K, 16 * K),
    Setting("webprose_ccfit", GQA, 1, 1, 64, 32 * K, 8 * K),
    Setting("webprose_ccfit", GQA, 4, 1, 32, 128 * K, 16 * K),
    Setting("webprose_ccfit", MHA, 8, 1, 32, 32 * K, 4 * K),
    Setting("webprose_ccfit", MHA, 8, 5, 32, 32 * K, 4 * K),
    Setting("sft_longalign", GQA, 1, 1, 64, 128 * K, 8 * K),
    Setting("sft_longalign", GQA, 4, 1, 32, 128 * K, 16 * K),
    Setting("sft_longalign", MHA, 8, 1, 32, 128 * K, 16 * K),
    Setting("sft_longalign", MHA, 8, 5, 32, 128 * K, 16 * K),
    Setting("sft_longalign", MHA, 8, 5, 32, 128 * K, 16 * K, exchanges=CP_COMM_TYPES),
    Setting("repo_dir", GQA, 1, 1, 64, 512 * K, 32 * K, tp=2),
    Setting("repo_dir", GQA, 4, 1, 32, 128 * K, 16 * K),
    Setting("repo_dir", MHA, 8, 1, 32, 128 * K, 16 * K),
    Setting("video_dit", DIT, 1, 1, 64, 512 * K, 64 * K, tp=2, samples=512),
    Setting("video_dit", DIT, 4, 1, 32, 512 * K, 32 * K, samples=512),
    Setting("video_dit", DIT, 8, 5, 32, 512 * K, 32 * K, samples=512),
)
"""Token limits fit into the memory (`problem_of` asks the memory model; full recomputation). Where memory allows, they
are large enough for static CP inside a node (8 ranks), so that no baseline is slow for its links alone."""


def problem_of(setting: Setting) -> Problem:
    """Return the problem of a line; MemoryLimitError where its token limit does not fit into the device's memory."""
    topology = Topology(
        num_lanes=setting.lanes,
        tp_size=setting.tp,
        pp_size=setting.pp,
        vp_size=setting.vp,
        sequence_parallel=setting.tp > 1,
    )
    options = PlanOptions(max_tokens_per_rank=setting.limit, recompute="full", cp_comm_types=setting.exchanges)
    model, hardware = load_model(setting.model), load_hardware("h100")
    longest_group = 1 << (-(-setting.max_seqlen // setting.limit) - 1).bit_length()
    job = types.Problem(topology=topology, model=model, hardware=hardware, options=options)
    MemoryModel(job).check_limit_fits(setting.limit, longest_group)
    return Problem(
        name=setting.name,
        seqlens=draw_lengths(setting.workload, setting.samples, 0, setting.max_seqlen),
        topology=topology,
        model=model,
        hardware=hardware,
        options=options,
    )


def measure(settings: Sequence[Setting], *, cold: bool) -> list[Row]:
    """Return a row for each setting."""
    rows, problems = [], []
    for setting in settings:
        problem = problem_of(setting)
        problems.append(problem)
        planned, warm_ms = timed(problem)
        timeline = simulate(planned.plan, problem.cost_model)
        split = timeline.split
        bound = lower_bound(problem.samples, problem.cost_model)
        static = {policy: best_static(problem, policy) for policy in ("static", "balanced")}
        rows.append(
            {
                **setting._asdict(),
                "name": setting.name,
                "num_query_groups": problem.model.num_query_groups,
                "longest": int(problem.seqlens.max()),
                "fast_s": timeline.makespan_s,
                "thorough_s": problem.seconds(problem.planned(search="thorough").plan),
                "bound_s": bound.seconds,
                "bound_binds": bound.binds,
                "static_s": static["static"].seconds,
                "static_cp_size": static["static"].cp_size,
                "balanced_s": static["balanced"].seconds,
                "balanced_cp_size": static["balanced"].cp_size,
                "lanes_per_node": problem.topology.lanes_per_node,
                "megatron_dev_s": problem.seconds(problem.planned("megatron-dev").plan),
                "num_microbatches": planned.plan.num_microbatches,
                "num_empty_places": num_empty_places(planned.plan),
                "cp_histogram": dict(planned.plan.cp_histogram),
                "busy": split.busy_fraction,
                "pipeline_bubble": split.pipeline_bubble_fraction,
                "cp_wait": split.cp_wait_fraction,
                "dp_wait": split.dp_wait_fraction,
                "warm_ms": warm_ms,
                "cold_ms": None,
                "reason": planned.reason,
            }
        )
    if cold:
        for row, cold_one in zip(rows, cold_ms([replace(problem) for problem in problems]), strict=True):
            row["cold_ms"] = cold_one
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    return table(
        "lengths | model | TP·PP·VPP·lanes | longest, limit | seconds | / bound | × static (CP) | × balanced (CP) "
        "| × dev tuned | busy | warm ms",
        (
            [
                row["workload"] + ("" if len(row["exchanges"]) == 1 else ", any exchange"),
                row["model"],
                f"{row['tp']}·{row['pp']}·{row['vp']}·{row['lanes']}",
                f"{row['longest'] / 1024:.0f}k, {row['limit'] // 1024}k",
                f"{row['fast_s']:.3f}",
                f"{row['fast_s'] / row['bound_s']:.3f}",
                *(_static(row, policy) for policy in ("static", "balanced")),
                f"{row['megatron_dev_s'] / row['fast_s']:.2f}",
                percent(row["busy"]),
                f"{row['warm_ms']:.0f}",
            ]
            for row in rows
        ),
        left=2,
    )


def _static(row: Row, policy: str) -> str:
    cp_size = row[f"{policy}_cp_size"]
    across = "*" if cp_size > row["lanes_per_node"] else ""
    return f"{row[f'{policy}_s'] / row['fast_s']:.2f} ({cp_size}{across})"
