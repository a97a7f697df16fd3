"""Chooses the plan of a global batch: make candidates, simulate each exactly, keep the fastest.

No packing wins everywhere, so the candidates are a small fixed portfolio and the simulator decides. The number of
micro-batches is swept well beyond the least that the token limit allows: with a pipeline, too few cost 1.6 to 4.2 times
(planner experiments on the frozen cost model, 2026-11-20). The search has no clock: it ends after a counted number of
candidates, so equal input gives an equal plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.blocks import MOST_FETCHED
from dynamic_cp.mechanisms.masks import options_serving
from dynamic_cp.mechanisms.ring import Ring
from dynamic_cp.packing.blocks import EFFORTS, pack_blocks
from dynamic_cp.packing.durations import Durations, apart_durations_of, bucket_ns, durations_of
from dynamic_cp.packing.judge import build_plan, grid_of_priced, makespan_ns, num_microbatches_of, price_packing
from dynamic_cp.packing.level import pack_level
from dynamic_cp.packing.megatron_dev import pack_megatron_dev
from dynamic_cp.packing.nested import pack_nested, row_counts
from dynamic_cp.packing.orders import ORDERS, in_orders
from dynamic_cp.packing.polish import is_small, polish
from dynamic_cp.packing.static import check_static_cp_size, fewest_rows, pack_balanced, pack_next_fit
from dynamic_cp.packing.table import Packing, without_empty_rows
from dynamic_cp.packing.wlb import packings_like_wlb
from dynamic_cp.pipeline.longest_path import Grid
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.padding import round_up
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.capacity import allowed_cp_sizes, capacity_tokens, limit_that_holds, may_place, widest_bucket
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.lengths import Lengths, densities_of
from dynamic_cp.pricing.terms import linear_parts
from dynamic_cp.search.placed import guess_of, options_of_packing, placed_plans, without_placed
from dynamic_cp.setting import POOL_POLICIES
from dynamic_cp.types import PLACED, Hardware, ModelShape, PlannedBatch, PlanOptions, Problem, Sample, Topology

POLICIES = ("dynamic", "static", "balanced", "megatron-dev")

_NUM_NESTED_JUDGED = 2
_PIPELINE_NESTED_SWEEP = (1.0, 1.3, 1.7)
_BALANCED_SWEEP = (1.0, 1.15, 1.3, 1.6, 2.0, 2.5, 3.0)
_MEGATRON_DEV_LIMITS = (1, 2, 4)
_NUM_POLISHED = 4
_NUM_WALKS = {"fast": 6, "thorough": 32}
_POLISH_STEPS = 2000


class Candidate(NamedTuple):
    """A packing, its makespan in nanoseconds, its name for the user, and what chooses its exchanges."""

    makespan_ns: int
    name: str
    packing: Packing
    cost_model: CostModel


def plan_global_batch(
    samples: Iterable[Sample],
    *,
    topology: Topology,
    model: ModelShape,
    hardware: Hardware,
    options: PlanOptions,
    policy: str = "dynamic",
) -> PlannedBatch:
    """Return `plan_problem` of these arguments."""
    problem = Problem(topology=topology, model=model, hardware=hardware, options=options, policy=policy)
    return plan_problem(problem, samples)


def plan_problem(problem: Problem, samples: Iterable[Sample]) -> PlannedBatch:
    """Return the fastest legal plan of `problem.policy` by simulation; a pure function of its arguments.

    Args:
        samples: one global batch; their order does not matter, sample_id is the input order of the static policy.
        topology, model, hardware: what runs it.
        options: limits and effort; min_cp_size and max_cp_size bind the dynamic policy, static_cp_size the static ones.
        policy: one of `POLICIES`. "dynamic" has the others among its candidates and is never slower: the static ones
            at every allowed CP size that holds the longest sample. Nor is it slower than a fast search that may use the
            ring only, where options.cp_comm_types allow the ring.

    Raises:
        InvalidInputError: no samples, a sample_id twice, an unknown policy, CP sizes that contradict each other.
        InfeasibleSampleError: a sample that no allowed CP size can hold.
        UnsupportedFeatureError: a sample that needs a CP size which no allowed exchange can serve, or has a mask that
            none of them serves; a policy with a pool.
    """
    topology, policy = problem.topology, problem.policy
    if policy in POOL_POLICIES:
        raise UnsupportedFeatureError(
            f"policy {policy} is dynamic with PlanOptions.pool {POOL_POLICIES[policy]!r} (--dynamic-cp-pool), which "
            "`search.choice.plan_batch` plans: give that, or one of " + ", ".join(POLICIES)
        )
    if policy not in POLICIES:
        raise InvalidInputError(f"policy {policy!r} is unknown: use one of {', '.join(POLICIES)}")
    batch = _batch_of(tuple(samples), problem.model)
    places = policy == "dynamic" and may_place(topology, problem.options)
    usable = problem.options if places else without_placed(problem.options)
    options = options_serving(batch.samples, problem.model, usable)
    if topology.expert_lanes > 1 and set(options.cp_comm_types) <= set(PLACED):
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(options.cp_comm_types)} may cut blocks of {topology.expert_lanes} lanes that "
            f"share experts (ep_size {topology.ep_size}): allow other exchanges (--cp-comm-type auto)",
            cp_comm_types=options.cp_comm_types,
        )
    longest, is_fixed = batch.samples[0], policy in ("static", "balanced") and options.static_cp_size is not None
    if not is_fixed:
        _check_capacity(longest, topology, options, places=places and may_place(topology, options))
    packing = options_of_packing(options, problem.model)
    is_guess = set(options.cp_comm_types).isdisjoint(packing.cp_comm_types)
    if is_guess and options.min_cp_size == 1 and longest.seqlen <= capacity_tokens(1, topology, options):
        packing, is_guess = replace(packing, max_cp_size=1), False
    packers = cost_model = CostModel(problem.model, problem.hardware, topology, packing)
    if places and longest.seqlen > cost_model.table.capacities.max():
        # What packers know cannot serve this sample, so they guess.
        guessed = replace(options, cp_comm_types=(guess_of(problem.model),))
        cost_model = CostModel(problem.model, problem.hardware, topology, guessed)
        limit = limit_that_holds(longest.seqlen, topology, guessed)
        packers = CostModel(problem.model, problem.hardware, topology, replace(guessed, max_tokens_per_rank=limit))
        is_guess = True
    elif not is_fixed:
        _check_exchanges(batch.samples, cost_model)
    search = _Search(batch, packers)
    ranking = search.ranking(policy)
    exchanges = cost_model.options.cp_comm_types
    if policy == "dynamic" and len(exchanges) > 1 and Ring.name in exchanges:
        ranking = sorted([*ranking, *search.by_the_ring()], key=lambda one: one.makespan_ns)
    best = ranking[0]
    priced = price_packing(batch.lengths, best.packing, best.cost_model)
    plan = build_plan(batch.samples, priced, best.cost_model, policy)
    plan = replace(plan, max_tokens_per_rank=options.max_tokens_per_rank)
    if is_guess and not places:
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(options.cp_comm_types)} spans all {topology.num_lanes} lanes in plans of policy "
            f"dynamic; the policy is {policy}, max_cp_size {options.max_cp_size or topology.max_cp_size}: allow "
            "other exchanges (--cp-comm-type auto), or the dynamic policy and all sizes (no --max-dynamic-cp-size)",
            cp_comm_types=options.cp_comm_types,
        )
    if not is_guess:
        check_plan(plan, batch.samples)
    # The grid of the packing is the grid of the plan, and much faster to make.
    grid: Grid | None = grid_of_priced(priced, best.cost_model)
    reason = _reason(ranking)
    if places:
        found = min(
            placed_plans(plan, batch.samples, cost_model, is_guess=is_guess),
            default=None,
            key=lambda one: one.makespan_ns,
        )
        if found is None and is_guess:
            raise InfeasibleSampleError(
                f"no placement keeps {options.max_tokens_per_rank} tokens per rank, and {MOST_FETCHED[0]} and "
                f"{MOST_FETCHED[1]} times as many fetched queries and keys: raise max_tokens_per_rank "
                "(--max-seqlen-per-dp-cp-rank) or allow other exchanges (--cp-comm-type auto)",
                max_tokens_per_rank=options.max_tokens_per_rank,
            )
        if found is not None and (is_guess or found.makespan_ns < best.makespan_ns):
            others = "others were not allowed" if is_guess else f"without placed attention {reason}"
            reason = f"{found.name}: {found.makespan_ns / 1e9:.6f} s; {others}"
            plan, grid = found.plan, None
            check_plan(plan, batch.samples)
    timeline = simulate(plan, cost_model, grid=grid)
    return PlannedBatch(
        plan=plan,
        predicted_s=timeline.iteration_s,
        predicted_busy_s=timeline.lane_busy_s,
        reason=reason,
    )


def check_feasible(max_seqlen: int, topology: Topology, options: PlanOptions) -> None:
    """Refuse a `max_seqlen` (tokens) that no allowed CP size can hold within options.max_tokens_per_rank.

    Raises:
        InfeasibleSampleError: with both numbers and the flags that help.
    """
    longest = Sample(sample_id=-1, seqlen=max_seqlen)
    _check_capacity(longest, topology, options, places=may_place(topology, options))


class _Batch(NamedTuple):
    """Samples descending by seqlen, ties by ascending sample_id; as arrays; positions in the order of sample_id."""

    samples: list[Sample]
    lengths: Lengths
    input_order: Ints


class _Search:
    """The candidates of one global batch."""

    def __init__(self, batch: _Batch, cost_model: CostModel) -> None:
        self.batch = batch
        self.longest, self.lengths, self.input_order = batch.samples[0], batch.lengths, batch.input_order
        self.cost_model = cost_model
        num_lanes = cost_model.topology.num_lanes
        self.durations: Durations = durations_of(cost_model.table, num_lanes)
        # Where lanes share experts, level is also what is level without them.
        self.apart = apart_durations_of(cost_model.table, num_lanes) if cost_model.topology.expert_lanes > 1 else None

    def ranking(self, policy: str) -> list[Candidate]:
        """Return all candidates, the fastest first."""
        found = sorted(self.candidates(policy), key=lambda one: one.makespan_ns)
        if policy == "dynamic":
            found = sorted([*found, *self.polished(found)], key=lambda one: one.makespan_ns)
        return found

    def by_the_ring(self) -> Iterator[Candidate]:
        """Yield what a fast search for the ring alone finds, with the fastest exchange of each bucket and as it is.

        Prices of all exchanges lead a search elsewhere, at times to slower plans; so they never are.
        """
        ring = self.cost_model.with_only(Ring.name)
        ring.options = replace(ring.options, search="fast")
        best = _Search(self.batch, ring).ranking("dynamic")[0]
        name = f"{best.name} as ring"
        yield self._judged(name, best.packing)
        yield best._replace(name=name)

    def candidates(self, policy: str) -> Iterator[Candidate]:
        """Yield at least one candidate."""
        if policy == "dynamic":
            found = [*self._dynamic(), *self._megatron_dev()]
            found += self._better_static(min(one.makespan_ns for one in found))
            yield from found
            yield from self._shortened(found)
        elif policy == "megatron-dev":
            yield from self._megatron_dev()
        else:
            yield from self._static(self._static_cp_size(), policy)

    def _shortened(self, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield candidates without their micro-batches that are padding on every lane, if interleaving needs fewer."""
        multiple = self.cost_model.topology.num_microbatches_multiple
        for one in found:
            filled = np.bincount(one.packing.rows[one.packing.bucket_of_sample])
            dropped = num_microbatches_of(one.packing, self.cost_model)
            dropped -= round_up(int(np.count_nonzero(filled)), multiple)
            if dropped:
                yield self._judged(f"{one.name} without {dropped} empty", without_empty_rows(one.packing))

    def _static_cp_size(self) -> int:
        """Return the CP size of the static policies: the one asked for, else the smallest that may be."""
        topology, options = self.cost_model.topology, self.cost_model.options
        cp_size = options.static_cp_size
        if cp_size is None:
            return next(cp for cp in allowed_cp_sizes(topology, options) if self._may_be_static(cp))
        check_static_cp_size(cp_size, self.longest, topology, options)
        self.cost_model.cost(cp_size, 0, 1.0, 1.0)  # refuses a CP size that no allowed exchange can serve
        return cp_size

    def _better_static(self, best_ns: int) -> Iterator[Candidate]:
        """Yield the static packings of every CP size that could be faster than `best_ns`."""
        for cp_size in allowed_cp_sizes(self.cost_model.topology, self.cost_model.options):
            if self._may_be_static(cp_size) and best_ns > self._least_static_ns(cp_size.bit_length() - 1):
                for one in self._static(cp_size, "dynamic", best_ns):
                    yield one
                    best_ns = min(best_ns, one.makespan_ns)

    def _static(self, cp_size: int, policy: str, best_ns: int | None = None) -> Iterator[Candidate]:
        """Yield the packings of one CP size: first-fit, balanced, or for the dynamic policy both, and one like WLB-LLM.

        Those that cannot be faster than `best_ns` are left out.
        """
        topology = self.cost_model.topology
        k = cp_size.bit_length() - 1
        durations = self._static_durations(k)
        next_fit = pack_next_fit(
            self.lengths.seqlens, self.input_order, durations, k, topology.num_lanes, topology.num_microbatches_multiple
        )
        if policy != "balanced":
            yield from self._ordered(f"static cp={cp_size} m={next_fit.num_rows}", next_fit, ("as packed",), best_ns)
        if policy != "static":
            yield from self._balanced(durations, k, next_fit, best_ns)
        if policy == "dynamic" and self.apart is not None:
            apart = self.apart._replace(capacities=durations.capacities)
            yield from self._balanced(apart, k, next_fit, best_ns, "balanced apart")
        if policy == "dynamic":
            for packing in packings_like_wlb(self.lengths, self.cost_model, k):
                yield from self._ordered(f"balanced as WLB cp={cp_size} m={packing.num_rows}", packing, best_ns=best_ns)

    def polished(self, ranking: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield improved packings of a small batch, from the best candidates with different numbers of rows."""
        best_of_rows = {one.packing.num_rows: one for one in reversed(ranking)}
        for walk in range(_NUM_WALKS[self.cost_model.options.search]):
            starts = sorted(best_of_rows.values(), key=lambda one: one.makespan_ns)[:_NUM_POLISHED]
            start = starts[walk % len(starts)]
            if not is_small(self.lengths.seqlens, start.packing, self.cost_model):
                continue
            found_ns, packing = polish(self.lengths, start.packing, self.cost_model, _POLISH_STEPS, walk)
            name = f"{start.name.removesuffix(' polished')} polished"
            found = Candidate(found_ns, name, packing, self.cost_model)
            if found.makespan_ns < start.makespan_ns:
                yield found
            if found.makespan_ns < best_of_rows.get(packing.num_rows, start).makespan_ns:
                best_of_rows[packing.num_rows] = found

    def _dynamic(self) -> Iterator[Candidate]:
        topology = self.cost_model.topology
        base = int(np.flatnonzero(self.durations.capacities)[0])
        fewest = fewest_rows(self.lengths.seqlens, self.durations, base, topology.num_lanes)
        totals = float(self.lengths.seqlens.sum()), float(self.lengths.squares.sum())
        empty_ns = bucket_ns(self.durations, base, 0.0, 0.0)
        share_ns = (bucket_ns(self.durations, base, *totals) - empty_ns) / (topology.num_lanes >> base)
        if topology.pp_size == 1:
            quota_ns = share_ns + fewest * empty_ns
            counts = row_counts(self.lengths, self.durations, topology.num_lanes, fewest, quota_ns)
            if topology.expert_lanes > 1:
                for name, packing in pack_level(self.lengths, self.cost_model, base, fewest):
                    yield self._judged(name, packing)
        else:
            counts = sorted({ceil(factor * fewest) for factor in _PIPELINE_NESTED_SWEEP})
            for effort in EFFORTS[self.cost_model.options.search]:
                for packed in pack_blocks(self.lengths, self.cost_model, fewest, effort):
                    yield Candidate(packed.makespan_ns, packed.name, packed.packing, self.cost_model)
        found = []
        for num_rows in counts:
            quota_ns = share_ns + num_rows * empty_ns
            result = pack_nested(self.lengths, self.durations, topology.num_lanes, num_rows, quota_ns)
            if result is not None:
                found.append(result)
        if topology.pp_size == 1:
            found = sorted(found, key=lambda one: one[0])[:_NUM_NESTED_JUDGED]
        for _, packing in found:
            yield from self._ordered(f"nested m={packing.num_rows}", packing, ("pyramid",))

    def _megatron_dev(self) -> Iterator[Candidate]:
        topology, limit = self.cost_model.topology, self.cost_model.options.max_tokens_per_rank
        for divisor in _MEGATRON_DEV_LIMITS:
            packing = pack_megatron_dev(
                self.lengths.seqlens, self.cost_model.table, topology.num_lanes, max(1, limit // divisor),
                topology.num_microbatches_multiple,
            )  # fmt: skip
            yield from self._ordered(f"megatron-dev limit={limit // divisor} m={packing.num_rows}", packing)

    def _balanced(
        self, durations: Durations, k: int, next_fit: Packing, best_ns: int | None = None, name: str = "balanced"
    ) -> Iterator[Candidate]:
        topology = self.cost_model.topology
        fewest = fewest_rows(self.lengths.seqlens, durations, k, topology.num_lanes)
        counts = {round_up(ceil(factor * fewest), topology.num_microbatches_multiple) for factor in _BALANCED_SWEEP}
        none_fits = True
        for num_rows in sorted(counts):
            packing = pack_balanced(self.lengths, durations, k, topology.num_lanes, num_rows)
            if packing is not None:
                none_fits = False
                yield from self._ordered(f"{name} cp={1 << k} m={num_rows}", packing, best_ns=best_ns)
        if none_fits:
            yield self._judged(f"{name} cp={1 << k} m={next_fit.num_rows} next-fit", next_fit)

    def _ordered(
        self, name: str, packing: Packing, orders: Sequence[str] = ORDERS, best_ns: int | None = None
    ) -> Iterator[Candidate]:
        """Yield `packing` with its rows in each of `orders`; nothing, where none could be faster than `best_ns`."""
        if is_small(self.lengths.seqlens, packing, self.cost_model):
            best_ns = None  # what is slow now may be the best one to polish
        for found_ns, order, one in in_orders(self.lengths, packing, self.cost_model, orders, best_ns):
            yield Candidate(found_ns, name if order == "as packed" else f"{name} {order}", one, self.cost_model)

    def _judged(self, name: str, packing: Packing) -> Candidate:
        return Candidate(makespan_ns(self.lengths, packing, self.cost_model), name, packing, self.cost_model)

    def _may_be_static(self, cp_size: int) -> bool:
        """Return whether a static policy at `cp_size` is one that the dynamic policy could also choose."""
        if cp_size not in allowed_cp_sizes(self.cost_model.topology, self.cost_model.options):
            return False
        return self.longest.seqlen <= int(self.cost_model.table.capacities[cp_size.bit_length() - 1])

    def _static_durations(self, k: int) -> Durations:
        """Return the durations with the capacity of CP size 2^k, which min_cp_size and max_cp_size do not bind."""
        topology, options = self.cost_model.topology, self.cost_model.options
        capacities = self.durations.capacities.copy()
        capacities[k] = capacity_tokens(1 << k, topology, options)
        return self.durations._replace(capacities=capacities)

    def _least_static_ns(self, k: int) -> float:
        """Return nanoseconds that no plan with CP size 2^k everywhere stays below: its compute, spread evenly."""
        table, topology = self.cost_model.table, self.cost_model.topology
        rows = slice(table.first_option[k].min(), table.end_option[k].max())  # every exchange on every link
        constant, per_token, per_token2 = linear_parts(table.level_terms[rows]).sum(axis=1).min(axis=0).tolist()
        # Every stage computes this; the slowest one the edges in addition.
        per_token += table.slowest_s_per_token / (1 << k)
        work_s = per_token * float(self.lengths.seqlens.sum()) + per_token2 * self.lengths.squares.sum()
        num_rows = fewest_rows(self.lengths.seqlens, self._static_durations(k), k, topology.num_lanes)
        least_s = work_s / (topology.num_lanes >> k) + constant * num_rows
        # An operation is rounded to whole nanoseconds, by at most half of one; no row is without samples.
        rounding_ns = (topology.vp_size + 2) * len(self.lengths.seqlens)
        return 1e9 * float(least_s) * (1 - 1e-9) - rounding_ns


def _batch_of(samples: Sequence[Sample], model: ModelShape) -> _Batch:
    """Return `samples` descending by seqlen, ties by ascending sample_id; InvalidInputError: none, or an id twice."""
    if not samples:
        raise InvalidInputError("the global batch has 0 samples, at least 1 is needed: give samples")
    ids = np.fromiter((sample.sample_id for sample in samples), np.int64, len(samples))
    seqlens = np.fromiter((sample.seqlen for sample in samples), np.int64, len(samples))
    order = np.lexsort((ids, -seqlens))
    ids, descending = ids[order], [samples[index] for index in order.tolist()]
    input_order = np.argsort(ids)
    twice = np.flatnonzero(np.diff(ids[input_order]) == 0)
    if twice.size:
        one, other = (descending[input_order[twice[0] + offset]] for offset in (0, 1))
        raise InvalidInputError(
            f"sample_id {one.sample_id} is there twice, with {one.seqlen} and {other.seqlen} tokens: "
            "number the samples of a global batch uniquely",
            sample_id=one.sample_id,
        )
    return _Batch(descending, Lengths(seqlens[order], densities_of(descending, model)), input_order)


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


def _reason(ranking: Sequence[Candidate]) -> str:
    best, *others = ranking
    text = f"{best.name}: {best.makespan_ns / 1e9:.6f} s, fastest of {len(ranking)} candidates"
    if others:
        text += f"; next {others[0].name}: {others[0].makespan_ns / 1e9:.6f} s"
        text += f" ({others[0].makespan_ns / best.makespan_ns - 1:+.1%})"
    return text
