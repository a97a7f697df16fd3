"""Plans every global batch with every policy and compares the outcomes.

A static policy has one CP size for all global batches, as a training run does: the given size, or the fastest that
holds the longest sample. Next-fit (`static`) also takes the fastest of a few token limits: the given one or lower ones.
If the token limit follows from memory, every policy gets its own, because smaller groups need smaller buffers. Dynamic
CP then also takes the fastest of several largest CP sizes, because communicators that it does not need cost memory.
`pool` computes attention in a pool of servers in every batch, `with-pool` only in batches where that is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dynamic_cp.decide.comparison.job import Job, SweepJob, batch_outcome, rates
from dynamic_cp.decide.comparison.parts import PricesByPart
from dynamic_cp.decide.comparison.values import Comparison, OtherPrice, PlanOutcome, PolicyOutcome, PoolOutcome
from dynamic_cp.decide.plan_in_memory import fits_and_seconds, options_in_memory
from dynamic_cp.decide.setting import Setting
from dynamic_cp.errors import InvalidInputError, MemoryLimitError, did_you_mean
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.plans.padding import padding_fraction
from dynamic_cp.pool.kind import choose, task_options_of
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.pool.search import PlannedTasks, plan_tasks
from dynamic_cp.pricing.allowed import allowed_cp_sizes, options_serving
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import POLICIES, plan_problem
from dynamic_cp.types import (
    POOL_POLICIES,
    SHARDED,
    STATIC_POLICIES,
    DataParallel,
    Hardware,
    ModelShape,
    PlannedBatch,
    PlanOptions,
    Problem,
    Sample,
    Topology,
    with_exchanges,
)

COMPARED_BY_DEFAULT = POLICIES
_STATIC_DIVISORS = (2, 4, 8)
"""The next-fit policy also tries its token limit divided by these."""

Batches = Sequence[Sequence[Sample]]
Progress = Callable[[int, int, str], None]
"""Called with (batches done over all policies, batches in all, what comes next)."""


def compared_policies(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` without repetitions; InvalidInputError: an unknown policy, or none."""
    known = (*POLICIES, *POOL_POLICIES)
    for name in names:
        if name not in known:
            raise InvalidInputError(
                f"policy {name!r} is unknown{did_you_mean(name, known)}: use some of {', '.join(known)}"
            )
    if not names:
        raise InvalidInputError(f"0 policies are given, at least 1 is needed: use some of {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def compare_policies(
    batches: Batches,
    *,
    topology: Topology,
    model: ModelShape,
    hardware: Hardware,
    options: PlanOptions,
    policies: Sequence[str] = COMPARED_BY_DEFAULT,
    limit_from_memory: bool = False,
    data_parallel: DataParallel = SHARDED,
    model_name: str = "",
    hardware_name: str = "",
    task_options: TaskOptions | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Return what each of `policies` makes of each of `batches`; only `plan_s` differs between calls.

    Args:
        batches: global batches, at least one.
        topology, model, hardware, options: as for planning; options.static_cp_size binds the static policies.
        policies: names of POLICIES and POOL_POLICIES.
        limit_from_memory: take the largest token limit that memory holds, not that of the options.
        model_name, hardware_name: kept in the result.
        task_options: for POOL_POLICIES.
        progress: called before every policy and after every batch.

    Raises:
        InvalidInputError: no batches, or an unknown policy.
        InfeasibleSampleError, MemoryLimitError: the job cannot hold a sample, or a limit.
        UnsupportedFeatureError: masks that nothing serves, or a job that can have no pool.
    """
    names = compared_policies(policies)
    _check_batches(batches)
    run = _Policies(names, len(batches), task_options, progress)
    samples = [sample for batch in batches for sample in batch]
    job = Job(
        batches=tuple(tuple(batch) for batch in batches),
        problem=Problem(
            topology=topology,
            model=model,
            hardware=hardware,
            options=options_serving(samples, model, with_exchanges(options, model, samples)),
            data_parallel=data_parallel,
        ),
        limit_from_memory=limit_from_memory,
    )
    base = job.options_of("dynamic", None)
    # The largest CP size that is given is that of dynamic groups.
    unbound = job._replace(problem=job.problem_of(replace(job.problem.options, max_cp_size=None)))
    jobs = [unbound if name in STATIC_POLICIES else job for name in names]
    outcomes = tuple(
        run.outcome(name, one, partial(_options_of, name, one, base)) for name, one in zip(names, jobs, strict=True)
    )
    ours = next((one for one in outcomes if one.policy == "dynamic"), None)
    if ours is not None:
        base = replace(base, max_tokens_per_rank=ours.max_tokens_per_rank, max_cp_size=ours.setting.max_cp_size)
    run.start("done")
    return _comparison(job, base, outcomes, (model_name, hardware_name), is_tuned=False)


def compare_settings(
    shared: SweepJob,
    settings: Sequence[Setting],
    *,
    names: tuple[str, str] = ("", ""),
    task_options: TaskOptions | None = None,
    other_prices: tuple[OtherPrice, ...] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Return what each of `settings` makes of each batch: every policy at its own layout. Raises as `compare_policies`.

    Args:
        settings: at least one, of different policies of POLICIES and POOL_POLICIES, all on as many ranks.
        names: of model and hardware, kept in the result.
        other_prices: gains under other prices, found by the search of the settings.
    """
    _check_batches(shared.batches)
    policies = [setting.policy for setting in settings]
    run = _Policies(policies, len(shared.batches), task_options, progress)
    main = next((setting for setting in settings if setting.policy == "dynamic"), settings[0])
    jobs = [Job.at(setting, shared) for setting in settings]
    outcomes = tuple(
        run.outcome(policy, job, partial(getattr, job.problem, "options"))
        for policy, job in zip(policies, jobs, strict=True)
    )
    run.start("done")
    main_job = jobs[settings.index(main)]
    comparison = _comparison(main_job, main.options(shared.search), outcomes, names, is_tuned=True)
    return replace(comparison, other_prices=other_prices)


def _comparison(
    job: Job, options: PlanOptions, policies: tuple[PolicyOutcome, ...], names: tuple[str, str], *, is_tuned: bool
) -> Comparison:
    """Return the comparison; `job` stands for those of all policies, `names` are those of model and hardware."""
    return Comparison(
        model_name=names[0],
        hardware_name=names[1] or job.problem.hardware.name,
        problem=job.problem_of(options),
        batches=job.batches,
        policies=policies,
        is_tuned=is_tuned,
    )


def _check_batches(batches: Batches) -> None:
    if not batches or not all(batches):
        raise InvalidInputError(f"{len(batches)} global batches are given, each needs at least 1 sample: give lengths")


class _Policies:
    """Runs one policy after the other, and reports progress."""

    def __init__(
        self, names: Sequence[str], num_batches: int, task_options: TaskOptions | None, progress: Progress | None
    ) -> None:
        self._task_options, self._progress = task_options, progress
        self._total, self._done, self._what = len(names) * num_batches, 0, ""

    def outcome(self, name: str, job: Job, options_of: Callable[[], PlanOptions]) -> PolicyOutcome:
        """Return what a policy makes of all batches of a job; `options_of` is called when the policy starts."""
        self.start(name)
        options = options_of()
        planner = "dynamic" if name in POOL_POLICIES else name
        prices, memory = job.prices(options), job.memory(options, planner)
        known = memory if job.problem.hardware.hbm_bytes else None
        problem = job.problem_of(options, planner)
        plan: Callable[[Sequence[Sample]], tuple[PlannedBatch | PlannedTasks, str]]
        if name in POOL_POLICIES:
            tasks = self._task_options or task_options_of(options)
            plan = partial(_plan_tasks, POOL_POLICIES[name], problem, prices.all, tasks, known)
        else:
            plan = partial(_plan, problem)
            plan(job.batches[0])  # loads compiled code, which is no part of planning a batch
        batches: list[PlanOutcome | PoolOutcome] = []
        for batch in job.batches:
            start_s = time.perf_counter()
            planned, note = plan(batch)
            planning = {"plan_s": time.perf_counter() - start_s, "note": note}
            if isinstance(planned, PlannedTasks):
                batches.append(_outcome_of_pool(job, batch, planned, prices, planning))
            else:
                batches.append(batch_outcome(job, planned, prices, memory, planning))
            self._next()
        has_largest = name not in (*STATIC_POLICIES, *POOL_POLICIES)
        return PolicyOutcome(
            setting=job.setting_of(name, options, options.max_cp_size if has_largest else None),
            batches=tuple(batches),
            available_bytes=memory.available_bytes if known else None,
        )

    def start(self, what: str) -> None:
        self._what = what
        if self._progress is not None:
            self._progress(self._done, self._total, what)

    def _next(self) -> None:
        self._done += 1
        if self._done < self._total:
            self.start(self._what)


def _options_of(policy: str, job: Job, base: PlanOptions) -> PlanOptions:
    """Return the options of a policy; where it has a choice, the fastest."""
    if policy in STATIC_POLICIES:
        return _fastest_static(policy, job)
    if policy == "dynamic" and job.limit_from_memory:
        return options_in_memory(job.problem_of(base), job.batches)
    return job.allowed_to(policy, base) if policy in POLICIES else base


def _fastest_static(policy: str, job: Job) -> PlanOptions:
    """Return options with the given CP size, or with the fastest that fits in memory (of all, if none does)."""
    topology, given = job.problem.topology, job.problem.options.static_cp_size
    sizes = [given] if given is not None else list(allowed_cp_sizes(topology, job.problem.options))
    candidates = []
    for cp_size in sizes:
        if topology.num_lanes % cp_size:
            continue
        try:
            options = job.options_of(policy, cp_size)
        except MemoryLimitError:
            if given is not None:
                raise
            continue
        table = job.cost_model(options).table
        if given is None and table.capacities[cp_size.bit_length() - 1] < job.max_seqlen:
            continue  # too small, or no allowed exchange serves it
        candidates += [replace(options, max_tokens_per_rank=limit) for limit in _limits(policy, options, cp_size, job)]
    if not candidates:  # no divisor of the lanes holds the longest sample: the planner's own choice may idle lanes
        candidates = [job.options_of(policy, None)]
    if len(candidates) == 1:
        return candidates[0]
    problems = [job.problem_of(options, policy) for options in candidates]
    return min(problems, key=lambda problem: fits_and_seconds(problem, job.batches)).options


def _limits(policy: str, options: PlanOptions, cp_size: int, job: Job) -> list[int]:
    """Return the token limits to try; next-fit fills packs to the brim, which starves a pipeline of micro-batches."""
    limit = options.max_tokens_per_rank
    if policy != "static":
        return [limit]
    least = -(-job.max_seqlen // cp_size) + 2 * job.problem.topology.rank_token_multiple  # with padding
    return [limit, *(limit // divisor for divisor in _STATIC_DIVISORS if limit // divisor >= least)]


def _plan(problem: Problem, batch: Sequence[Sample]) -> tuple[PlannedBatch, str]:
    return plan_problem(problem, batch), ""


def _plan_tasks(
    use: str,
    problem: Problem,
    prices: CostModel,
    task_options: TaskOptions,
    memory: MemoryModel | None,
    batch: Sequence[Sample],
) -> tuple[PlannedBatch | PlannedTasks, str]:
    """Return (plan, why): a pool's, or the dynamic one if `use` is "auto" and that is faster."""
    if use == "auto":
        choice = choose(batch, problem, prices, task_options, memory)
        return choice.planned, choice.reason
    planned = plan_tasks(batch, prices, task_options, memory=memory)
    return planned, planned.reason


def _outcome_of_pool(
    job: Job, batch: Sequence[Sample], pool: PlannedTasks, prices: PricesByPart, planning: dict[str, Any]
) -> PoolOutcome:
    return PoolOutcome(
        num_microbatches=pool.plan.num_microbatches,
        padding_fraction=padding_fraction(pool.plan),
        peak_bytes=pool.peak_bytes or None,
        pool=pool,
        **planning,
        **rates(job, tuple(batch), pool.makespan_s, pool.iteration_s(prices.all), prices),
    )
