"""Chooses the plan of a global batch: make candidates, simulate each, keep the fastest.

No packing wins everywhere, so the candidates are a small fixed portfolio and the simulator decides. The number of
micro-batches is swept well beyond the least that the token limit allows: with a pipeline, too few cost 1.6 to 4.2
times. The search has no clock: it ends after a counted number of candidates, so equal input gives an equal plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from dynamic_cp.baselines import min_microbatches, pack_balanced, pack_static, static_cp_size
from dynamic_cp.cost_model import CostModel
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.packing import Row, allowed_cp_sizes, build_plan, capacity_tokens, pack, pyramid
from dynamic_cp.padding import round_up
from dynamic_cp.simulator import makespan_ns, simulate
from dynamic_cp.types import Hardware, ModelShape, PlannedBatch, PlanOptions, Sample, Topology
from dynamic_cp.validate import check_plan

POLICIES = ("dynamic", "static", "balanced")

_DYNAMIC_SWEEP = (1.0, 1.3, 1.7, 2.2)
_BALANCED_SWEEP = (1.0, 1.15, 1.3, 1.6, 2.0, 2.5, 3.0)


class Candidate(NamedTuple):
    """A packing with a name for the user."""

    name: str
    rows: Sequence[Row]


def plan_global_batch(
    samples: Iterable[Sample],
    *,
    topology: Topology,
    model: ModelShape,
    hardware: Hardware,
    options: PlanOptions,
    policy: str = "dynamic",
) -> PlannedBatch:
    """Return the fastest legal plan of `policy` by simulation; a pure function of its arguments.

    Args:
        samples: one global batch; their order does not matter, sample_id is the order of the static policies.
        topology, model, hardware: what runs it.
        options: limits; min_cp_size and max_cp_size bind the dynamic policy, static_cp_size the others.
        policy: one of `POLICIES`. "dynamic" has the other two among its candidates, at static_cp_size if that
            is allowed and holds the longest sample, else at the smallest CP size that does, and is never slower.

    Raises:
        InvalidInputError: no samples, a sample_id twice, an unknown policy, CP sizes that contradict each other.
        InfeasibleSampleError: a sample that no allowed CP size can hold.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    if policy not in POLICIES:
        raise InvalidInputError(f"policy {policy!r} is unknown: use one of {', '.join(POLICIES)}")
    if not ordered:
        raise InvalidInputError("the global batch has 0 samples, at least 1 is needed: give samples")
    for one, other in pairwise(ordered):
        if one.sample_id == other.sample_id:
            raise InvalidInputError(
                f"sample_id {one.sample_id} is there twice, with {one.seqlen} and {other.seqlen} tokens: "
                "number the samples of a global batch uniquely",
                sample_id=one.sample_id,
            )
    cost_model = CostModel(model, hardware, topology, options)
    if policy == "dynamic" or options.static_cp_size is None:
        _check_capacity(max(ordered, key=lambda sample: sample.seqlen), topology, options)

    ranking = []
    seen = set()
    for index, candidate in enumerate(_candidates(ordered, cost_model, policy)):
        plan = build_plan(candidate.rows, cost_model, policy)
        # Neighbouring counts and orders often pack alike.
        if plan.micro_batches not in seen:
            seen.add(plan.micro_batches)
            ranking.append((makespan_ns(plan, cost_model), index, candidate.name, plan))
    ranking.sort(key=lambda entry: entry[:2])
    best = ranking[0][-1]
    check_plan(best, ordered)
    timeline = simulate(best, cost_model)
    return PlannedBatch(
        plan=best,
        predicted_s=timeline.makespan_s,
        predicted_busy_s=timeline.lane_busy_s,
        reason=_reason([(name, duration_ns) for duration_ns, _, name, _ in ranking]),
    )


def check_feasible(max_seqlen: int, topology: Topology, options: PlanOptions) -> None:
    """Refuse a `max_seqlen` (tokens) that no allowed CP size can hold within options.max_tokens_per_rank.

    Raises:
        InfeasibleSampleError: with both numbers and the flags that help.
    """
    _check_capacity(Sample(sample_id=-1, seqlen=max_seqlen), topology, options)


