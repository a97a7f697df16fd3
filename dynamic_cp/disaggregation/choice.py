"""The fastest plan of a global batch, a pool of all stages among the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamic_cp.disaggregation.prices import TaskOptions
from dynamic_cp.disaggregation.search import PlannedTasks, plan_tasks
from dynamic_cp.errors import InfeasibleSampleError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import PlannedBatch, Problem, Sample


class Choice(NamedTuple):
    """What is faster, by simulated time.

    Attributes:
        makespan_s: of it.
        planned: a plan, or one of tasks in ticks.
        reason: one line: which, against which.
    """

    makespan_s: float
    planned: PlannedBatch | PlannedTasks
    reason: str

    @property
    def is_pool(self) -> bool:
        """Whether attention goes to servers of all stages."""
        return isinstance(self.planned, PlannedTasks)


def choose(
    samples: Sequence[Sample],
    problem: Problem,
    cost_model: CostModel,
    options: TaskOptions | None = None,
    memory: MemoryModel | None = None,
) -> Choice:
    """Return the faster of dynamic CP, with placed attention where `problem` allows it, and a pool.

    A pool that this job cannot have, or that memory does not hold, is left out, with the reason.

    Args:
        samples: at least one.
        problem: with policy "dynamic".
        cost_model: its prices.
        options, memory: as of `plan_tasks`.

    Raises:
        DynamicCPError: as `plan_problem`.
    """
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
