"""Policies with a pool: attention as tasks for the servers of all stages (`dynamic_cp.pool`).

pool            in every batch
with-pool       where it is faster than dynamic, batch by batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dynamic_cp.decide.comparison.job import Job, batch_outcome, rates
from dynamic_cp.decide.comparison.parts import PricesByPart
from dynamic_cp.decide.comparison.values import BatchOutcome, PolicyOutcome
from dynamic_cp.plans.padding import padding_fraction
from dynamic_cp.pool.choice import choose
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.pool.search import PlannedTasks, plan_tasks
from dynamic_cp.setting import POOL_POLICIES
from dynamic_cp.types import PlanOptions, Sample


def outcome_of_tasks(
    name: str, job: Job, options: PlanOptions, task_options: TaskOptions, count: Callable[[], None]
) -> PolicyOutcome:
    """Return what a policy of `setting.POOL_POLICIES` makes of all batches, `count` being called after each.

    Raises:
        UnsupportedFeatureError, InfeasibleSampleError: as `plan_tasks`; "with-pool" then has the dynamic plan.
    """
    memory = job.memory(options)
    known = memory if job.hardware.hbm_bytes else None
    prices = job.prices(options)
    problem = job.problem_of(options)
    batches = []
    for batch in job.batches:
        start_s = time.perf_counter()
        if POOL_POLICIES[name] == "auto":
            choice = choose(batch, problem, prices.all, task_options, known)
            planned, note = choice.planned, choice.reason
        else:
            planned = plan_tasks(batch, prices.all, task_options, memory=known)
            note = planned.reason
        plan_s = time.perf_counter() - start_s
        if isinstance(planned, PlannedTasks):
            batches.append(_outcome(job, batch, planned, prices, plan_s, note))
        else:
            batches.append(batch_outcome(job, planned, prices, memory, plan_s, note))
        count()
    return PolicyOutcome(
        setting=job.setting_of(name, options),
        batches=tuple(batches),
        available_bytes=memory.available_bytes if job.hardware.hbm_bytes else None,
    )


def _outcome(
    job: Job, batch: Sequence[Sample], pool: PlannedTasks, prices: PricesByPart, plan_s: float, note: str
) -> BatchOutcome:
    return BatchOutcome(
        planned=None,
        timeline=None,
        parts=None,
        num_microbatches=pool.plan.num_microbatches,
        padding_fraction=padding_fraction(pool.plan),
        peak_bytes=pool.peak_bytes or None,
        sent_in_node_bytes=None,
        sent_across_nodes_bytes=None,
        plan_s=plan_s,
        note=note,
        pool=pool,
        **rates(job, tuple(batch), pool.makespan_s, pool.iteration_s(prices.all), prices),
    )
