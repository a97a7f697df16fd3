"""Placed attention: the one place that asks the planner for it, and prices of placements made in given ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.blocks.setting import Setting
from dynamic_cp.mechanisms.blocks import Blocks
from dynamic_cp.mechanisms.placed_seconds import link_rates, work_of_tiles
from dynamic_cp.placement.divisions import Schedule
from dynamic_cp.placement.divisions import divided as placed_in_divisions
from dynamic_cp.placement.placed import Placed
from dynamic_cp.search.placed import place_row
from dynamic_cp.types import CAUSAL, Bucket, MicroBatch, Placement, Sample
from dynamic_cp.types.counts import MAX_COUNT
from dynamic_cp.types.placement import Lanes

BLOCKS = Blocks()


class Price(NamedTuple):
    """What a placement takes.

    Attributes:
        milliseconds: forward and backward, each until its last lane is done.
        exposed_ms: those of them in which the slowest lane does not compute.
        work_imbalance, token_imbalance: of the lanes, max over mean.
    """

    milliseconds: float
    exposed_ms: float
    work_imbalance: float
    token_imbalance: float


def chosen(samples: Sequence[Sample], setting: Setting, most_candidates: int = MAX_COUNT) -> Bucket:
    """Return how the planner places a micro-batch, with all its candidates or fewer."""
    row = place_row(samples, setting.cost_model, most_candidates)
    assert row is not None, "nothing is limited"
    (bucket,) = row.buckets
    return bucket


def divided(placed: Placed, samples: Sequence[Sample], num_divisions: int, setting: Setting) -> Bucket:
    """Return `placed` with its tiles in that many divisions."""
    problem = setting.placement_problem
    tiles = np.column_stack([placed.tiles, np.zeros(len(placed.tiles), np.int32)])
    lanes, rates = Lanes(problem.num_lanes, 0, problem.node_lanes), link_rates(setting.stage)
    placement = placed_in_divisions(
        Placement(placed.homes, tiles), placed.touched, lanes, rates, Schedule.of(num_divisions)
    )
    return Bucket(
        first_lane=0,
        cp_size=setting.num_lanes,
        cp_comm_type=BLOCKS.name,
        samples=tuple(samples),
        placement=placement,
    )


def price(bucket: Bucket, setting: Setting) -> Price:
    """Return what a placed bucket takes in this setting."""
    row = MicroBatch(buckets=(bucket,))
    seconds = BLOCKS.lane_seconds(setting.stage, bucket, row).attention
    alone = BLOCKS.lane_seconds(setting.stage_with_free_links, bucket, row).attention
    assert bucket.placement is not None
    work = np.bincount(
        bucket.placement.tiles[:, 2],
        work_of_tiles(bucket.placement, bucket.samples, CAUSAL).squared_tokens,
        minlength=bucket.num_inner_groups,
    )
    tokens = np.array(bucket.placement.home_tokens(bucket.num_inner_groups))
    total_ms = 1e3 * float(seconds.max(axis=1).sum())
    return Price(
        milliseconds=total_ms,
        exposed_ms=total_ms - 1e3 * float(alone.max(axis=1).sum()),
        work_imbalance=float(work.max() / work.mean()),
        token_imbalance=float(tokens.max() / tokens.mean()),
    )
