"""Training by ticks, in which ranks of all stages compute attention, equals training in a single process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.placement.legal import tiles_between, why_misplaced
from dynamic_cp.placement.programme import Programme, programmes_of
from dynamic_cp.plans.padding import placed_share
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import CAUSAL, Bucket, MicroBatch, Placement, Plan, Sample
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.layout.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator, schedule_groups
from megatron.dynamic_cp.step.ticks import Pool, check_config, check_number, move_to, run_ticks, ticks_of
from tests.distributed import reference
from tests.distributed.harness import run_ranks
from tests.distributed.parity import (
    BATCHES,
    Case,
    Comparison,
    Layout,
    assert_equal_to_reference,
    in_jobs_of_their_own,
    run_step,
)
from tests.placements import random_placement

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
LAYOUTS = {
    "pp2": Layout(2, pp=2, ranks_per_node=2),
    "pp2_full_recompute": Layout(2, pp=2, config=FULL_RECOMPUTE, distributed_optimizer=True, overlap_grad_reduce=True),
    "pp2_selective_recompute": Layout(2, pp=2, variant="gpt2", config=SELECTIVE_RECOMPUTE, distributed_optimizer=True),
}
EACH_NIGHT = {
    "pp4": Layout(2, pp=4, ranks_per_node=4),
    "pp4_tied": Layout(2, pp=4, variant="llama_tied", config=FULL_RECOMPUTE),
    "pp2_four_lanes": Layout(4, pp=2, ranks_per_node=2, overlap_grad_reduce=True),
    "tp2_sp_pp2": Layout(2, tp=2, sp=True, pp=2),
    "tp2_sp_pp2_distributed_optimizer": Layout(2, tp=2, sp=True, pp=2, distributed_optimizer=True),
}


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(EACH_NIGHT, marks=pytest.mark.nightly)], ids=["four", "eight"]
)
def test_ticks_equal_single_process(layouts: dict[str, Layout], reference_of: Any) -> None:
    samples = BATCHES["long_tail"]
    cases = {}
    for name, layout in layouts.items():
        plan = pool_plan(samples, layout, num_microbatches=4)
        check_plan(plan, samples)
        cases[name] = Case(layout, samples, plan, reference_of(layout, "long_tail"))
    by_world_size: dict[int, dict[str, Case]] = defaultdict(dict)
    for name, case in cases.items():
        by_world_size[case.layout.topology.world_size][name] = case
    for world_size, alike in by_world_size.items():
        ranks = run_ranks(world_size, run_by_ticks, alike, timeout_s=60 + 20 * len(alike))
        for name, case in alike.items():
            found = [rank[name] for rank in ranks]
            assert_equal_to_reference([comparison for comparison, _ in found], case.layout, case.expected)
            served = np.array([tiles for _, tiles in found])
            assert (served[:, 0] > 0).any(), "nobody computed for another stage"
            assert (served[:, 1] == 0).any(), "some tick leaves a rank without tasks"


def run_by_ticks(cases: Mapping[str, Case]) -> dict[str, tuple[Comparison, tuple[int, int]]]:
    """Return what a rank found in each case, how many tiles of other stages it computed, and its fewest in a tick."""
    found = {}
    for name, case in in_jobs_of_their_own(cases):
        counted: list[tuple[int, int]] = []
        found[name] = (run_step(*case, None, partial(run_pool, case, counted)), counted[0])
    return found


def run_pool(
    case: Case, counted: list[tuple[int, int]], model: list[Any], step: StepData, forward_step_func: Callable[..., Any]
) -> None:
    """Run a step by ticks whose placements are random."""
    layout, plan = case.layout, case.plan
    lanes, (one,) = layout.lanes, model
    stage = parallel_state.get_pipeline_model_parallel_rank()
    lane = parallel_state.get_data_parallel_rank()
    member, num_members = stage * lanes + lane, layout.pp * lanes
    multiple = layout.topology.rank_token_multiple
    placed = [bucket.placement for bucket in plan.buckets]
    tokens = [placed_share(placement.home_tokens(lanes)[lane], 1, multiple) for placement in placed]
    parts: dict[bool, list[PlacedLane]] = {True: [], False: []}
    elsewhere, fewest = 0, 1 << 30
    for is_forward, numbered in parts.items():
        for number in range(plan.num_microbatches + layout.pp - 1):
            placement, samples = tick_placement(plan, layout, number, is_forward=is_forward)
            programme = programmes_of(placement, num_members, 0, layout.topology.lanes_per_node)[member]
            known = tuple(samples[index] for index in placement.samples_of(member))
            micro_batch = micro_batch_of(number, stage, layout, plan, is_forward=is_forward)
            own = 0 if micro_batch is None else tokens[micro_batch]
            numbered.append(PlacedLane(programme=programme, samples=known, num_tokens=own))
            mine = placement.tiles[placement.tiles[:, 2] == member]
            elsewhere += int((placement.homes[mine[:, 0], 3] // lanes != stage).sum())
            fewest = min(fewest, len(mine))
    counted.append((elsewhere, fewest))
    config = get_model_config(one)
    run_ticks(
        one,
        step.data_iterators[0],
        Pool(group=pool_group(layout), forward=tuple(parts[True]), backward=tuple(parts[False])),
        PlannedP2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config, tokens),
        schedule_groups(),
        num_microbatches=step.num_microbatches,
        forward_step_func=forward_step_func,
        stats=ExchangeStats(),
    )


def pool_group(layout: Layout) -> dist.ProcessGroup:
    """Return the ranks of all stages and lanes with this one's tensor-parallel rank."""
    members = range(0, layout.topology.world_size, layout.tp)
    found = [dist.new_group([first + tp_rank for first in members]) for tp_rank in range(layout.tp)]
    return found[parallel_state.get_tensor_model_parallel_rank()]