def _check_capacity(longest: Sample, topology: Topology, options: PlanOptions) -> None:
    capacity, cp_size = max((capacity_tokens(cp, topology, options), cp) for cp in allowed_cp_sizes(topology, options))
    if longest.seqlen > capacity:
        what = f"sample {longest.sample_id} has" if longest.sample_id >= 0 else "the longest allowed sample has"
        raise InfeasibleSampleError(
            f"{what} {longest.seqlen} tokens, the largest allowed group of {cp_size} lanes holds {capacity} "
            f"({options.max_tokens_per_rank} per rank): raise --max-seqlen-per-dp-cp-rank or --max-dynamic-cp-size, "
            "or lower --seq-length",
            sample_id=longest.sample_id,
            seqlen=longest.seqlen,
            capacity_tokens=capacity,
            cp_size=cp_size,
        )


def _candidates(samples: Sequence[Sample], cost_model: CostModel, policy: str) -> Iterator[Candidate]:
    topology, options = cost_model.topology, cost_model.options
    if policy == "dynamic":
        allowed = [cp for cp in allowed_cp_sizes(topology, options) if capacity_tokens(cp, topology, options) > 0]
        longest = max(sample.seqlen for sample in samples)
        feasible = [cp for cp in allowed if longest <= capacity_tokens(cp, topology, options)]
        counts = _num_microbatches_sweep(_DYNAMIC_SWEEP, min_microbatches(samples, cost_model, allowed[0]), topology)
        # Larger groups than the longest sample needs waste lanes where samples abound and pay where they are few.
        for cap in sorted({feasible[0], allowed[-1]}):
            for count in sorted(counts):
                rows = pack(samples, cost_model, count, [cp for cp in allowed if cp <= cap])
                name = f"dynamic cp<={cap} m={len(rows)}"
                yield Candidate(name, pyramid(rows, cost_model) if topology.pp_size > 1 else rows)
        cp_size = options.static_cp_size if options.static_cp_size in feasible else feasible[0]
    else:
        cp_size = static_cp_size(samples, topology, options)

    next_fit = pack_static(samples, cost_model, cp_size)
    if policy != "balanced":
        yield Candidate(f"static cp={cp_size} m={len(next_fit)}", next_fit)
    if policy != "static":
        yield from _balanced_candidates(samples, cost_model, cp_size, next_fit)


def _balanced_candidates(
    samples: Sequence[Sample], cost_model: CostModel, cp_size: int, next_fit: Sequence[Row]
) -> Iterator[Candidate]:
    none_fits = True
    counts = _num_microbatches_sweep(
        _BALANCED_SWEEP, min_microbatches(samples, cost_model, cp_size), cost_model.topology
    )
    for count in sorted(counts):
        rows = pack_balanced(samples, cost_model, cp_size, count)
        if rows is not None:
            none_fits = False
            orders = {"descending": rows, "ascending": rows[::-1], "pyramid": pyramid(rows, cost_model)}
            for order, ordered_rows in orders.items():
                yield Candidate(f"balanced cp={cp_size} m={count} {order}", ordered_rows)
    if none_fits:
        yield Candidate(f"balanced cp={cp_size} m={len(next_fit)} next-fit", next_fit)


def _num_microbatches_sweep(factors: Iterable[float], fewest: int, topology: Topology) -> set[int]:
    return {round_up(max(1, ceil(factor * fewest)), topology.num_microbatches_multiple) for factor in factors}


def _reason(ranking: Sequence[tuple[str, int]]) -> str:
    (name, best_ns), *others = ranking
    text = f"{name}: {best_ns / 1e9:.6f} s, fastest of {len(ranking)} candidates"
    if others:
        next_name, next_ns = others[0]
        text += f"; next {next_name}: {next_ns / 1e9:.6f} s ({next_ns / best_ns - 1:+.1%})"
    return text
