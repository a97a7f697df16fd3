"""Whole steps: every way to run a global batch, each with its own best number of micro-batches, order and limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np

from benchmarks.disaggregated.queues import wlb_s
from benchmarks.disaggregated.scheduler import met
from benchmarks.disaggregated.sent import bytes_of_tasks
from benchmarks.disaggregated.setting import Case, K, cost_model_of, gathering, memory_of
from benchmarks.planner.report import Row, table
from dynamic_cp.decide.comparison import compare_policies
from dynamic_cp.errors import DynamicCPError
from dynamic_cp.mechanisms.placed_seconds import token_bytes
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pool.legal import servers_of
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.pool.search import plan_tasks
from dynamic_cp.pool.tasks import ticks_of
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Plan, Problem, Sample

WITHOUT = ("static", "wlb", "wlb-exposed", "per-document", "dynamic", "dynamic VPP 2")
"""Ways without a pool."""
POOLS = ("pool", "pool VPP 2")
"""Ways to run our pool; the fastest counts."""
NAMES = (*WITHOUT, *POOLS)
LISTED = tuple(name for name in NAMES if name != "per-document")
"""Ways that the page lists; cutting every document over all lanes is left out, because it was never the fastest."""
CHUNKS = (3, 4)
"""Further numbers of chunks on a stage, tried by both sides if they divide its layers, for one row of the goals."""
DEEPER = ("dynamic VPP 3, 4", "pool VPP 3, 4")
TIMES = (1, 2, 4)
"""Full micro-batches of a global batch, as multiples of the pipeline's stages."""
MODELS, DATA = ("8B", "34B"), ("pretrain", "prolong")
ONE_STAGE = tuple(
    Case(model, data, longest, 64, 1, 2) for model, data, longest in product(MODELS, DATA, (128 * K, 512 * K))
)
PIPELINES = tuple(
    Case(model, data, longest, 8 * lanes * pp, pp, times * pp)
    for longest, lanes in ((512 * K, 8), (128 * K, 4))
    for pp, model, data, times in product((4, 8), MODELS, DATA, TIMES)
)
TWO_STAGES = tuple(Case(model, data, 512 * K, 128, 2, 4) for model, data in product(MODELS, DATA))
BETWEEN = tuple(Case(model, data, 256 * K, 256, 4, 8) for model, data in product(MODELS, DATA))
NETWORKS = tuple(
    Case("8B", data, 512 * K, 64 * pp, pp, 2 * pp, gb_per_s)
    for data, pp, gb_per_s in product(DATA, (1, 4), (15.0, 40.0, 80.0))
)


def measure(case: Case, seed: int = 0) -> Row:
    """Return the makespan in seconds of every way; None where one has no plan."""
    samples, problem = case.samples(seed), case.problem()
    compared = compare_policies(
        [samples], topology=problem.topology, model=problem.model, hardware=problem.hardware, options=problem.options,
        policies=("static",),
    )  # fmt: skip
    cost_model = cost_model_of(problem)
    row: Row = {"case": case, "static": compared.policy("static").batches[0].makespan_s}
    row["wlb"] = wlb_s([samples], cost_model)
    row["wlb-exposed"] = wlb_s([samples], cost_model_of(gathering(problem)))
    row["dynamic"] = dynamic_s(problem, samples)
    row["per-document"] = _per_document_s(problem, samples)
    row["pool"] = None
    with suppress(DynamicCPError):
        found = plan_tasks(samples, cost_model, memory=memory_of(problem))
        row |= {"pool": found.makespan_s, "busiest": busiest(found.plan, cost_model)}
    _add_chunks(row, case, samples)
    return row


def _add_chunks(row: Row, case: Case, samples: Sequence[Sample]) -> None:
    """Add the ways with model chunks; where the pool is faster with two, its busiest server is that of this plan."""
    row |= dict.fromkeys(("dynamic VPP 2", "pool VPP 2", *DEEPER))
    num_layers = case.problem().model.num_layers
    for vp_size in (2, *CHUNKS):
        if case.pp == 1 or num_layers % (case.pp * vp_size):
            continue
        problem = case.problem(vp_size)
        names = ("dynamic VPP 2", "pool VPP 2") if vp_size == 2 else DEEPER
        row[names[0]] = faster(row[names[0]], dynamic_s(problem, samples))
        try:
            found = plan_tasks(samples, cost_model_of(problem), memory=memory_of(problem))
        except DynamicCPError:
            continue
        if vp_size == 2 and (row["pool"] is None or found.makespan_s < row["pool"]):
            row["busiest"] = busiest(found.plan, cost_model_of(problem))
        row[names[1]] = faster(row[names[1]], found.makespan_s)


def faster(*seconds: float | None) -> float | None:
    return min((one for one in seconds if one is not None), default=None)


def dynamic_s(problem: Problem, samples: Sequence[Sample]) -> float:
    return makespan_ns(plan_problem(problem, samples).plan, cost_model_of(problem)) / 1e9


def _per_document_s(problem: Problem, samples: Sequence[Sample]) -> float:
    """Return the seconds where every document lies on all lanes, and keys are gathered before attention."""
    options = replace(gathering(problem).options, static_cp_size=problem.topology.num_lanes)
    sharded = replace(problem, options=options, policy="static")
    return makespan_ns(plan_problem(sharded, samples).plan, cost_model_of(sharded)) / 1e9


