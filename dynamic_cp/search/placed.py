"""Plans whose micro-batches are placed: each is cut into blocks that lie where simulation says they cost least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from dynamic_cp.mechanisms.blocks import why_too_much_fetched
from dynamic_cp.mechanisms.links import lanes_in_one_node
from dynamic_cp.mechanisms.ring import Ring
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.placement import Placed, PlacementProblem, candidates
from dynamic_cp.placement.programme import buffer_tokens_of
from dynamic_cp.placement.transport import divide
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pricing.cost_model import CostModel, lane_costs
from dynamic_cp.types import PLACED, Bucket, MicroBatch, Placement, Plan, PlanOptions, Sample

_DIVISIONS = (4, 1, 2, 8)
_NUM_DIVIDED = 2
"""Placements that are tried with all numbers of divisions, after all were with the first."""
_ROW_FILL = 0.97
"""Share of the lanes' tokens that level rows fill: lanes do not come out exactly even."""


def may_place(options: PlanOptions) -> bool:
    """Return whether plans may have placed micro-batches."""
    return not set(PLACED).isdisjoint(options.cp_comm_types)


def options_of_packing(options: PlanOptions) -> PlanOptions:
    """Return what packers choose from, who know closed forms only; where none is allowed they guess by the ring."""
    packed = tuple(name for name in options.cp_comm_types if name not in PLACED)
    return replace(options, cp_comm_types=packed or (Ring.name,))


class PlacedPlan(NamedTuple):
    """A plan, its makespan in nanoseconds and its name for the user."""

    makespan_ns: int
    name: str
    plan: Plan


def placed_plans(plan: Plan, samples: Sequence[Sample], cost_model: CostModel) -> Iterator[PlacedPlan]:
    """Yield plans of the same samples whose micro-batches are placed, where their tokens fit.

    Args:
        plan: a legal one, whose rows are kept in one of them.
        samples: descending by seqlen, ties by ascending sample_id.
        cost_model: its topology, limits and prices of attention.
    """
    topology = cost_model.topology
    rows = [[sample for bucket in one.buckets for sample in bucket.samples] for one in plan.micro_batches]
    rows = [row for row in rows if row]
    fewest = ceil(plan.num_tokens / (_ROW_FILL * cost_model.options.max_tokens_per_rank * topology.num_lanes))
    tried = {f"m={len(rows)}": rows}
    for num_rows in sorted({fewest, fewest + 1, len(rows)}):
        level = _level_rows(samples, num_rows, cost_model)
        if level is not None:
            tried[f"level m={num_rows}"] = level
    for name, chosen in tried.items():
        micro_batches = [place_row(row, cost_model) for row in chosen]
        found = [one for one in micro_batches if one is not None]
        if len(found) < len(chosen):
            continue
        multiple = topology.num_microbatches_multiple
        empty = MicroBatch(buckets=tuple(Bucket(first_lane=lane) for lane in range(topology.num_lanes)))
        found += [empty] * (round_up(len(found), multiple) - len(found))
        one = replace(plan, micro_batches=tuple(found))
        yield PlacedPlan(makespan_ns(one, cost_model), f"placed {name}", one)


def _level_rows(samples: Sequence[Sample], num_rows: int, cost_model: CostModel) -> list[list[Sample]] | None:
    """Return samples on rows of about equal work, the most first, each on the row with least; None: they do not fit."""
    topology, options = cost_model.topology, cost_model.options
    most_tokens = _ROW_FILL * options.max_tokens_per_rank * topology.num_lanes
    work = [cost_model.duration_ns(1, 0, sample.seqlen, sample.squared_tokens) for sample in samples]
    rows: list[list[Sample]] = [[] for _ in range(num_rows)]
    held, load = np.zeros(num_rows), np.zeros(num_rows)
    for index in np.argsort(-np.array(work), kind="stable").tolist():
        sample = samples[index]
        fits = held + sample.seqlen <= most_tokens
        if not fits.any():
            return None
        row = int(np.where(fits, load, np.inf).argmin())
        rows[row].append(sample)
        held[row] += sample.seqlen
        load[row] += work[index]
    return [row for row in rows if row]


def place_row(samples: Sequence[Sample], cost_model: CostModel) -> MicroBatch | None:
    """Return the fastest placed micro-batch of `samples` on all lanes; None where none keeps the limit."""
    num_lanes = cost_model.topology.num_lanes
    query_bytes, kv_bytes = cost_model.bytes_per_token()
    problem = PlacementProblem(
        num_lanes=num_lanes,
        node_lanes=lanes_in_one_node(cost_model.topology),
        row_bytes=max(1, round(query_bytes)),
        column_bytes=max(1, round(kv_bytes)),
    )
    best: list[tuple[float, int, MicroBatch]] = []
    fitting: list[tuple[float, int, Placed]] = []
    for placed in candidates(samples, problem):
        found = _priced(samples, placed, _DIVISIONS[0], problem, cost_model)
        if found is not None:
            fitting.append((found[0], len(fitting), placed))
            best.append((found[0], len(best), found[1]))
    for _, _, placed in sorted(fitting)[:_NUM_DIVIDED]:
        for num_divisions in _DIVISIONS[1:]:
            found = _priced(samples, placed, num_divisions, problem, cost_model)
            assert found is not None
            best.append((found[0], len(best), found[1]))
    for _, _, row in sorted(best, key=lambda one: one[:2]):
        placement = row.buckets[0].placement
        assert placement is not None
        buffers = buffer_tokens_of(placement, num_lanes, 0, problem.node_lanes)
        if why_too_much_fetched(buffers, cost_model.options.max_tokens_per_rank) is None:
            return row
    return None


def _priced(
    samples: Sequence[Sample], placed: Placed, num_divisions: int, problem: PlacementProblem, cost_model: CostModel
) -> tuple[float, MicroBatch] | None:
    """Return (seconds of the slowest lane, the micro-batch); None where a lane holds more than the limit."""
    tokens = (placed.homes[:, 2] - placed.homes[:, 1]).astype(np.int64)
    bytes_per_token = np.array([problem.row_bytes, problem.column_bytes], np.float64)
    tiles = placed.tiles.astype(np.int64)
    division = divide(
        placed.homes[:, 3].astype(np.int64), tokens, tiles, bytes_per_token, num_divisions, problem.num_lanes,
        problem.node_lanes,
    )  # fmt: skip
    placement = Placement(placed.homes, np.column_stack([placed.tiles, division]).astype(np.int32))
    bucket = Bucket(
        first_lane=0, cp_size=problem.num_lanes, cp_comm_type=PLACED[0], samples=tuple(samples), placement=placement
    )
    held = placement.home_tokens(problem.num_lanes)
    if round_up(max(held), cost_model.topology.rank_token_multiple) > cost_model.options.max_tokens_per_rank:
        return None
    row = MicroBatch(buckets=(bucket,))
    return max(cost.forward_s + cost.backward_s for _, cost in lane_costs(row, cost_model)), row
