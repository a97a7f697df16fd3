"""Training by ticks, in which ranks of all stages compute attention, equals training in a single process."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.placement.legal import tiles_between, why_misplaced
from dynamic_cp.placement.programme import Programme, programmes_of
from dynamic_cp.plans.padding import lane_tokens_of, placed_share
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pool.layer_steps import LayerStep
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.pool.search import plan_tasks
from dynamic_cp.pool.tasks import ticks_of
from dynamic_cp.pool.text import ServerTicks
from dynamic_cp.pool.ticks import Tick, tick_order
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import CAUSAL, Bucket, MicroBatch, Placement, Plan, PlanOptions, Problem, Sample
from dynamic_cp.types.placement import Lanes
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.pool import lane_ticks, ticks
from megatron.dynamic_cp.pool.lane_ticks import LaneTicks, Pool
from megatron.dynamic_cp.pool.layer_pass import StepOrder
from megatron.dynamic_cp.pool.ticks import check_config, check_number, layers_of, move_to, run_ticks
from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator, schedule_groups
from megatron.dynamic_cp.step.schedule import run_schedule
from tests.distributed import reference
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import FULL_RECOMPUTE, layout_of, lines
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
from tests.sent_bytes import pool_bytes


class Ways(NamedTuple):
    """How a layout is tried. rows: micro-batches of steps placed at random; relays: what several use travels once."""

    rows: tuple[int, ...] = (4,)
    ping_pong: tuple[bool, ...] = (True,)
    relays: int = 0


BOTH = (True, False)
BY_DAY = {
    "two pp2 vpp2 full distributed overlap": Ways(rows=(5,), ping_pong=(False,)),
    "two pp2 nodes_of_1 learned_offset full": Ways(rows=(), relays=2),
}
EACH_NIGHT = {
    "two pp2 vpp2 full distributed overlap": Ways(rows=()), "one pp2 cut": Ways(),
    "two pp2 gpt2 again=core_attn distributed": Ways(), "two pp2 nodes_of_1 full": Ways(ping_pong=BOTH, relays=2),
    "two pp2 learned_offset": Ways(ping_pong=BOTH), "one pp2": Ways(ping_pong=BOTH), "two pp2 nodes_of_2": Ways(),
    "two pp2 nodes_of_2 full distributed overlap": Ways(rows=()), "two pp2 vpp2 nodes_of_2": Ways(rows=(1,)),
    "two pp2 learned_offset full": Ways(), "two pp4 nodes_of_4": Ways(), "two pp4 llama_tied full": Ways(),
    "four pp2 nodes_of_2 full overlap": Ways(), "two tp2 sp pp2 distributed": Ways(),
    "two pp4 vpp2 nodes_of_4 overlap layers=8": Ways(rows=(4, 6, 3)),
    "two pp4 vpp2 llama_tied layers=8 full": Ways(rows=(5,)), "two tp2 sp pp2 vpp2 distributed": Ways(),
    "four pp2 vpp4 layers=8 again=core_attn": Ways(rows=(3,)),
    "four pp2 vpp2 nodes_of_1 again=core_attn": Ways(relays=4),
}  # fmt: skip
IN_NANO_BATCHES = dict.fromkeys(
    lines("""
        one pp2 again=core_attn cut; two tp2 sp pp2 full distributed; two tp2 sp pp2 gpt2 again=core_attn
        two pp2 again=layernorm+mlp; two pp2 gated; two pp2 off_by_one again=core_attn
        two tp2 pp2 learned_offset again=core_attn; two pp2 unrotated; two pp2 fp32_residual_gpt2
    """),
    Ways(),
)
"""Ways through a layer that nano-batches have to take, too."""


Ticks = Mapping[Tick, tuple[Placement, Sequence[Sample]]]
"""Who computes what in each tick, and the samples of its micro-batches, stage after stage."""


class PoolCase(NamedTuple):
    """A step by ticks; None: those of the plan's pool, which comes through the data path and runs as in training."""

    case: Case
    ticks: Ticks | None


