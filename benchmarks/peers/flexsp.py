"""A planner in the manner of FlexSP (ASPLOS '25), written from its description: one small MILP per micro-batch.

1. The samples, sorted by length, are cut into M micro-batches of even token counts.
2. The lengths of a micro-batch fall into at most 16 classes, cut so that rounding up to the class's longest adds the
   fewest tokens.
3. A MILP opens CP groups and says how many samples of each class each group takes; it minimises the slowest group,
   within the token limit, every sample rounded up to its class.
4. A few M from the fewest possible on are solved; the fastest plan wins.

What differs from the paper: prices are those of our cost model, exact in the MILP too (convex and piecewise linear),
where the paper's add up over samples; CBC instead of SCIP; limits count padded tokens. The paper has no pipeline:
with one, its plan is simulated as it is, in the best of three orders. It has a barrier after each micro-batch, the
simulator has none, which is generous to it. A solver is stopped by the clock, so seconds may differ from run to run.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from benchmarks.peers.peer import PeerBucket, PeerResult, best_order, longest_first
from dynamic_cp.mechanisms.stage_attention import Convex
from dynamic_cp.plans.padding import padded_seqlen
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import convex_of
from dynamic_cp.types import Sample

MAX_CLASSES = 16
GAP = 0.02
"""A micro-batch within this share of its bound is solved."""


def peer(
    samples: Sequence[Sample], cost_model: CostModel, *, seconds_per_solve: float = 5.0, num_counts: int = 6
) -> PeerResult:
    """Return the fastest plan over `num_counts` numbers of micro-batches.

    Args:
        samples: one global batch.
        cost_model: prices, limits, lanes.
        seconds_per_solve: time limit of the MILP of one micro-batch.
        num_counts: numbers of micro-batches tried, from the fewest possible on; counts that a MILP could not serve do
            not count, up to as many again.
    """
    ordered = longest_first(samples)
    num_lanes = cost_model.topology.num_lanes
    capacity = max(int(held) >> k for k, held in enumerate(cost_model.table.capacities)) * num_lanes
    fewest = ceil(sum(sample.seqlen for sample in ordered) / capacity)
    best: PeerResult | None = None
    solved = 0
    for count in range(fewest, min(fewest + 2 * num_counts, len(ordered) + 1)):
        rows = []
        for part in _even_parts(ordered, count):
            row = _solve(part, cost_model, seconds_per_solve)
            if row is None:
                break
            rows.append(row)
        else:
            solved += 1
            seconds, plan = best_order(rows, cost_model, "flexsp")
            if best is None or best.seconds is None or seconds < best.seconds:
                best = PeerResult(seconds, plan, f"{count} micro-batches")
            if solved == num_counts:
                break
    return best or PeerResult(None, None, f"no solution within {seconds_per_solve} s a micro-batch")


def _even_parts(ordered: Sequence[Sample], count: int) -> list[Sequence[Sample]]:
    """Cut `ordered` into at most `count` runs of about even token counts."""
    ends = np.cumsum([sample.seqlen for sample in ordered])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
    bounds = sorted({0, *(cuts + 1).tolist(), len(ordered)})
    return [ordered[start:stop] for start, stop in pairwise(bounds)]


def _length_classes(ordered: Sequence[Sample]) -> list[int]:
    """Return for each class its number of samples, longest first, such that rounding up adds the fewest tokens."""
    lengths = np.array([sample.seqlen for sample in ordered], np.float64)
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    count = len(ordered)
    # added[c, i]: fewest tokens that rounding adds to the first i samples in c classes; a class starts at its longest.
    num_classes = min(MAX_CLASSES, count)
    added = np.full((num_classes + 1, count + 1), np.inf)
    start_of = np.zeros((num_classes + 1, count + 1), np.int64)
    added[0, 0] = 0.0
    for c in range(1, num_classes + 1):
        for end in range(c, count + 1):
            starts = np.arange(c - 1, end)
            totals = added[c - 1, starts] + lengths[starts] * (end - starts) - (sums[end] - sums[starts])
            best = int(np.argmin(totals))
            added[c, end], start_of[c, end] = totals[best], starts[best]
    sizes = []
    end = count
    for c in range(num_classes, 0, -1):
        sizes.append(end - int(start_of[c, end]))
        end = int(start_of[c, end])
    return sizes[::-1]


def _solve(ordered: Sequence[Sample], cost_model: CostModel, limit_s: float) -> list[PeerBucket] | None:
    """Return the buckets of one micro-batch; None when the solver found nothing in time or nothing fits."""
    try:
        pulp = importlib.import_module("pulp")
    except ImportError as error:
        raise ImportError("the FlexSP peer solves MILPs with pulp: pip install pulp") from error

    table, num_lanes = cost_model.table, cost_model.topology.num_lanes
    sizes = _length_classes(ordered)
    longest = [ordered[sum(sizes[:index])].seqlen for index in range(len(sizes))]  # of each class
    problem = pulp.LpProblem("flexsp", pulp.LpMinimize)
    slowest = pulp.LpVariable("slowest_ms", 0)
    problem += slowest
    opened: dict[tuple[int, int], Any] = {}
    taken: dict[tuple[int, int, int], Any] = {}
    for k, capacity in enumerate(table.capacities.tolist()):
        padded = [padded_seqlen(length, int(table.multiples[k])) for length in longest]
        if not capacity or padded[-1] > capacity:
            continue
        for group in range(num_lanes >> k):
            name = f"{1 << k}_{group}"
            is_open = opened[k, group] = pulp.LpVariable(f"open_{name}", cat="Binary")
            if group:
                problem += opened[k, group - 1] >= is_open  # groups of a size are interchangeable
            for index, length in enumerate(padded):
                if length <= capacity:
                    taken[k, group, index] = pulp.LpVariable(
                        f"take_{name}_{index}", 0, min(sizes[index], capacity // length), cat="Integer"
                    )
            parts = [
                (taken[k, group, index], padded[index]) for index in range(len(sizes)) if (k, group, index) in taken
            ]
            tokens = pulp.lpSum(length * variable for variable, length in parts)
            squares = pulp.lpSum(float(length) ** 2 * variable for variable, length in parts)
            problem += tokens <= capacity * is_open
            row = table.level_terms[table.first_option[k, table.links[k, 0]]]
            edges_ms = 1e3 * table.slowest_s_per_token / (1 << k)
            total = edges_ms * tokens
            for direction in range(2):
                total += _price_ms(
                    convex_of(row[direction]), is_open, tokens, squares, f"{name}_{direction}", problem, pulp
                )
            problem += total <= slowest
    start = _uniform_start(longest, sizes, cost_model)
    for key, variable in taken.items():
        variable.setInitialValue(start.get(key, 0))
    in_use = {(k, group) for k, group, _ in start}
    for place, variable in opened.items():
        variable.setInitialValue(int(place in in_use))
    for index, size in enumerate(sizes):
        problem += pulp.lpSum(variable for (_, _, of), variable in taken.items() if of == index) == size
    problem += pulp.lpSum((1 << k) * variable for (k, _), variable in opened.items()) <= num_lanes
    problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=limit_s, gapRel=GAP, threads=1, warmStart=bool(start)))
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    ends = np.cumsum(sizes).tolist()
    queues = [list(ordered[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    buckets, lane = [], 0
    for k, group in sorted(opened, reverse=True):  # descending CP sizes in a row are aligned
        held: list[Sample] = []
        for index, queue in enumerate(queues):
            number = round(taken[k, group, index].value() or 0) if (k, group, index) in taken else 0
            held += queue[:number]
            del queue[:number]
        if held:
            buckets.append(PeerBucket(lane, 1 << k, held))
            lane += 1 << k
    return buckets


def _uniform_start(
    longest: Sequence[int], sizes: Sequence[int], cost_model: CostModel
) -> dict[tuple[int, int, int], int]:
    """Return (log2 of CP size, group, class) -> samples of the fastest assignment with one CP size; empty: none fits.

    Longest sample first, to the group with the least work: what the solver starts from.
    """
    table = cost_model.table
    best: dict[tuple[int, int, int], int] = {}
    least = np.inf
    for k, capacity in enumerate(table.capacities.tolist()):
        num_groups = cost_model.topology.num_lanes >> k
        groups = [(0, 0.0, 0.0, group) for group in range(num_groups)]  # nanoseconds, tokens, squares
        taken: dict[tuple[int, int, int], int] = {}
        for index in [index for index, size in enumerate(sizes) for _ in range(size)]:
            length = padded_seqlen(longest[index], int(table.multiples[k]))
            fitting = [group for group in groups if group[1] + length <= capacity]
            if not fitting:
                break
            chosen = min(fitting)
            _, tokens, squares, group = chosen
            tokens, squares = tokens + length, squares + float(length) ** 2
            groups[group] = (cost_model.duration_ns(1 << k, 0, tokens, squares), tokens, squares, group)
            taken[k, group, index] = taken.get((k, group, index), 0) + 1
        else:
            if max(groups)[0] < least:
                best, least = taken, max(groups)[0]
    return best


def _price_ms(convex: Convex, is_open, tokens, squares, name: str, problem, pulp):  # type: ignore[no-untyped-def]
    """Return the milliseconds of one direction of a group as a linear expression; kinks become variables."""
    constant, per_token, per_token2 = (1e3 * seconds for seconds in convex.linear)
    total = constant * is_open + per_token * tokens + per_token2 * squares
    for number, (weight, inner) in enumerate(convex.kinks):
        exposed = pulp.LpVariable(f"exposed_{name}_{number}", 0)
        line = inner.constant * is_open + inner.per_token * tokens + inner.per_token2 * squares
        problem += exposed >= 1e3 * line
        total += weight * exposed
    return total
