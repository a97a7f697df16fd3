"""Policies whose attention is tasks of servers: planned and priced for comparisons, by `dynamic_cp.disaggregation`.

stage-tasks     tasks for the lanes of a stage, on the stock schedule, as placed attention
pool            tasks for the servers of all stages, in ticks
pool-quota      the same ticks and homes, every lane computes its own queries
pool-distca     the same ticks, documents in order and DistCA's rule
pool-dedicated  ticks in which some ranks hold no weights and only serve (`TaskOptions.attention_servers`)
with-pool       the faster of dynamic and pool, batch by batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynamic_cp.comparison.job import Job, batch_outcome, rates
from dynamic_cp.comparison.parts import PricesByPart
from dynamic_cp.comparison.values import BatchOutcome, PolicyOutcome
from dynamic_cp.disaggregation.dedicated import plan_dedicated, problem_without
from dynamic_cp.disaggregation.prices import TaskOptions
from dynamic_cp.disaggregation.search import PlannedTasks, plan_stage_tasks, plan_tasks
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.padding import padding_fraction
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.resolution import problem_of_prices
from dynamic_cp.search.choice import choose
from dynamic_cp.setting import DEDICATED
from dynamic_cp.types import BY_PLACEMENT, PlannedBatch, PlanOptions, Problem, Sample

_METHODS = {"pool": "pool", "pool-quota": "quota", "pool-distca": "paper"}


def outcome_of_tasks(
    name: str, job: Job, options: PlanOptions, task_options: TaskOptions, count: Callable[[], None]
) -> PolicyOutcome:
    """Return what a policy of `setting.TASK_POLICIES` makes of all batches, `count` being called after each.

    Raises:
        UnsupportedFeatureError, InfeasibleSampleError: as `plan_tasks`; "with-pool" then has the dynamic plan.
    """
    placed = replace(options, cp_comm_types=tuple(dict.fromkeys((*options.cp_comm_types, BY_PLACEMENT))))
    memory = job.memory(options, None)
    known = memory if job.hardware.hbm_bytes else None
    prices = job.prices(placed if name == "stage-tasks" else options)
    problem = job.problem_of(options)
    batches = []
    for batch in job.batches:
        start_s = time.perf_counter()
        if name == "stage-tasks":
            planned = _stage_plan(batch, prices)
            batches.append(batch_outcome(job, planned, prices, memory, time.perf_counter() - start_s, planned.reason))
        elif name == "with-pool":
            choice = choose(batch, problem, prices.all, task_options, known)
            plan_s = time.perf_counter() - start_s
            if isinstance(choice.planned, PlannedTasks):
                batches.append(_outcome(job, batch, choice.planned, prices, memory, plan_s, choice.reason))
            else:
                batches.append(batch_outcome(job, choice.planned, prices, memory, plan_s, choice.reason))
        elif name == DEDICATED:
            found = _with_dedicated(batch, problem, task_options, knows_memory=known is not None)
            plan_s = time.perf_counter() - start_s
            batches.append(_outcome(job, batch, found, prices, memory, plan_s, found.reason))
        else:
            found = plan_tasks(batch, prices.all, task_options, method=_METHODS[name], memory=known)
            plan_s = time.perf_counter() - start_s
            batches.append(_outcome(job, batch, found, prices, memory, plan_s, found.reason))
        count()
    return PolicyOutcome(
        setting=job.setting_of(name, options),
        batches=tuple(batches),
        available_bytes=memory.available_bytes if job.hardware.hbm_bytes else None,
    )


def _with_dedicated(
    batch: Sequence[Sample], problem: Problem, task_options: TaskOptions, *, knows_memory: bool
) -> PlannedTasks:
    """Return the fastest way with dedicated servers, of the lanes that are left."""
    left = problem_without(problem, task_options.attention_servers)
    cost_model = CostModel(problem_of_prices(left))
    memory = MemoryModel(left) if knows_memory else None
    return plan_dedicated(batch, cost_model, task_options, memory=memory)


def _stage_plan(batch: Sequence[Sample], prices: PricesByPart) -> PlannedBatch:
    _, plan = plan_stage_tasks(batch, prices.all)
    timeline = simulate(plan, prices.all)
    return PlannedBatch(
        plan=plan,
        predicted_s=timeline.iteration_s,
        predicted_busy_s=timeline.lane_busy_s,
        reason=f"stage-tasks: m={plan.num_microbatches}",
    )


def _outcome(
    job: Job,
    batch: Sequence[Sample],
    found: PlannedTasks,
    prices: PricesByPart,
    memory: MemoryModel,
    plan_s: float,
    note: str,
) -> BatchOutcome:
    return BatchOutcome(
        planned=None,
        timeline=None,
        parts=None,
        num_microbatches=found.plan.num_microbatches,
        padding_fraction=padding_fraction(found.plan),
        peak_bytes=found.peak_bytes or None,
        sent_in_node_bytes=None,
        sent_across_nodes_bytes=None,
        plan_s=plan_s,
        note=note,
        pool=found if found.plan.pool is not None else None,
        **rates(job, tuple(batch), found.makespan_s, prices),
    )
