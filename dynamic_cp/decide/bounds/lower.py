"""Seconds that every legal plan of a global batch takes at least: how far from optimal a plan can be.

    work      the least lane-seconds of all samples, evenly on all lanes, and the floors of the fewest micro-batches
    longest   the longest sample through all stages, or as many long ones as some lane must hold (`giants`)
    schedule  both together on the operations of a pipeline, least over numbers of micro-batches (pp_size > 1)

`work` and `longest` are proofs. `schedule` is a proof for every number of micro-batches and every place of the longest
sample that was tried; that no other one is lower is not proven unless `is_proven` says so (effort "exhaustive").

A bound sharpens itself: a plan either takes at least x seconds, or runs no sample in a way that alone takes longer than
x. So x is a bound whenever the bound without those ways reaches x.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.decide.bounds.giants import giants_s
from dynamic_cp.decide.bounds.paths import NUM_DIRECTIONS, Spread, path_bound_s
from dynamic_cp.decide.bounds.ways import Ways, longest_within, ratio_range, ways_of, without_experts
from dynamic_cp.decide.bounds.work import Work, least_work, sum_of_least
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import PriceTable, price
from dynamic_cp.pricing.work import Lengths, density_of, lengths_of
from dynamic_cp.types import Sample, Topology

Effort = Literal["quick", "report", "exhaustive"]

_SHARPEN_UP_TO, _SHARPEN_PIPELINED = 1.3, 1.6
_SHARPEN_STEPS = 8
_MIN_GAIN = 1.0005
_FEW_MICROBATCHES, _MOST_MICROBATCHES = 8, 512
"""Up to this number of micro-batches every place of the longest sample is tried: always, and if "exhaustive"."""
_CLOSE = 0.999
"""A number of micro-batches whose bound is this close to the least one is not looked at any longer."""


class _Sweep(NamedTuple):
    """How much of (number of micro-batches, place of the longest sample) is tried.

    Attributes:
        first_steps, steps: rounds of the game, to find where the bound is least and to prove it.
        stop_above, stop_after: larger numbers of micro-batches are not tried after `stop_after` in a row whose bounds
            exceed the least one by the factor `stop_above`.
        growth: factor from one number of micro-batches tried to the next.
        positions: places of the longest sample; all but the first one where the bound is least.
    """

    first_steps: int
    steps: int
    stop_above: float
    stop_after: int
    growth: float
    positions: tuple[float, ...]


_STEPS_FOR, _MOST_STEPS_FOR = 32, 64
"""Micro-batches for which the steps of a sweep are meant; more micro-batches get more steps in proportion, up to."""
_SWEEPS: dict[str, _Sweep] = {
    "quick": _Sweep(40, 120, 1.0, 1, 1.6, (0.4,)),
    "report": _Sweep(60, 240, 1.005, 2, 1.3, (0.4, 0.2, 0.03, 1.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """A lower bound on the makespan, without the end-of-step gradient reduction.

    Attributes:
        seconds: the largest of the parts.
        binds: which part that is, "work", "longest" or "schedule".
        work_s, longest_s, schedule_s: the parts (schedule_s 0 without pipelining).
        proven_s: what is proven for all plans, `seconds` if `is_proven`.
        num_microbatches: where the schedule part is least; without one, the fewest micro-batches.
        tried: (num_microbatches, micro-batch of the longest sample, seconds) of the schedule part.
        is_proven: whether `seconds` holds for all plans, not only for the tried numbers of micro-batches.
    """

    seconds: float
    binds: Literal["work", "longest", "schedule"]
    work_s: float
    longest_s: float
    schedule_s: float
    proven_s: float
    num_microbatches: int
    tried: tuple[tuple[int, int, float], ...]
    is_proven: bool


def lower_bound(samples: Iterable[Sample], cost_model: CostModel, effort: Effort = "report") -> LowerBound:
    """Return a lower bound on the makespan of every legal plan of `samples`.

    Args:
        samples: the global batch; true lengths are used, so the bound holds with and without padding.
        cost_model: prices, topology and limits.
        effort: how much of the pipelined part is tried: "quick" some ms, "report" some 10 ms, "exhaustive" every number
            of micro-batches and every place of the longest sample (tiny batches at once, 2048 samples in minutes).

    Raises:
        InvalidInputError: there are no samples.
        InfeasibleSampleError: a sample that no allowed CP size holds.
    """
    lengths = lengths_of(sorted(samples, key=lambda sample: -sample.seqlen), cost_model.model)
    return bound_of_lengths(
        lengths, cost_model.table, cost_model.topology, cost_model.options.max_tokens_per_rank, effort
    )


def bound_of_lengths(
    lengths: Lengths, table: PriceTable, topology: Topology, max_tokens_per_rank: int, effort: Effort = "report"
) -> LowerBound:
    """Return `lower_bound` of samples with true `lengths`."""
    seqlens = lengths.seqlens
    if len(seqlens) == 0:
        raise InvalidInputError("there are 0 samples, at least 1 is needed: bound a non-empty global batch")
    ways = ways_of(table, max_tokens_per_rank)
    if seqlens[0] > ways.longest.max():
        raise InfeasibleSampleError(
            f"the longest sample has {seqlens[0]} tokens, a group of {ways.cp_sizes.max()} lanes with "
            f"{max_tokens_per_rank} tokens each holds {ways.longest.max()}: raise the limit or the largest CP size",
            seqlen=int(seqlens[0]),
        )
    batch = _batch_of(lengths, table, topology, ways)
    bound = _bound(batch, ways, effort)
    return _sharpened(batch, bound, effort)


def bound_at(
    lengths: Lengths,
    table: PriceTable,
    topology: Topology,
    max_tokens_per_rank: int,
    num_microbatches: int,
) -> float:
    """Return proven seconds of every plan with `num_microbatches`, wherever the longest sample is.

    Args:
        lengths, table, topology, max_tokens_per_rank: as in `bound_of_lengths`.
        num_microbatches: a number that the schedule allows.
    """
    ways = ways_of(table, max_tokens_per_rank)
    batch = _batch_of(lengths, table, topology, ways)
    if num_microbatches < batch.min_microbatches:
        return float("inf")
    least_s = max(_work_s(batch, ways, num_microbatches), _longest_s(batch, ways))
    spread = _spread(batch, ways) if topology.pp_size > 1 else None
    if spread is None:
        return least_s
    steps, paths_s = _SWEEPS["report"].steps, np.inf
    for position in range(num_microbatches):
        path_s = path_bound_s(spread, topology.pp_size, topology.vp_size, num_microbatches, position, steps, paths_s)
        paths_s = min(paths_s, path_s)
    return max(least_s, paths_s)


class _Batch(NamedTuple):
    """What every part of the bound needs; seconds and tokens are averages over all lanes."""

    lengths: Lengths
    topology: Topology
    ways: Ways
    work: Work
    edges_s_per_token: Floats
    tokens: float
    row_floor_s: float
    min_microbatches: int
    giants_s: float


def _batch_of(lengths: Lengths, table: PriceTable, topology: Topology, ways: Ways) -> _Batch:
    num_tokens = int(lengths.seqlens.sum())
    fewest = -(-num_tokens // int(topology.num_lanes * ways.capacities[0]))
    # Every chunk and every edge is rounded to whole nanoseconds, half a nanosecond down at most.
    rounding_s = 1e-9 * (topology.vp_size + 2)
    return _Batch(
        lengths=lengths,
        topology=topology,
        ways=ways,
        work=least_work(lengths, ways),
        edges_s_per_token=table.edges_s_per_token,
        tokens=num_tokens / topology.num_lanes,
        row_floor_s=max(0.0, float(ways.floors_s.sum()) - rounding_s),
        min_microbatches=round_up(fewest, topology.num_microbatches_multiple),
        # A lane that works less than the others of its buckets may have more of them.
        giants_s=giants_s(lengths, ways, topology) if ways.is_even else 0.0,
    )


def _bound(batch: _Batch, ways: Ways, effort: Effort) -> LowerBound:
    """Return the bound on plans that use `ways` only."""
    fewest = batch.min_microbatches
    work_s = _work_s(batch, ways, fewest)
    longest_s = _longest_s(batch, ways)
    at_most_s = max(work_s, longest_s)
    tried: list[tuple[int, int, float]] = []
    num_microbatches, schedule_s, is_proven = fewest, 0.0, True
    if batch.topology.pp_size > 1 and np.isfinite(at_most_s):
        spread = _spread(batch, ways)
        if spread is not None:
            tried, is_proven = _sweep(batch, ways, spread, effort, at_most_s)
            num_microbatches, _, schedule_s = min(tried, key=lambda one: one[2])
    parts = {"longest": longest_s, "work": work_s, "schedule": schedule_s}
    binds = max(parts, key=lambda name: parts[name])
    return LowerBound(
        seconds=parts[binds],
        binds=binds,  # type: ignore[arg-type]
        work_s=work_s,
        longest_s=longest_s,
        schedule_s=schedule_s,
        proven_s=parts[binds] if is_proven else at_most_s,
        num_microbatches=num_microbatches,
        tried=tuple(tried),
        is_proven=is_proven or binds != "schedule",
    )


def _work_s(batch: _Batch, ways: Ways, num_microbatches: int) -> float:
    """Return the bound by work, of plans with at least `num_microbatches`."""
    topology, edges = batch.topology, batch.edges_s_per_token
    lane_s = sum_of_least(batch.lengths, ways.longest, batch.work.per_token, batch.work.per_token2)
    lane_s = lane_s / topology.num_lanes + num_microbatches * batch.row_floor_s
    if topology.pp_size == 1:
        return float(lane_s + edges.sum() * batch.tokens)
    # The last stage waits for the first forward and is followed by the last backward of the stages before it.
    ramp_s = (topology.pp_size - 1) / topology.vp_size * batch.row_floor_s
    return float(lane_s + max(edges[:2].sum() * batch.tokens, ramp_s + edges[2:].sum() * batch.tokens))


def _longest_s(batch: _Batch, ways: Ways) -> float:
    """Return the least seconds of the longest sample through all stages, there and back, or of several long ones."""
    both_s = _lone_s(batch, ways).sum(axis=1) * batch.topology.pp_size
    longest = batch.lengths.seqlens[0]
    both_s += batch.edges_s_per_token.sum() * longest / ways.cp_sizes[ways.longest >= longest]
    if batch.topology.pp_size == 1:
        both_s += (batch.min_microbatches - 1) * batch.row_floor_s
    alone_s = float(both_s.min(initial=np.inf)) - 1e-9 * (batch.topology.pp_size * batch.topology.vp_size + 2)
    return max(alone_s, batch.giants_s)


def _lone_s(batch: _Batch, ways: Ways) -> Floats:
    """Return [way that the longest sample may run in, direction] -> seconds of a bucket with only that sample."""
    tokens = float(batch.lengths.seqlens[0])
    square = float(density_of(batch.lengths.densities, 0)) * tokens * tokens
    rows = np.flatnonzero(ways.longest >= tokens).tolist()
    both = [[price(ways.terms, way, direction, tokens, square) for direction in range(2)] for way in rows]
    return np.array(both).reshape(-1, 2)


def _spread(batch: _Batch, ways: Ways) -> Spread | None:
    """Return what paths play against; None where the prices have no shape that paths can use."""
    num_lanes, longest = batch.topology.num_lanes, batch.lengths.seqlens[0]
    padding = 2 * ways.cp_sizes.max() * (1 + batch.topology.rank_token_multiple)
    # A block that shares experts takes the longest of its lanes, and experts by what all of them hold.
    apart = without_experts(ways) if ways.expert_s.any() else ways
    least, largest = ratio_range(apart, float(longest + padding), *batch.lengths.density_range)
    least, largest = min(least, ways.expert_ratios[0]), max(largest, ways.expert_ratios[1])
    if not 1e-6 < least < np.inf:
        return None
    sizes = ways.cp_sizes[ways.longest >= longest]
    lanes, longest_s = int(sizes.min()), _lone_s(batch, ways) - ways.floors_s
    if not ways.is_even:
        # Any of its lanes may have little of it: what is known is the mean over all lanes.
        lanes, longest_s = num_lanes, longest_s * sizes[:, None] / num_lanes
    angles = np.linspace(0.0, 1.0, NUM_DIRECTIONS)
    return Spread(
        shares=np.array([lanes, num_lanes - lanes][: 1 + (lanes < num_lanes)]) / num_lanes,
        floors_s=ways.floors_s,
        work_s=np.array([least_work(batch.lengths, ways, 1.0 - t, t).seconds / num_lanes for t in angles]),
        least_ratio=least * (1.0 - 1e-9),
        inverse_ratio=min(1.0 / largest, 0.999 / least) * (1.0 - 1e-9),
        longest_s=longest_s.min(axis=0),
        token_s=batch.edges_s_per_token * batch.tokens,
    )


def _sweep(
    batch: _Batch, ways: Ways, spread: Spread, effort: Effort, others_s: float
) -> tuple[list[tuple[int, int, float]], bool]:
    """Return (num_microbatches, position, seconds) of the schedule part, and whether that was all of them.

    All were tried, too, when one of them is below `others_s`: then the schedule part does not bind.
    """
    topology = batch.topology
    multiple = topology.num_microbatches_multiple
    sweep = _SWEEPS["quick" if effort == "quick" else "report"]

    def bound_s(num_microbatches: int, position: int, steps: int, enough_s: float) -> float:
        least_s = _work_s(batch, ways, num_microbatches)
        if least_s >= enough_s:
            return least_s
        # A longer schedule takes longer to learn.
        steps = steps * min(max(_STEPS_FOR, num_microbatches), _MOST_STEPS_FOR) // _STEPS_FOR
        path_s = path_bound_s(spread, topology.pp_size, topology.vp_size, num_microbatches, position, steps, enough_s)
        return max(least_s, path_s)

    first: list[tuple[float, int]] = []
    num_above = 0
    num_microbatches = batch.min_microbatches
    # Where rows cost nothing the work bound never passes; rows without samples gain nothing either.
    most = max(batch.min_microbatches, round_up(len(batch.lengths.seqlens), multiple))
    while len(first) < 64 and num_microbatches <= most:
        value_s = bound_s(num_microbatches, int(sweep.positions[0] * num_microbatches), sweep.first_steps, np.inf)
        least_s = min((value for value, _ in first), default=np.inf)
        first.append((value_s, num_microbatches))
        num_above = num_above + 1 if value_s > sweep.stop_above * least_s else 0
        if num_above == sweep.stop_after or _work_s(batch, ways, num_microbatches) > least_s:
            break
        num_microbatches = round_up(max(num_microbatches + 1, int(num_microbatches * sweep.growth)), multiple)

    best_s = np.inf
    tried = []
    for value_s, num_microbatches in sorted(first):
        position = int(sweep.positions[0] * num_microbatches)
        if value_s < _CLOSE * best_s:
            value_s = max(value_s, bound_s(num_microbatches, position, sweep.steps, _CLOSE * best_s))
        tried.append((num_microbatches, position, value_s))
        best_s = min(best_s, value_s)
    least = min(tried, key=lambda one: one[2])[0]
    for share in sweep.positions[1:]:
        position = min(int(share * least), least - 1)
        tried.append((least, position, bound_s(least, position, sweep.steps, _CLOSE * best_s)))
        best_s = min(best_s, tried[-1][2])

    # Few micro-batches: where the longest sample is matters, and trying every place takes little time.
    num_microbatches, enough_s = batch.min_microbatches, best_s if effort != "exhaustive" else _CLOSE * best_s
    while _work_s(batch, ways, num_microbatches) < best_s and best_s > others_s:
        if num_microbatches > (_MOST_MICROBATCHES if effort == "exhaustive" else _FEW_MICROBATCHES):
            return tried, False
        for position in range(num_microbatches):
            value_s = bound_s(num_microbatches, position, sweep.steps, enough_s)
            if value_s < best_s:
                tried.append((num_microbatches, position, value_s))
                best_s = value_s
        num_microbatches += multiple
    return tried, True


def _sharpened(batch: _Batch, bound: LowerBound, effort: Effort) -> LowerBound:
    """Return `bound`, or a larger one where otherwise samples would have to run in ways that take longer alone.

    Bisects for the largest x that the bound without ways of more than x seconds reaches. With a pipeline quick sweeps
    look for it, and one of `effort` says what holds there.
    """
    if batch.topology.pp_size > 1:
        return bound if effort == "quick" else _sharpened_pipelined(batch, bound, effort)
    low_s, high_s = bound.seconds, bound.seconds * _SHARPEN_UP_TO
    limit_s = low_s * _MIN_GAIN
    for _ in range(_SHARPEN_STEPS):
        candidate = _bound(batch, _faster_than(batch, limit_s), effort)
        if candidate.seconds >= limit_s:
            bound = _larger(bound, candidate, limit_s)
            low_s = limit_s
        elif low_s == bound.seconds and limit_s == bound.seconds * _MIN_GAIN:
            return bound
        else:
            high_s = limit_s
        limit_s = 0.5 * (low_s + high_s)
    return bound


def _sharpened_pipelined(batch: _Batch, bound: LowerBound, effort: Effort) -> LowerBound:
    free_s = _work_s(batch, batch.ways, 1)
    limit_s, low_s, high_s = bound.seconds * _MIN_GAIN, bound.seconds, bound.seconds * _SHARPEN_PIPELINED
    for _ in range(_SHARPEN_STEPS):
        ways = _faster_than(batch, limit_s)
        # Where all samples keep their cheapest ways the bound stays what it was.
        reaches = _work_s(batch, ways, 1) >= free_s * _MIN_GAIN and _bound(batch, ways, "quick").seconds >= limit_s
        if not reaches and low_s == bound.seconds and limit_s == low_s * _MIN_GAIN:
            return bound
        low_s, high_s = (limit_s, high_s) if reaches else (low_s, limit_s)
        limit_s = 0.5 * (low_s + high_s)
    return _larger(bound, _bound(batch, _faster_than(batch, low_s), effort), low_s)


def _faster_than(batch: _Batch, limit_s: float) -> Ways:
    """Return the ways, each only for samples whose bucket alone fits into a plan of `limit_s`."""
    others_s = (batch.min_microbatches - 1) * batch.row_floor_s if batch.topology.pp_size == 1 else 0.0
    edge_s_per_token = float(batch.edges_s_per_token.sum())
    # 1e-6 s: prices are rounded to nanoseconds.
    limit_s = limit_s - others_s + 1e-6
    return batch.ways._replace(
        longest=longest_within(
            batch.ways, float(batch.topology.pp_size), edge_s_per_token, limit_s, batch.lengths.density_range[0]
        )
    )


def _larger(bound: LowerBound, restricted: LowerBound, limit_s: float) -> LowerBound:
    """Return the larger of `bound` and min(limit_s, restricted)."""
    if min(limit_s, restricted.seconds) <= bound.seconds:
        return bound
    return replace(
        restricted,
        seconds=min(limit_s, restricted.seconds),
        work_s=min(limit_s, restricted.work_s),
        longest_s=min(limit_s, restricted.longest_s),
        schedule_s=min(limit_s, restricted.schedule_s),
        proven_s=max(bound.proven_s, min(limit_s, restricted.proven_s)),
        is_proven=restricted.is_proven,
    )