@pytest.mark.parametrize(
    "layouts",
    [BY_DAY, *(pytest.param(one, marks=pytest.mark.nightly) for one in (EACH_NIGHT, IN_NANO_BATCHES))],
    ids=["day", "night", "nano-batches"],
)
def test_ticks_equal_single_process(layouts: dict[str, Ways], reference_of: Any) -> None:
    """With tasks that are scattered at random, and with those that are planned."""
    cases: dict[int, dict[str, PoolCase]] = defaultdict(dict)
    for name, ways in layouts.items():
        layout, batch = layout_of(name.removesuffix(" cut")), "cut" if name.endswith(" cut") else "long_tail"
        samples, expected = BATCHES[batch], reference_of(layout, batch)
        alike = cases[layout.topology.world_size]
        for num_rows in ways.rows if layout.lanes > 1 else ():
            plan, ticks = random_step(samples, layout, num_rows)
            # As one without ticks, which has any number of micro-batches where stages have one chunk.
            check_plan(replace(plan, topology=replace(plan.topology, vp_size=1)), samples)
            alike[f"{name}, {num_rows} random"] = PoolCase(Case(layout, samples, plan, expected), ticks)
        for ping_pong in ways.ping_pong:
            plan = planned_step(samples, layout, ping_pong=ping_pong, relay_servers=ways.relays)
            alike[f"{name}, planned, ping-pong {ping_pong}"] = PoolCase(Case(layout, samples, plan, expected), None)
    for world_size, alike in cases.items():
        ranks = run_ranks(world_size, run_by_ticks, alike, timeout_s=60 + 20 * len(alike))
        for name, (case, ticks) in alike.items():
            found = [rank[name] for rank in ranks]
            assert_equal_to_reference(found, case.layout, case.expected)
            lanes = case.layout.lanes
            if ticks is None:
                placements = [tasks.placement() for _, tasks in ticks_of(case.plan)]
                assert_bytes_are_those_of_the_plan(found, case)
            else:
                placements = [placement for placement, _ in ticks.values()]
                servers = [set(placement.tiles[:, 2].tolist()) for placement in placements]
                assert any(len(some) < case.layout.pp * lanes for some in servers), f"{name}: all have tasks always"
            moved = [placement.tiles[:, 2] // lanes != stages_of(placement, lanes) for placement in placements]
            assert np.concatenate(moved).any(), f"{name}: nobody computes for another stage"


def repeats_attention_of(layout: Layout) -> bool:
    config = layout.config
    return "recompute_granularity" in config and "core_attn" in config.get("recompute_modules", ["core_attn"])


take = StepOrder.take


def assert_bytes_are_those_of_the_plan(found: Sequence[Comparison], case: Case) -> None:
    """Every rank has sent what the plan says that its server sends, to the byte."""
    layout = case.layout
    planned = pool_bytes(case.plan, layout.model, repeats_attention_of(layout))
    # Ranks are numbered by stage, lane and tensor-parallel rank.
    assert [one.bytes_sent for one in found] == np.repeat(planned, layout.tp).tolist()
    assert planned.min() > 0


def stages_of(placement: Placement, lanes: int) -> Any:
    return placement.homes[placement.tiles[:, 0], 3] // lanes


def random_step(samples: tuple[Sample, ...], layout: Layout, num_rows: int) -> tuple[Plan, Ticks]:
    """Return micro-batches placed at random, one of a single token, and tiles computed by whoever but one server."""
    random = np.random.default_rng(layout.lanes)
    shortest_first = sorted(samples, key=lambda sample: sample.seqlen)
    alone = shortest_first[: num_rows > 1]
    others = shortest_first[len(alone) :]
    num_others = num_rows - len(alone)
    held = [*((one,) for one in alone), *(tuple(others[index::num_others]) for index in range(num_others))]
    placed = [(one, random_placement(random, one, layout.lanes, 2)) for one in held]
    ticks: dict[Tick, tuple[Placement, Sequence[Sample]]] = {}
    for tick in tick_order(layout.pp, layout.vpp, len(placed)):
        homes: list[tuple[int, int, int, int]] = []
        of_tick: list[Sample] = []
        for stage in range(layout.pp):
            unit = tick.unit(stage, layout.pp, layout.vpp, len(placed))
            if unit is None:
                continue
            own, placement = placed[unit.micro_batch]
            for sample, start, stop, lane in placement.homes.tolist():
                cuts = sorted({start, int(random.integers(start, stop)), stop})
                member = stage * layout.lanes + lane
                homes += [(len(of_tick) + sample, first, last, member) for first, last in pairwise(cuts)]
            of_tick += own
        servers = random.permutation(layout.pp * layout.lanes)[1:]
        ticks[tick] = with_tiles(homes, of_tick, partial(random.choice, servers)), of_tick
    return plan_of([(own, placement.homes) for own, placement in placed], layout), ticks


def planned_step(
    samples: tuple[Sample, ...], layout: Layout, *, ping_pong: bool = True, relay_servers: int = 0
) -> Plan:
    """Return what the planner makes of them, with relays of its own choice or, if not 0, these."""
    options = PlanOptions(max_tokens_per_rank=2048 // layout.lanes, bytes_per_element=4, cp_comm_types=("p2p",))
    prices = CostModel(
        Problem(topology=layout.topology, model=layout.model, hardware=catalog.load_hardware("h100"), options=options)
    )
    options_of_tasks = TaskOptions(tile_tokens=16, ping_pong=ping_pong)
    plan = plan_tasks(samples, prices, options_of_tasks, num_microbatches=(4,)).plan
    assert plan.extension is not None
    assert plan.extension.num_nano_batches == 1 + ping_pong
    if relay_servers:
        plan = replace(plan, extension=replace(plan.extension, relay_servers=relay_servers))
        check_plan(plan, samples)
    return plan


def with_tiles(homes: Any, samples: Sequence[Sample], lanes_of: Callable[[int], Any]) -> Placement:
    """Return the placement with these homes, each tile in one of two divisions."""
    without = Placement(np.array(homes, np.int32), np.zeros((0, 4), np.int32))
    wanted = tiles_between(without, samples, CAUSAL)
    number = len(wanted.rows)
    tiles = np.column_stack([wanted.rows, wanted.columns, lanes_of(number), np.arange(number) % 2])
    return Placement(without.homes, tiles.astype(np.int32))


def plan_of(micro_batches: Sequence[tuple[tuple[Sample, ...], Any]], layout: Layout) -> Plan:
    """Return the plan whose lanes hold these homes; who computes what in it is never asked."""
    rows = [
        MicroBatch(
            buckets=(
                Bucket(
                    first_lane=0, cp_size=layout.lanes, cp_comm_type="blocks", samples=samples,
                    placement=with_tiles(homes, samples, lambda number: np.zeros(number)),
                ),
            )
        )
        for samples, homes in micro_batches
    ]  # fmt: skip
    return Plan(topology=layout.topology, max_tokens_per_rank=1 << 20, micro_batches=tuple(rows), policy="test")


def run_by_ticks(cases: Mapping[str, PoolCase]) -> dict[str, Comparison]:
    return {
        name: run_step(*one.case, partial(run_planned if one.ticks is None else run_pool, one))
        for name, one in in_jobs_of_their_own(cases)
    }


def run_planned(one: PoolCase, model: list[Any], step: StepData, forward_step_func: Callable[..., Any]) -> None:
    """Run a step as training does."""
    lane = parallel_state.get_data_parallel_rank()
    rank_tokens = lane_tokens_of(one.case.plan)[:, lane].tolist()
    taken: list[LayerStep] = []
    with mock.patch.object(StepOrder, "take", lambda self, step: (taken.append(step), take(self, step))):
        run_schedule(
            model, step, 1 << 20, forward_only=False, rank_tokens=rank_tokens, verify_messages=True,
            forward_step_func=forward_step_func,
        )  # fmt: skip
    assert one.case.plan.extension is not None
    layout, planned = one.case.layout, one.case.plan.extension
    # Every layer takes six steps in every tick and direction, with or without a micro-batch.
    num_layers = layout.num_layers // (layout.pp * layout.vpp)
    steps_of_tick = 6 * num_layers * (planned.num_nano_batches == 2)
    assert len(taken) == steps_of_tick * len(planned.forward) * (2 + repeats_attention_of(layout))


def run_pool(one: PoolCase, model: list[Any], step: StepData, forward_step_func: Callable[..., Any]) -> None:
    layout, plan = one.case.layout, one.case.plan
    stage, lane = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    member, num_members = stage * layout.lanes + lane, layout.pp * layout.lanes
    multiple = layout.topology.rank_token_multiple
    placements = [bucket.placement for bucket in plan.buckets if bucket.placement is not None]
    tokens = [placed_share(placement.home_tokens(layout.lanes)[lane], 1, multiple) for placement in placements]
    parts: dict[str, list[PlacedLane]] = {"F": [], "B": []}
    config = get_model_config(model[0])
    if layout.overlap_grad_reduce:  # begun by a function, as where stages begin them together; planned steps have none
        begin = [chunk.start_grad_sync for chunk in model]
        config.grad_sync_func = begin if len(model) > 1 else begin[0]
    assert one.ticks is not None
    lanes = Lanes(num_members, 0, layout.topology.lanes_per_node)
    for tick, (placement, samples) in sorted(one.ticks.items(), key=lambda item: item[0].number):
        assert why_misplaced(placement, samples, num_members) is None
        unit = tick.unit(stage, layout.pp, layout.vpp, plan.num_microbatches)
        parts[tick.kind].append(
            PlacedLane(
                programme=programmes_of(placement, samples, lanes)[member],
                samples=tuple(samples[index] for index in placement.samples_of(member)),
                num_tokens=0 if unit is None else tokens[unit.micro_batch],
            )
        )
    run_ticks(
        Pool(
            group=pool_group(layout),
            ticks=LaneTicks(forward=tuple(parts["F"]), backward=tuple(parts["B"])),
            stats=ExchangeStats(),
        ),
        model,
        step.data_iterators,
        PlannedP2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config, tokens),
        schedule_groups(),
        num_microbatches=step.num_microbatches,
        forward_step_func=forward_step_func,
    )


def pool_group(layout: Layout) -> dist.ProcessGroup:
    """Return the ranks of all stages and lanes with this one's tensor-parallel rank."""
    members = range(0, layout.topology.world_size, layout.tp)
    found = [dist.new_group([first + tp_rank for first in members]) for tp_rank in range(layout.tp)]
    return found[parallel_state.get_tensor_model_parallel_rank()]


@pytest.mark.parametrize(
    ("given", "named"),
    [
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


def test_chunks_of_other_numbers_of_layers_are_refused() -> None:
    def chunk(num_layers: int) -> torch.nn.Module:
        layers = [TorchTHDAttention.__new__(TorchTHDAttention) for _ in range(num_layers)]
        for layer in layers:
            torch.nn.Module.__init__(layer)
        return torch.nn.ModuleList(layers)

    assert len(layers_of([chunk(2), chunk(2)])) == 2
    with pytest.raises(UnsupportedFeatureError, match="this stage have 2 and 1 layers"):
        layers_of([chunk(2), chunk(1)])
    with pytest.raises(UnsupportedFeatureError, match="no attention of ours on this stage"):
        layers_of([chunk(2), chunk(0)])


def test_a_pool_of_another_step_is_refused() -> None:
    other = Pool(group=None, ticks=LaneTicks((None,) * 5, (None,) * 4), stats=ExchangeStats())
    check_number(other, 5, forward_only=True)
    with pytest.raises(DisagreementError, match="4 backward ticks, the pass has 5"):
        check_number(other, 5, forward_only=False)


def test_a_tick_with_other_tokens_than_the_micro_batch_is_refused_before_anything_is_sent() -> None:
    nothing = Programme(held=(), tiles=(), exchanges=(), buffer_tokens=(0, 0))
    params = SimpleNamespace(positions=range(8))
    with pytest.raises(DisagreementError, match="6 tokens of this rank, its micro-batch has 8"):
        move_to(PlacedLane(programme=nothing, samples=(), num_tokens=6), params)


def swap_ticks() -> None:
    """Let every rank take the second forward tick for the first one."""
    real = lane_ticks.decode_ticks

    def decode(text: str) -> ServerTicks:
        ticks = real(text)
        first, second, *others = ticks.forward
        return ticks._replace(forward=(second, first, *others))

    lane_ticks.decode_ticks = decode


def forget_chunks() -> None:
    """Let the last stage run its micro-batches as if it had one chunk."""
    real = ticks.STEPS.pack
    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        ticks.STEPS = ticks.STEPS._replace(
            pack=lambda plan, stage, vp_size, rank_tokens: real(plan, stage, 1, rank_tokens)
        )


def run_sabotaged(case: Case, sabotage: Callable[[], None]) -> Comparison | str:
    """Return what a rank found, or the error with which it ended; the fault is planted once groups are there."""

    def run(*args: Any) -> None:
        run_planned(PoolCase(case, None), *args)

    real = DynamicCPGroups.build

    def build(*args: Any, **options: Any) -> DynamicCPGroups:
        groups = real(*args, **options)
        sabotage()
        return groups

    DynamicCPGroups.build = build  # type: ignore[method-assign]
    try:
        return run_step(*case, run)
    except DisagreementError as error:
        return str(error)


def test_a_wrong_order_of_ticks_is_refused_before_anything_is_sent(reference_of: Any) -> None:
    case = sabotaged_case(Layout(1, pp=2), reference_of)
    for said in run_ranks(2, run_sabotaged, case, swap_ticks, timeout_s=60):
        assert re.search(r"tick F0 of lane 0 on stage \d holds \d+ tokens, its micro-batch (none|\d) has \d+", said)


def test_a_stage_that_runs_other_chunks_is_refused_before_anything_is_sent(reference_of: Any) -> None:
    case = sabotaged_case(Layout(1, pp=2, vpp=2), reference_of)
    for said in run_ranks(2, run_sabotaged, case, forget_chunks, timeout_s=60):
        assert re.search(r"tick F\d of lane 0 on stage 1 holds \d+ tokens, its micro-batch (none|\d) has \d+", said)


def sabotaged_case(layout: Layout, reference_of: Any) -> Case:
    samples = BATCHES["long_tail"]
    return Case(layout, samples, planned_step(samples, layout), reference_of(layout, "long_tail"))
