"""Outlier queues of WLB-LLM: long documents wait until there is one for each micro-batch, so that all get as many.

They change which documents a global batch has, which neither this project nor DistCA does. So a series of batches is
timed, and all seconds are of as much work as a batch has on average: what still waits at the end is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from benchmarks.disaggregated.setting import Case, K, cost_model_of, gathering, memory_of
from benchmarks.peers import wlb
from benchmarks.planner.report import Row, table
from dynamic_cp.errors import InfeasibleSampleError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pool.search import plan_tasks
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Sample

CASES = tuple(
    Case("8B", data, longest, 64 * pp, pp, 2 * pp)
    for data, longest, pp in product(("pretrain", "prolong"), (128 * K, 512 * K), (1, 4))
)
NUM_BATCHES, NUM_COUNTED = 16, 8
"""Batches of a series, and how many of them count: the first ones fill the queues."""
LEVELS = ((0.5,), (0.5, 0.25), (0.5, 0.25, 0.125))
"""Each queue takes documents above a share of the longest one; the best of these settings is taken."""
NAMES = ("wlb-exposed", "wlb-exposed, queues", "wlb", "wlb, queues", "dynamic", "chosen")


def queued(
    batches: Sequence[Sequence[Sample]], levels: Sequence[float], longest: int, num_rows: int
) -> list[list[Sample]]:
    """Return the batches that are trained on, in which documents of a queue come `num_rows` at a time.

    Args:
        batches: as they are drawn.
        levels: shares of `longest`, descending; a document waits with others between the same two.
        longest: tokens.
        num_rows: micro-batches of a global batch.
    """
    waiting: list[list[int]] = [[] for _ in levels]
    trained = []
    for batch in batches:
        lengths = []
        for sample in batch:
            level = next((k for k, share in enumerate(levels) if sample.seqlen > share * longest), None)
            (lengths if level is None else waiting[level]).append(sample.seqlen)
        for queue in waiting:
            num_ready = len(queue) // num_rows * num_rows
            lengths += queue[:num_ready]
            del queue[:num_ready]
        trained.append([Sample(sample_id=number, seqlen=seqlen) for number, seqlen in enumerate(lengths)])
    return trained


def work_of(batches: Sequence[Sequence[Sample]], cost_model: CostModel) -> float:
    """Return the nanoseconds of all documents, each alone on a lane."""
    return sum(
        cost_model.duration_ns(1, 0, one.seqlen, cost_model.model.squared_tokens(one))
        for batch in batches
        for one in batch
    )


def wlb_s(batches: Sequence[Sequence[Sample]], cost_model: CostModel) -> float:
    """Return the seconds of a WLB-LLM-like planner."""
    found = [wlb.peer(batch, cost_model).seconds for batch in batches if batch]
    assert all(seconds is not None for seconds in found)
    return sum(seconds for seconds in found if seconds is not None)


def measure(case: Case, num_batches: int = NUM_BATCHES, num_counted: int = NUM_COUNTED) -> Row:
    """Return seconds of a global batch of mean work, by name."""
    drawn = [case.samples(seed) for seed in range(num_batches)]
    problem = case.problem()
    cost_model, memory = cost_model_of(problem), memory_of(problem)
    exposed = cost_model_of(gathering(problem))
    counted = drawn[-num_counted:]
    work = work_of(counted, cost_model)
    row: Row = {"case": case}
    for name, prices in (("wlb-exposed", exposed), ("wlb", cost_model)):
        row[name] = wlb_s(counted, prices) / num_counted
        best = min(
            wlb_s(trained, prices) * work / work_of(trained, cost_model)
            for trained in (queued(drawn, levels, case.longest, case.rows)[-num_counted:] for levels in LEVELS)
        )
        row[f"{name}, queues"] = best / num_counted
    dynamic_s = [makespan_ns(plan_problem(problem, one).plan, cost_model) / 1e9 for one in counted]
    row["dynamic"] = sum(dynamic_s) / num_counted
    row["chosen"] = sum(map(min, dynamic_s, (_pool_s(one, cost_model, memory) for one in counted))) / num_counted
    return row


def _pool_s(batch: Sequence[Sample], cost_model: CostModel, memory: MemoryModel) -> float:
    try:
        return plan_tasks(batch, cost_model, memory=memory).makespan_s
    except InfeasibleSampleError:  # of memory, where a document and six other micro-batches are kept
        return math.inf


def markdown(rows: Sequence[Row]) -> str:
    """Return a line for each case."""
    header = "job | " + " | ".join(NAMES) + " | wlb, queues / chosen"
    lines = []
    for row in rows:
        ratio = row["wlb, queues"] / row["chosen"]
        lines.append((row["case"].name, *(f"{row[name]:.2f}" for name in NAMES), f"{ratio:.2f}"))
    return table(header, lines)