def micro_batch_of(number: int, stage: int, layout: Layout, plan: Plan, *, is_forward: bool) -> int | None:
    ticks = ticks_of(stage, layout.pp, plan.num_microbatches)
    (tick,) = [one for one in ticks if (one.is_forward, one.number) == (is_forward, number)]
    return tick.micro_batch


def tick_placement(plan: Plan, layout: Layout, number: int, *, is_forward: bool) -> tuple[Placement, list[Sample]]:
    """Return random tiles over all stages for the micro-batches of a tick, whose homes are cut once more, and samples.

    One member of the pool computes nothing.
    """
    random = np.random.default_rng((number, is_forward))
    homes: list[tuple[int, int, int, int]] = []
    samples: list[Sample] = []
    for stage in range(layout.pp):
        micro_batch = micro_batch_of(number, stage, layout, plan, is_forward=is_forward)
        if micro_batch is None:
            continue
        (bucket,) = plan.micro_batches[micro_batch].buckets
        for sample, start, stop, lane in bucket.placement.homes.tolist():
            cuts = sorted({start, int(random.integers(start, stop)), stop})
            homes += [
                (len(samples) + sample, first, last, stage * layout.lanes + lane) for first, last in pairwise(cuts)
            ]
        samples += bucket.samples
    without_tiles = Placement(np.array(homes, np.int32), np.zeros((0, 4), np.int32))
    wanted = tiles_between(without_tiles, samples, CAUSAL)
    servers = random.permutation(layout.pp * layout.lanes)[1:]
    lanes, divisions = random.choice(servers, len(wanted.rows)), random.integers(2, size=len(wanted.rows))
    tiles = np.column_stack([wanted.rows, wanted.columns, lanes, divisions]).astype(np.int32)
    placement = Placement(without_tiles.homes, tiles)
    assert why_misplaced(placement, samples, layout.pp * layout.lanes) is None
    return placement, samples


@pytest.mark.parametrize(("pp_size", "num_microbatches"), [(1, 3), (2, 1), (2, 5), (4, 2), (4, 9)])
def test_every_stage_is_in_the_same_phase_and_holds_as_much_as_is_said(pp_size: int, num_microbatches: int) -> None:
    stages = [ticks_of(stage, pp_size, num_microbatches) for stage in range(pp_size)]
    for ticks in zip(*stages, strict=True):
        assert len({(tick.is_forward, tick.number) for tick in ticks}) == 1
    order = [stages[0].index(tick) for tick in stages[0]]
    assert order == sorted(order)
    for stage, ticks in enumerate(stages):
        assert len(ticks) == 2 * (num_microbatches + pp_size - 1)
        for is_forward in (True, False):
            mine = [tick.micro_batch for tick in ticks if tick.is_forward == is_forward]
            assert [one for one in mine if one is not None] == list(range(num_microbatches))
        held = most = 0
        for tick in ticks:
            if tick.micro_batch is not None:
                held += 1 if tick.is_forward else -1
                most = max(most, held)
        assert held == 0
        assert most == min(num_microbatches, 2 * pp_size - 1 - 2 * stage)


def pool_plan(samples: tuple[Sample, ...], layout: Layout, num_microbatches: int) -> Plan:
    """Return a plan of micro-batches that are placed at random over all lanes, one of them of a single token."""
    random = np.random.default_rng(layout.lanes)
    (short, *others) = sorted(samples, key=lambda sample: sample.seqlen)
    dealt = [[short], *(others[index :: num_microbatches - 1] for index in range(num_microbatches - 1))]
    buckets = [
        Bucket(
            first_lane=0,
            cp_size=layout.lanes,
            cp_comm_type="blocks",
            samples=tuple(held),
            placement=random_placement(random, held, layout.lanes, 2),
        )
        for held in dealt
    ]
    return Plan(
        topology=layout.topology,
        max_tokens_per_rank=1 << 20,
        micro_batches=tuple(MicroBatch(buckets=(bucket,)) for bucket in buckets),
        policy="test",
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "2 virtual stages"),
        ({"num_layers_in_last_pipeline_stage": 3}, "num_layers_in_last_pipeline_stage is 3, in a pool it must be off"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1, in a pool it must be off, because all stages run as many layers"),
        ({"num_moe_experts": 8}, "num_moe_experts is 8, .* stages without a micro-batch have no tokens for experts"),
        ({"window_size": (4, 0)}, "window_size is "),
        ({**FULL_RECOMPUTE, "recompute_method": "block"}, "method block and 1 layers"),
        ({**FULL_RECOMPUTE, "recompute_num_layers": 2}, "method uniform and 2 layers"),
    ],
)
def test_what_would_not_run_layer_by_layer_is_refused(given: dict[str, Any], named: str) -> None:
    config = reference.transformer_config(reference.VARIANTS["llama"])
    check_config(config)
    for name, value in given.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedFeatureError, match=named):
        check_config(config)


def test_a_pool_of_another_step_is_refused() -> None:
    pool = Pool(group=None, forward=(None,) * 5, backward=(None,) * 4)
    check_number(pool, 5, forward_only=True)
    with pytest.raises(DisagreementError, match="4 backward ticks, the pass has 5"):
        check_number(pool, 5, forward_only=False)


def test_a_tick_with_other_tokens_than_the_micro_batch_is_refused_before_anything_is_sent() -> None:
    nothing = Programme(held=(), tiles=(), exchanges=(), buffer_tokens=(0, 0))
    params = SimpleNamespace(positions=range(8))
    with pytest.raises(DisagreementError, match="6 tokens of this rank, its micro-batch has 8"):
        move_to(PlacedLane(programme=nothing, samples=(), num_tokens=6), params)
