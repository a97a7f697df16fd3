"""Chooses the plan of a global batch: make candidates, simulate each exactly, keep the fastest.

No packing wins everywhere, so the candidates are a small fixed portfolio and the simulator decides. The number of
micro-batches is swept well beyond the least that the token limit allows: with a pipeline, too few cost 1.6 to 4.2 times
(planner experiments on the frozen cost model, 2026-11-20). The search has no clock: it ends after a counted number of
candidates, so equal input gives an equal plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.blocks import MOST_FETCHED
from dynamic_cp.packing.judge import build_plan, price_packing
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.extension import kind_planned
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.allowed import Resolved, may_place, resolve, widest_bucket
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.candidates import Batch, Candidate, Search, as_packed, batch_of
from dynamic_cp.types import (
    POOL_POLICIES,
    SHARDED,
    STATIC_POLICIES,
    DataParallel,
    Hardware,
    MicroBatch,
    ModelShape,
    Plan,
    PlannedBatch,
    PlanOptions,
    Problem,
    Sample,
    Topology,
    with_exchanges,
)

if TYPE_CHECKING:
    from dynamic_cp.search.placed import PlacedRows

# Placed attention and linear attention are imported by what is called: most jobs have neither.

POLICIES = ("dynamic", "static", "balanced", "megatron-dev")


def plan_global_batch(
    samples: Iterable[Sample],
    *,
    topology: Topology,
    model: ModelShape,
    hardware: Hardware,
    options: PlanOptions,
    policy: str = "dynamic",
    data_parallel: DataParallel = SHARDED,
) -> PlannedBatch:
    """Return `plan_problem` of a problem with these arguments.

    Args:
        samples: one global batch, in any order; sample_id is the input order of the static policy.
        topology, model, hardware: what runs it.
        options: limits and effort; min_cp_size and max_cp_size bind the dynamic policy, static_cp_size the static ones.
        policy: one of `POLICIES`.
        data_parallel: how lanes share gradients and the state of the optimizer.

    Raises DynamicCPError: as `plan_problem`."""
    samples = tuple(samples)
    options = with_exchanges(options, model, samples)
    problem = Problem(
        topology=topology, model=model, hardware=hardware, options=options, policy=policy, data_parallel=data_parallel
    )
    return plan_problem(problem, samples)


def plan_problem(problem: Problem, samples: Iterable[Sample]) -> PlannedBatch:
    """Return the fastest legal plan of `problem.policy` by simulation; a pure function of its arguments.

    The policy "dynamic" has the others among its candidates and is never slower: the static ones at every allowed CP
    size that holds the longest sample. Nor is it slower than a fast search for the ring alone, where the options allow
    the ring. With linear attention this holds while lanes exchange heads; which buckets pass on states instead is
    chosen afterwards, and makes no plan slower.

    Raises:
        InvalidInputError: no samples, a sample_id twice, an unknown policy, CP sizes that contradict each other.
        InfeasibleSampleError: a sample that no allowed CP size can hold.
        UnsupportedFeatureError: a sample that needs a CP size which no allowed exchange can serve, or has a mask that
            none of them serves; a policy with a pool.
    """
    _check_policy(problem.policy)
    batch = batch_of(tuple(samples), problem.model)
    resolved = resolve(problem, batch.samples)
    prices = _prices(problem, batch, resolved)
    if resolved.proves:
        _exact().check_provable(batch.samples, prices, resolved.options.cp_comm_types)
    packed = _pack(problem, batch, resolved, prices)
    if resolved.proves:
        packed = _prove(batch, packed, prices)
    placed = _place(batch, resolved, packed, prices) if resolved.places else None
    return _choose(problem, batch, resolved, packed, placed, prices)


def check_feasible(max_seqlen: int, topology: Topology, options: PlanOptions) -> None:
    """Refuse a `max_seqlen` (tokens) that no allowed CP size can hold within options.max_tokens_per_rank. Raises
    InfeasibleSampleError: with both numbers and the flags that help."""
    longest = Sample(sample_id=-1, seqlen=max_seqlen)
    _check_capacity(longest, topology, options, places=may_place(topology, options))


class _Packed(NamedTuple):
    """The best packing.

    Attributes:
        makespan_ns: of it.
        reason: for the user.
        micro_batches: those of a legal plan, unless packings are a guess.
        grid: its durations, where they are known.
    """

    makespan_ns: int
    reason: str
    micro_batches: tuple[MicroBatch, ...]
    grid: Grid | None


def plan_batch(problem: Problem, samples: Sequence[Sample]) -> PlannedBatch:
    """Return the plan that a run of `problem` has: of `plan_problem`, or of a kind that its options ask for. Raises
    DynamicCPError: as `plan_problem`, and as planning of that kind."""
    kind = kind_planned(problem.options) if problem.policy == "dynamic" else None
    return plan_problem(problem, samples) if kind is None else kind.plan(problem, samples)


def _check_policy(policy: str) -> None:
    if policy in POOL_POLICIES:
        raise UnsupportedFeatureError(
            f"policy {policy} is dynamic with PlanOptions.pool {POOL_POLICIES[policy]!r} (--dynamic-cp-pool), which "
            "`search.search.plan_batch` plans: give that, or one of " + ", ".join(POLICIES)
        )
    if policy not in POLICIES:
        raise InvalidInputError(f"policy {policy!r} is unknown: use one of {', '.join(POLICIES)}")


def _prices(problem: Problem, batch: Batch, resolved: Resolved) -> CostModel:
    """Return the prices of candidates and placements; refuse a batch that nothing allowed can hold or compute."""
    topology, options = problem.topology, resolved.options
    has_size = problem.policy in STATIC_POLICIES and options.static_cp_size is not None
    if not has_size:
        _check_capacity(batch.samples[0], topology, options, places=resolved.places)
    if resolved.is_guess and not resolved.places:
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(options.cp_comm_types)} spans all {topology.num_lanes} lanes in plans of policy "
            f"dynamic; the policy is {problem.policy}, max_cp_size {options.largest_cp_size(topology)}: allow other "
            "exchanges (--cp-comm-type auto), or the dynamic policy and all sizes (no --max-dynamic-cp-size)"
        )
    prices = CostModel(replace(problem, options=resolved.priced))
    if not has_size and not resolved.places:
        _check_exchanges(batch.samples, prices)
    return prices


def _pack(problem: Problem, batch: Batch, resolved: Resolved, prices: CostModel) -> _Packed:
    """Return the fastest packing by mechanisms that have closed forms."""
    packers = prices
    if resolved.packed != resolved.priced:
        packers = CostModel(replace(problem, options=resolved.packed))
    if problem.policy == "dynamic" and problem.model.linear_attention is not None:
        from dynamic_cp.search.states import with_room_for_branches

        packers = with_room_for_branches(packers, problem, batch)
    search = Search(batch, packers)
    ranking = search.ranking(problem.policy)
    if resolved.tries_ring_alone:
        ranking = sorted([*ranking, *search.by_the_ring(ranking[0].makespan_ns)], key=lambda one: one.makespan_ns)
    if ranking[0].cost_model.may_pass_on_states:
        from dynamic_cp.search.states import judged

        best = judged(ranking, batch, resolved.packed.max_tokens_per_rank)
    else:
        best = as_packed(ranking[0], price_packing(batch.lengths, ranking[0].packing, ranking[0].cost_model))
    micro_batches = build_plan(batch.samples, best.priced, best.prices, problem.policy).micro_batches
    return _Packed(best.makespan_ns, _reason(ranking, best.candidate) + best.in_words, micro_batches, best.grid)


def _prove(batch: Batch, packed: _Packed, prices: CostModel) -> _Packed:
    """Return the proven packing, or the known one with the bound that was proven."""
    proof = _exact().prove(batch.samples, prices, packed.makespan_ns, packed.reason)
    if proof.micro_batches is None:
        return packed._replace(reason=proof.reason)
    return _Packed(proof.makespan_ns, proof.reason, proof.micro_batches, None)


def _exact() -> ModuleType:
    """Return the exact search, which is no part of the core: it is loaded where it is asked for."""
    return import_module("dynamic_cp.decide.bounds.proof")


def _place(batch: Batch, resolved: Resolved, packed: _Packed, prices: CostModel) -> PlacedRows | None:
    """Return the fastest micro-batches some of which are placed; None where none keep the limits."""
    from dynamic_cp.search.placed import placed_rows

    candidates = placed_rows(
        packed.micro_batches, batch.samples, prices, step_s=packed.makespan_ns / 1e9, is_guess=resolved.is_guess
    )
    return min(candidates, default=None, key=lambda placed: placed.makespan_ns)


def _choose(
    problem: Problem, batch: Batch, resolved: Resolved, packed: _Packed, placed: PlacedRows | None, prices: CostModel
) -> PlannedBatch:
    """Return the plan of the faster micro-batches; of those that are placed, where packings are a guess. Raises
    InfeasibleSampleError: packings are a guess, and no placement keeps the limits."""
    limit = resolved.options.max_tokens_per_rank
    if placed is None and resolved.is_guess:
        raise InfeasibleSampleError(
            f"no placement keeps {limit} tokens per rank, and {MOST_FETCHED[0]} and {MOST_FETCHED[1]} times as many "
            "fetched queries and keys: raise max_tokens_per_rank (--max-seqlen-per-dp-cp-rank) or allow other "
            "exchanges (--cp-comm-type auto)"
        )
    found = [] if resolved.is_guess else [(packed.micro_batches, packed.reason, packed.grid)]
    if placed is not None:
        others = "others were not allowed" if resolved.is_guess else f"without placed attention {packed.reason}"
        found.append((placed.micro_batches, f"{placed.name}: {placed.makespan_ns / 1e9:.6f} s; {others}", None))
    planned: list[PlannedBatch] = []
    for micro_batches, reason, grid in found:
        plan = Plan(
            topology=problem.topology, max_tokens_per_rank=limit, micro_batches=micro_batches, policy=problem.policy
        )
        check_plan(plan, batch.samples)
        timeline = simulate(plan, prices, grid=grid)
        busy_s = timeline.lane_busy_s
        planned.append(
            PlannedBatch(plan=plan, predicted_s=timeline.iteration_s, predicted_busy_s=busy_s, reason=reason)
        )
    return min(planned, key=lambda one: one.predicted_s)  # what is exposed of the reduction differs, too


def _check_capacity(longest: Sample, topology: Topology, options: PlanOptions, *, places: bool) -> None:
    capacity, cp_size = widest_bucket(topology, options, places=places)
    if longest.seqlen > capacity:
        what = f"sample {longest.sample_id} has" if longest.sample_id >= 0 else "the longest allowed sample has"
        raise InfeasibleSampleError(
            f"{what} {longest.seqlen} tokens, the largest allowed group of {cp_size} lanes holds {capacity} "
            f"({options.max_tokens_per_rank} per rank): raise max_tokens_per_rank "
            "(--max-seqlen-per-dp-cp-rank) or max_cp_size (--max-dynamic-cp-size), or lower seqlen (--seq-length)",
            sample_id=longest.sample_id,
            seqlen=longest.seqlen,
            capacity_tokens=capacity,
            cp_size=cp_size,
        )


def _check_exchanges(samples: Sequence[Sample], cost_model: CostModel) -> None:
    longest, held = samples[0], int(cost_model.table.capacities.max())
    if longest.seqlen > held:
        exchanges = " ".join(cost_model.options.cp_comm_types)
        remedy = cost_model.sharing.remedy
        if any(sample.mask is not None for sample in samples):
            remedy = "no other serves masks: raise max_tokens_per_rank (--max-seqlen-per-dp-cp-rank)"
        raise UnsupportedFeatureError(
            f"sample {longest.sample_id} has {longest.seqlen} tokens, the largest group that "
            f"cp_comm_types {exchanges} can serve holds {held}: {remedy}",
            sample_id=longest.sample_id,
            seqlen=longest.seqlen,
            capacity_tokens=held,
        )


def _reason(ranking: Sequence[Candidate], chosen: Candidate) -> str:
    """Return why a candidate was chosen; `ranking`: the fastest first, by heads where lanes may pass on states."""
    best, *others = ranking
    if chosen is not best:
        return (
            f"{chosen.name}: {chosen.makespan_ns / 1e9:.6f} s by heads, of {len(ranking)} candidates; fastest by heads "
            f"{best.name}: {best.makespan_ns / 1e9:.6f} s"
        )
    text = f"{best.name}: {best.makespan_ns / 1e9:.6f} s, fastest of {len(ranking)} candidates"
    if others:
        text += f"; next {others[0].name}: {others[0].makespan_ns / 1e9:.6f} s"
        text += f" ({others[0].makespan_ns / best.makespan_ns - 1:+.1%})"
    return text
