"""A global batch with everything its plan depends on, and the measurements that all tables share.

Milliseconds are CPU time of the planning process: the planner has one thread, and CPU time does not count what else the
machine does.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from dynamic_cp import types
from dynamic_cp.arrays import Ints
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pricing.allowed import allowed_cp_sizes, capacity_tokens
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import Hardware, ModelShape, Plan, PlannedBatch, PlanOptions, Sample, SearchEffort, Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One global batch to plan.

    Attributes:
        seqlens: tokens in input order; the sample ids are 0, 1, 2, ...
        cost_model_type: prices the finished plan; planning always pads.
    """

    name: str
    seqlens: Ints
    topology: Topology
    model: ModelShape
    hardware: Hardware
    options: PlanOptions
    cost_model_type: type[CostModel] = CostModel

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The global batch."""
        return tuple(Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(self.seqlens.tolist()))

    @cached_property
    def cost_model(self) -> CostModel:
        """What prices the finished plan."""
        problem = types.Problem(topology=self.topology, model=self.model, hardware=self.hardware, options=self.options)
        return self.cost_model_type(problem)

    def planned(self, policy: str = "dynamic", search: SearchEffort = "fast") -> PlannedBatch:
        """Return the plan of `policy`."""
        return plan_global_batch(
            self.samples,
            topology=self.topology,
            model=self.model,
            hardware=self.hardware,
            options=replace(self.options, search=search),
            policy=policy,
        )

    def seconds(self, plan: Plan) -> float:
        """Return the makespan of `plan`, without the gradient reduction, which no plan changes."""
        return makespan_ns(plan, self.cost_model) / 1e9


class Static(NamedTuple):
    """The best of a static policy over all CP sizes that hold the longest sample."""

    seconds: float
    cp_size: int
    plan: Plan


def best_static(problem: Problem, policy: str) -> Static:
    """Return the fastest CP size for `policy`, "static" or "balanced"."""
    topology, options = problem.topology, problem.options
    found = []
    for cp_size in allowed_cp_sizes(topology, options):
        holds = capacity_tokens(cp_size, topology, options) >= problem.seqlens.max()
        if holds and topology.num_lanes % cp_size == 0:
            one = replace(problem, options=replace(options, static_cp_size=cp_size))
            plan = one.planned(policy).plan
            found.append(Static(problem.seconds(plan), cp_size, plan))
    return min(found, key=lambda static: static.seconds)


def plan_ms(problem: Problem, search: SearchEffort = "fast") -> float:
    """Return the CPU milliseconds of making the plan once; creating the samples is not counted."""
    _ = problem.samples
    start_s = time.process_time()
    problem.planned(search=search)
    return (time.process_time() - start_s) * 1e3


def timed(problem: Problem, num_repeats: int = 3, search: SearchEffort = "fast") -> tuple[PlannedBatch, float]:
    """Return the plan and the median CPU milliseconds of making it, after one call that is not counted."""
    planned = problem.planned(search=search)
    return planned, statistics.median(plan_ms(problem, search) for _ in range(num_repeats))


def cold_ms(problems: Sequence[Problem]) -> list[float]:
    """Return CPU milliseconds of the first plan of a new process, one for each problem.

    Imports are done, compiled code is loaded from disk.
    """
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(plan_ms, problems, chunksize=1)


def peak_bytes(problem: Problem) -> int:
    """Return the largest resident size of a new process that plans `problem` and does nothing else (Linux)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_bytes, (problem,))


def num_empty_places(plan: Plan) -> int:
    """Return the places (lane, micro-batch) of `plan` that hold no sample."""
    return sum(not bucket.samples for bucket in plan.buckets)


def _peak_bytes(problem: Problem) -> int:
    problem.planned()
    # Not resource.getrusage: its peak starts at that of the process that spawned this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
