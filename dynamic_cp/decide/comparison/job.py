"""What the settings of a sweep or the policies of a comparison share, and the outcome of one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.comparison.parts import PricesByPart, prices_by_part, time_parts
from dynamic_cp.decide.comparison.values import PlanOutcome
from dynamic_cp.decide.sent import sent_by_plan
from dynamic_cp.decide.setting import Setting, TpOverlap
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.padding import padding_fraction
from dynamic_cp.pricing.allowed import exchanges_of_policy, problem_of_prices
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.work import batch_flops, length_sums, tflops_per_rank
from dynamic_cp.types import (
    SHARDED,
    DataParallel,
    Hardware,
    ModelShape,
    PlannedBatch,
    PlanOptions,
    Problem,
    Sample,
    SearchEffort,
    StateExchangeUse,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """What all settings of a sweep share; `max_seqlen`: tokens of the longest sample that the run must hold."""

    batches: tuple[tuple[Sample, ...], ...]
    max_seqlen: int
    model: ModelShape
    hardware: Hardware
    search: SearchEffort = "fast"
    data_parallel: DataParallel = SHARDED
    tp_overlap: TpOverlap = "none"
    state_exchange: StateExchangeUse = "auto"
    fp8: bool = False

    def model_of(self, setting: Setting) -> ModelShape:
        """Return the model, cut into the stages of `setting`."""
        return replace(self.model, pipeline_layers=setting.pipeline_layers)

    def problem(self, setting: Setting) -> Problem:
        """Return all that plans of `setting` depend on besides the samples."""
        return Problem(
            topology=setting.topology,
            model=self.model_of(setting),
            hardware=self.hardware,
            options=self.options_of(setting),
            policy="dynamic" if setting.has_pool else setting.policy,
            data_parallel=self.data_parallel,
        )

    def options_of(self, setting: Setting) -> PlanOptions:
        overlaps = self.tp_overlap == "all" or (self.tp_overlap == "static" and setting.is_static)
        options = setting.options(self.search)
        return replace(options, tp_comm_overlap=overlaps, state_exchange=self.state_exchange, fp8=self.fp8)

    def memory(self, setting: Setting) -> MemoryModel:
        return MemoryModel(self.problem(setting))

    def prices(self, setting: Setting) -> CostModel:
        """Return the prices of `setting`; UnsupportedFeatureError: no allowed exchange serves any of its CP sizes."""
        return CostModel(problem_of_prices(self.problem(setting)))


class Job(NamedTuple):
    """What all policies of a comparison share; see the arguments of `compare_policies`."""

    batches: tuple[tuple[Sample, ...], ...]
    problem: Problem
    limit_from_memory: bool = False

    @classmethod
    def at(cls, setting: Setting, shared: SweepJob) -> Job:
        """Return the job of a setting, whose token limit is given."""
        # Bounds and prices are for all CP sizes at this limit, memory for those that the policy uses.
        options = replace(shared.options_of(setting), min_cp_size=1, max_cp_size=setting.max_cp_size)
        return cls(shared.batches, replace(shared.problem(setting), options=options, policy="dynamic"))

    @property
    def max_seqlen(self) -> int:
        return max(sample.seqlen for batch in self.batches for sample in batch)

    def options_of(self, policy: str, static_cp_size: int | None) -> PlanOptions:
        """Return the options of `policy`; with `limit_from_memory`, at the token limit that memory sets it."""
        options = replace(
            self.allowed_to(policy, self.problem.options),
            static_cp_size=static_cp_size or self.problem.options.static_cp_size,
        )
        if self.limit_from_memory:
            limit = self.memory(options, policy).max_tokens_per_rank(self.max_seqlen)
            options = replace(options, max_tokens_per_rank=limit)
        return options

    def problem_of(self, options: PlanOptions, policy: str = "dynamic") -> Problem:
        return replace(self.problem, options=options, policy=policy)

    def allowed_to(self, policy: str, options: PlanOptions) -> PlanOptions:
        """Return `options` with the exchanges that plans of `policy` use."""
        samples = chain.from_iterable(self.batches)
        exchanges = exchanges_of_policy(policy, options.cp_comm_types, self.problem.model, samples)
        return replace(options, cp_comm_types=exchanges)

    def memory(self, options: PlanOptions, policy: str = "dynamic") -> MemoryModel:
        """Return the memory model of the CP sizes that `policy` uses."""
        return MemoryModel(self.problem_of(options, policy))

    def setting_of(self, policy: str, options: PlanOptions, max_cp_size: int | None = None) -> Setting:
        """Return what `policy` runs with `options`; max_cp_size: its own, if it has one."""
        return Setting(
            policy=policy,
            topology=self.problem.topology,
            recompute=options.recompute,
            recompute_layers=options.recompute_layers,
            loss_chunk_tokens=options.loss_chunk_tokens,
            max_tokens_per_rank=options.max_tokens_per_rank,
            cp_comm_types=options.cp_comm_types,
            static_cp_size=options.static_cp_size,
            max_cp_size=max_cp_size,
            pipeline_layers=self.problem.model.pipeline_layers,
        )

    def cost_model(self, options: PlanOptions) -> CostModel:
        """Return the prices of all plans that `options` allow, static ones among them."""
        return CostModel(problem_of_prices(self.problem_of(options)))

    def prices(self, options: PlanOptions) -> PricesByPart:
        """Return the cost models that tell the parts of an iteration apart."""
        return prices_by_part(problem_of_prices(self.problem_of(options)))


def batch_outcome(
    job: Job,
    planned: PlannedBatch,
    prices: PricesByPart,
    memory: MemoryModel,
    planning: dict[str, Any],
) -> PlanOutcome:
    """Return the figures of a plan of one of the job's batches; planning: its `plan_s` and `note`."""
    plan = planned.plan
    timeline = simulate(plan, prices.all)
    sent = sent_by_plan(plan, job.problem)
    return PlanOutcome(
        planned=planned,
        timeline=timeline,
        parts=time_parts(timeline, prices),
        num_microbatches=plan.num_microbatches,
        padding_fraction=padding_fraction(plan),
        peak_bytes=max(stage.total_bytes for stage in memory.peak(plan)),
        sent_in_node_bytes=sent.in_node,
        sent_across_nodes_bytes=sent.across_nodes,
        **planning,
        **rates(job, tuple(plan.samples), timeline.makespan_s, timeline.iteration_s, prices),
    )


def rates(
    job: Job, samples: Sequence[Sample], makespan_s: float, iteration_s: float, prices: PricesByPart
) -> dict[str, Any]:
    """Return the figures of `BatchOutcome` that need no plan, from samples and the seconds of a step."""
    model, num_ranks = job.problem.model, job.problem.topology.world_size
    num_tokens, squared = length_sums(samples, model)
    flops = batch_flops(model, num_tokens, squared, job.problem.options.recompute)
    return {
        "iteration_s": iteration_s,
        "makespan_s": makespan_s,
        "lower_bound_s": lower_bound(samples, prices.all).seconds,
        "num_tokens": num_tokens,
        "tokens_per_s_per_gpu": num_tokens / iteration_s / num_ranks,
        "tflops_per_gpu": tflops_per_rank(flops.model_flops, iteration_s, num_ranks),
    }