def busiest(plan: Plan, cost_model: CostModel) -> float:
    """Return, over all ticks, the bytes of the server that sends or receives most, over those of the mean server.

    Jobs compute layers again, so backward sends what both passes need.
    """
    assert plan.extension is not None
    of_token, servers = token_bytes(cost_model.stage.attention), servers_of(plan.topology, plan.extension.relay_servers)
    most = mean = 0.0
    for tick, tasks in ticks_of(plan):
        sent = bytes_of_tasks(tasks, (0, 1)[: 1 + KINDS.index(tick.kind)], servers, of_token, is_kept=True)
        of_servers = sent.sum(axis=(0, 1)).max(axis=0)
        most, mean = most + float(of_servers.max()), mean + float(of_servers.mean())
    return most / mean if mean else 1.0


def measure_network(case: Case) -> Row:
    """Return the seconds of dynamic CP, and of the pool as it is, without ping-pong, and with links without cost."""
    samples, problem = case.samples(), case.problem()
    cost_model = cost_model_of(problem)
    row: Row = {"case": case, "dynamic": makespan_ns(plan_problem(problem, samples).plan, cost_model) / 1e9}
    for name, ping_pong in (("pool", True), ("single stream", False)):
        row[name] = plan_tasks(samples, cost_model, TaskOptions(ping_pong=ping_pong)).makespan_s
    free = replace(problem.hardware, bandwidth_in_node_bytes_per_s=1e18, bandwidth_across_nodes_bytes_per_s=1e18)
    row["signal"] = plan_tasks(samples, cost_model_of(replace(problem, hardware=free))).makespan_s
    return row


def without_s(row: Row, *more: str) -> float:
    """Return the seconds of the best way without a pool, among them those named in `more`."""
    return min(row[name] for name in (*WITHOUT, *more) if row[name] is not None)


def pool_s(row: Row, *more: str) -> float | None:
    """Return the seconds of the best way with our pool; None: it has none."""
    return faster(*(row[name] for name in (*POOLS, *more)))


def markdown(rows: Sequence[Row]) -> str:
    """Return a line for each case of the longest documents: seconds, and the best of all others over the pool."""
    lines = []
    longest = max(row["case"].longest for row in rows)
    for row in (row for row in rows if row["case"].longest == longest):
        cells = ["–" if row[name] is None else f"{row[name]:.2f}" for name in LISTED]
        best = pool_s(row)
        lines.append((row["case"].name, *cells, "–" if best is None else f"{without_s(row) / best:.2f}"))
    return table("job | " + " | ".join(LISTED) + " | best without / pool", lines)


def geometric(values: Sequence[float]) -> str:
    """Return the geometric mean and the range."""
    if not values:
        return "–"
    return f"{float(np.exp(np.mean(np.log(values)))):.2f} ({min(values):.2f} to {max(values):.2f})"


def summary_markdown(rows: Sequence[Row]) -> str:
    """Return the gain of the pool over other ways, by document length and stages; the others have one chunk, too."""
    lines = []
    for longest, pp in sorted({(row["case"].longest, row["case"].pp) for row in rows}):
        own = [row for row in rows if (row["case"].longest, row["case"].pp) == (longest, pp) and row["pool"]]
        gains = [without_s(row) / (pool_s(row) or inf) for row in own]
        lines.append(
            (
                f"{longest // K}k, PP {pp}", len(own),
                *(geometric([row[name] / row["pool"] for row in own if row[name]]) for name in ("wlb-exposed", "wlb")),
                geometric([row["dynamic"] / row["pool"] for row in own]),
                geometric([row["pool"] / row["pool VPP 2"] for row in own if row["pool VPP 2"]]),
                geometric(gains),
                geometric([max(gain, 1.0) for gain in gains]),
            )
        )  # fmt: skip
    header = (
        "longest, stages | cases | wlb-exposed / pool | wlb / pool | dynamic / pool | pool / pool VPP 2 | "
        "best without / pool | after choice"
    )
    return table(header, lines)


def goals_markdown(rows: Sequence[Row]) -> str:
    """Return the goals of whole steps and what is reached."""
    lines = []
    for longest, goal in ((512 * K, 1.2), (128 * K, 1.05)):
        own = [row for row in rows if row["case"].longest == longest and row["case"].pp >= 4 and row["pool"]]
        if not own:
            continue
        words = (
            f"{longest // K}k documents, PP 4 and 8 given, {len(own)} cases: best without / with the pool, after choice"
        )
        for name, dynamic, pool in ((words, (), ()), ("the same, both with up to 4 chunks", DEEPER[:1], DEEPER[1:])):
            chosen = [max(without_s(row, *dynamic) / (pool_s(row, *pool) or inf), 1.0) for row in own]
            mean = float(np.exp(np.mean(np.log(chosen))))
            lines.append((name, f"≥ {goal:g}", geometric(chosen), met(mean >= goal)))
    worst = max(row["busiest"] for row in rows if row["pool"])
    lines.append(("busiest server of the pool over the mean, worst", "≤ 2.5", f"{worst:.1f}", met(worst <= 2.5)))
    return table("figure | goal | reached: geometric mean (range) | ", lines)


def network_markdown(rows: Sequence[Row]) -> str:
    """Return a line for each pipeline and data: seconds by bandwidth."""
    names = ("dynamic", "pool", "single stream", "signal")
    lines = []
    for key in dict.fromkeys((row["case"].data, row["case"].pp) for row in rows):
        own = [row for row in rows if (row["case"].data, row["case"].pp) == key]
        lines += [(f"{key[0]}, PP {key[1]}", name, *(f"{row[name]:.2f}" for row in own)) for name in names]
    bandwidths = list(dict.fromkeys(row["case"].gb_per_s for row in rows))
    return table("job | way | " + " | ".join(f"{one:g} GB/s" for one in bandwidths), lines, left=2)
