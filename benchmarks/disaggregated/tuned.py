"""The pool against dynamic CP, each at its own fastest layout on the same GPUs.

The cases are those in which the pool gains most at the layout of `steps`: 512k documents, one and two full
micro-batches for each stage. `dynamic_cp.decide.sweep` looks for TP, PP, VPP, recomputation and limit within memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.disaggregated.setting import Case, K, cost_model_of, memory_of
from benchmarks.disaggregated.steps import PIPELINES, faster, geometric
from benchmarks.planner.report import Row, table
from dynamic_cp.decide.sweep import Space, SweepJob, sweep
from dynamic_cp.errors import DynamicCPError
from dynamic_cp.pool.search import plan_tasks
from dynamic_cp.search.search import plan_problem

CASES = tuple(case for case in PIPELINES if case.longest == 512 * K and case.rows <= 2 * case.pp)


def measure(case: Case) -> Row:
    """Return the seconds of an iteration at the given layout and at its own, and that layout. Gradients are reduced in
    all of them, because layouts differ in the time for that.
    """
    samples = case.samples()
    row: Row = {"case": case, "dynamic": None, "pool": None}
    for vp_size in (1, 2):
        problem = case.problem(vp_size)
        row["dynamic"] = faster(row["dynamic"], plan_problem(problem, samples).predicted_s)
        try:
            found = plan_tasks(samples, cost_model_of(problem), memory=memory_of(problem))
        except DynamicCPError:
            continue
        row["pool"] = faster(row["pool"], found.iteration_s(cost_model_of(problem)))
    job = SweepJob(
        batches=(tuple(samples),), max_seqlen=max(one.seqlen for one in samples), model=case.problem().model,
        hardware=case.hardware,
    )  # fmt: skip
    best = sweep(Space(num_gpus=case.gpus, recompute=("none", "full")), job).best["dynamic"]
    return row | {"tuned": best.iteration_s, "setting": best.setting.words, "peak_bytes": best.peak_bytes}


def markdown(rows: Sequence[Row]) -> str:
    """Return a line for each case, and one of all."""
    lines = [
        (
            row["case"].name, *(f"{row[name]:.2f}" for name in ("dynamic", "pool", "tuned")),
            f"{row['tuned'] / row['pool']:.2f}", row["setting"], f"{row['peak_bytes'] / 1e9:.0f} GB",
        )
        for row in rows
    ]  # fmt: skip
    lines.append((f"all {len(rows)}", "", "", "", geometric([row["tuned"] / row["pool"] for row in rows]), "", ""))
    header = "job | dynamic, given layout | pool, given layout | dynamic, its own layout | over the pool | that layout"
    return table(f"{header} | memory", lines)
