"""The pool as a kind of plan (`plans.extension`), and the choice between a pool and dynamic CP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dynamic_cp.errors import InfeasibleSampleError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.extension import PlanKind
from dynamic_cp.pool import legal, text
from dynamic_cp.pool.homes import TILE_TOKENS
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.pool.search import PlannedTasks, plan_tasks
from dynamic_cp.pricing.allowed import problem_of_prices
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import PlannedBatch, PlanOptions, Problem, Sample

_SMALL, _SMALL_TILE_TOKENS = 8, 16
"""With fewer tiles per rank, documents are cut finer: a lane's share is whole tiles of its head and of its tail."""


class Choice(NamedTuple):
    """The faster plan by simulated time: its makespan, a plan or one of tasks in ticks, and in one line which won
    against which."""

    makespan_s: float
    planned: PlannedBatch | PlannedTasks
    reason: str


def choose(
    samples: Sequence[Sample],
    problem: Problem,
    cost_model: CostModel,
    options: TaskOptions | None = None,
    memory: MemoryModel | None = None,
) -> Choice:
    """Return the faster of dynamic CP, with placed attention where `problem` (policy "dynamic") allows it, and a pool
    (options and memory as in `plan_tasks`). A pool that this job cannot have, or that memory does not hold, is left
    out, with the reason. Raises as `plan_problem`."""
    planned = plan_problem(problem, samples)
    dynamic_s = makespan_ns(planned.plan, cost_model) / 1e9
    try:
        pool = plan_tasks(samples, cost_model, options, memory=memory)
    except (InfeasibleSampleError, UnsupportedFeatureError) as error:
        return Choice(dynamic_s, planned, f"dynamic; no pool: {error}")
    ratio = dynamic_s / pool.makespan_s
    if ratio > 1.0:
        return Choice(pool.makespan_s, pool, f"{pool.reason}, {ratio:.3f} times as fast as dynamic")
    return Choice(dynamic_s, planned, f"dynamic, {1 / ratio:.3f} times as fast as the pool")


def task_options_of(options: PlanOptions) -> TaskOptions:
    """Return the options of task plans of a run."""
    tile_tokens = TILE_TOKENS if options.max_tokens_per_rank >= _SMALL * TILE_TOKENS else _SMALL_TILE_TOKENS
    return TaskOptions(ping_pong=options.ping_pong, noise_margin=options.noise_margin, tile_tokens=tile_tokens)


def plan_batch(problem: Problem, samples: Sequence[Sample]) -> PlannedBatch:
    """Return the plan of a run whose options allow a pool or ask for one (`search.plan_batch`). A pool is priced as it
    runs, in two nano-batches or with exposed exchanges, and with the margin for noise; it has to fit into the
    hardware's memory, if that is known. Raises as `plan_problem`; with pool "always" as `plan_tasks`."""
    options = problem.options
    cost_model = CostModel(problem_of_prices(problem))
    memory = MemoryModel(problem) if problem.hardware.hbm_bytes else None
    tasks = task_options_of(options)
    if options.pool == "always":
        return plan_tasks(samples, cost_model, tasks, memory=memory).planned_batch(cost_model)
    choice = choose(samples, problem, cost_model, tasks, memory)
    if isinstance(choice.planned, PlannedTasks):
        return choice.planned.planned_batch(cost_model, choice.reason)
    planned = choice.planned
    return replace(planned, reason=f"{planned.reason}; {choice.reason}")


KIND = PlanKind(
    check=legal.check_pool,
    why_illegal=legal.why_not_homed,
    to_dict=text.pool_to_dict,
    from_dict=text.pool_from_dict,
    settings=text.settings,
    lines=text.lines,
    parse=text.parse,
    encode=text.encode_ticks,
    why_no_timeline=legal.why_no_timeline,
    peak=legal.peak,
    peak_at=legal.peak_at,
    least_at=legal.least_at,
    plan=plan_batch,
)
