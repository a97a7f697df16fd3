"""Micro-batches are placed wherever lanes have room, however full they are and however little may be tried."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import dynamic_cp.search.placed as search
from dynamic_cp.plans.padding import placed_tokens
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.placed import place_row
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import FULL, Mask, MicroBatch, Plan, Sample, Topology, parse_mask
from tests.unit.support import llama_on_h100

MASKS = (None, FULL, parse_mask("lambda:64,1024"), parse_mask("causal_blockwise:256,4,1"))


def cost_model(num_lanes: int, limit: int, tp_size: int = 1) -> CostModel:
    topology = Topology(num_lanes=num_lanes, tp_size=tp_size, sequence_parallel=tp_size > 1)
    return CostModel(llama_on_h100(topology, max_tokens_per_rank=limit, recompute="full", cp_comm_types=("blocks",)))


def of_mask(seqlens: Sequence[int], mask: Mask | None) -> list[Sample]:
    return [Sample(sample_id=index, seqlen=seqlen, mask=mask) for index, seqlen in enumerate(seqlens)]


def check_row(row: MicroBatch | None, samples: list[Sample], prices: CostModel) -> None:
    """Check that a row is there, legal, and keeps the limits of what lanes hold and fetch."""
    assert row is not None
    check_plan(
        Plan(topology=prices.topology, max_tokens_per_rank=prices.options.max_tokens_per_rank, micro_batches=(row,)),
        samples,
    )


def test_a_row_is_placed_where_only_an_even_one_fits() -> None:
    """All but 125 of 8192 tokens are taken; 5 % more than the mean, as is usual otherwise, would not fit on a lane."""
    prices = cost_model(4, 2048)
    samples = of_mask([3967, 2397, 1370, 333], FULL)
    row = place_row(samples, prices)
    check_row(row, samples, prices)
    assert row is not None
    assert max(placed_tokens(row.buckets[0])) <= 2048


@pytest.mark.parametrize("mask", MASKS)
def test_lanes_may_be_full_to_the_last_token(mask: Mask | None) -> None:
    prices = cost_model(4, 2048)
    samples = of_mask([5000, 2000, 1000, 192], mask)
    row = place_row(samples, prices)
    check_row(row, samples, prices)
    assert row is not None
    assert placed_tokens(row.buckets[0]) == (2048,) * 4
    more = of_mask([5000, 2000, 1000, 193], mask)
    assert place_row(more, prices) is None


def test_one_document_that_fills_its_lanes_is_placed() -> None:
    """What its lanes fetch has room only a part at a time, in many divisions."""
    prices = cost_model(16, 16384, tp_size=4)
    samples = of_mask([int(0.97 * 16 * 16384)], None)
    check_row(place_row(samples, prices), samples, prices)


def test_it_goes_on_until_something_fits() -> None:
    """What comes first, greedy placements, fetches too much here, with heads exchanged or not."""
    prices = cost_model(32, 2048, tp_size=4)
    samples = of_mask([62259], parse_mask("causal_blockwise:256,4,1"))
    check_row(place_row(samples, prices, most_candidates=0), samples, prices)


@pytest.mark.by_day(*map(str, range(0, 30, 4)))
@pytest.mark.parametrize("seed", range(30))
def test_how_many_are_tried_never_decides_whether_one_is_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    prices = cost_model(int(random.choice([4, 8, 12])), 2048, int(random.choice([1, 2, 4])))
    fill = float(random.choice([0.5, 0.9, 0.97, 0.985, 1.0])) * 2048 * prices.topology.num_lanes
    shares = random.lognormal(0, 1.3, int(random.integers(1, 12)))
    seqlens = sorted(np.maximum(1, (shares / shares.sum() * fill).astype(int)).tolist(), reverse=True)
    samples = of_mask(seqlens, MASKS[seed % len(MASKS)])
    few, all_of_them = place_row(samples, prices, most_candidates=0), place_row(samples, prices)
    assert (few is None) == (all_of_them is None)
    if few is not None:
        check_row(few, samples, prices)
        check_row(all_of_them, samples, prices)


def test_a_step_of_no_time_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of candidates follows the time of a step; rows are placed even where that is none."""
    monkeypatch.setattr(search, "_CANDIDATES_PER_S", {"fast": 0, "thorough": 0})
    options = {"max_tokens_per_rank": 2048, "recompute": "full", "cp_comm_types": ("blocks",)}
    samples = of_mask([9000, 4000, 3000, 2000, 1000, 900], FULL)
    plan = plan_problem(llama_on_h100(Topology(num_lanes=8, pp_size=2), **options), samples).plan
    check_plan(plan, samples)
    assert all(bucket.placement is not None for row in plan.micro_batches for bucket in row.buckets if bucket.samples)
