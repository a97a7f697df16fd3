"""Loss of every token and every gradient equal a stock single-process megatron-core model, on many layouts."""

from __future__ import annotations

import pytest

from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import CP_COMM_TYPES, UNPLACED, Plan, Sample
from tests.distributed.harness import run_ranks
from tests.distributed.parity import (
    BATCHES,
    Case,
    Layout,
    assert_all_equal_to_reference,
    assert_bytes_as_planned,
    assert_equal_to_reference,
    compare_with_reference,
    exchanges_of,
    mixed_plan,
    plans_of_blocks,
    run_step,
    static_plan,
)

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
LAYOUTS = {
    "one_rank": Layout(1),
    "dp2": Layout(2),
    "dp4_ring": Layout(4),
    "dp4_all_gather": Layout(4, exchange="all_gather"),
    "dp4_distributed_optimizer": Layout(4, distributed_optimizer=True),
    "dp4_overlap_grad_reduce": Layout(4, distributed_optimizer=True, overlap_grad_reduce=True),
    "dp4_tied": Layout(4, variant="llama_tied"),
    "dp4_learned_positions": Layout(4, variant="gpt2"),
    "dp4_no_positions": Layout(4, variant="no_positions"),
    "dp4_partial_interleaved_rope": Layout(4, variant="partial_rope"),
    "dp4_full_recompute": Layout(4, config=FULL_RECOMPUTE),
    "dp4_selective_recompute": Layout(4, config=SELECTIVE_RECOMPUTE),
    "dp8_ring": Layout(8),
    "dp8_all_gather_distributed_optimizer": Layout(8, exchange="all_gather", distributed_optimizer=True),
    "three_lanes": Layout(3),
    "six_lanes": Layout(6, exchange="all_gather"),
    "six_lanes_distributed_optimizer": Layout(6, distributed_optimizer=True),
    "tp2": Layout(2, tp=2),
    "tp2_distributed_optimizer": Layout(4, tp=2, distributed_optimizer=True),
    "tp2_sp_all_gather": Layout(4, tp=2, sp=True, exchange="all_gather"),
    "tp2_sp": Layout(2, tp=2, sp=True),
    "tp2_sp_distributed_optimizer": Layout(4, tp=2, sp=True, distributed_optimizer=True),
    "tp2_learned_positions_sp": Layout(2, tp=2, sp=True, variant="gpt2"),
    "pp2": Layout(2, pp=2),
    "pp2_tied_full_recompute": Layout(
        2,
        pp=2,
        variant="llama_tied",
        config=FULL_RECOMPUTE,
    ),
    "pp2_distributed_optimizer": Layout(4, pp=2, distributed_optimizer=True),
    "pp2_all_gather": Layout(4, pp=2, exchange="all_gather"),
    "pp2_vpp2": Layout(2, pp=2, vpp=2),
    "pp2_vpp2_distributed_optimizer": Layout(4, pp=2, vpp=2, distributed_optimizer=True),
    "pp4": Layout(2, pp=4),
    "pp4_distributed_optimizer": Layout(2, pp=4, distributed_optimizer=True),
    "dp2_tp2_pp2_distributed_optimizer": Layout(2, tp=2, pp=2, distributed_optimizer=True),
    "dp2_tp2_pp2": Layout(2, tp=2, pp=2),
    "dp2_tp2_sp_pp2_vpp2_distributed_optimizer": Layout(2, tp=2, sp=True, pp=2, vpp=2, distributed_optimizer=True),
}

# KV heads: two for four query heads, or two for eight.
HEAD_EXCHANGES = {
    "dp4_a2a": Layout(4, exchange="a2a"),
    "dp4_a2a_multi_head": Layout(4, exchange="a2a", variant="gpt2"),
    "dp4_two_levels": Layout(4, exchange="a2a+p2p"),
    "dp4_mixed_full_recompute": Layout(4, exchange="mixed", config=FULL_RECOMPUTE),
    "dp4_mixed_selective_recompute": Layout(4, exchange="mixed", config=SELECTIVE_RECOMPUTE),
    "dp8_a2a_distributed_optimizer": Layout(
        8, exchange="a2a", variant="llama_8_heads", distributed_optimizer=True, overlap_grad_reduce=True
    ),
    "dp8_two_levels": Layout(8, exchange="a2a+p2p", variant="llama_8_heads"),
    "dp8_two_levels_of_4": Layout(8, exchange="a2a+p2p", variant="llama_8_heads", inner_sizes=(4,)),
    "dp8_mixed": Layout(8, exchange="mixed", variant="llama_8_heads"),
    "six_lanes_a2a": Layout(6, exchange="a2a"),
    "six_lanes_two_levels": Layout(6, exchange="a2a+p2p"),
    "tp2_a2a": Layout(4, tp=2, exchange="a2a", variant="llama_8_heads"),
    "tp2_sp_two_levels": Layout(4, tp=2, sp=True, exchange="a2a+p2p", variant="llama_8_heads"),
    "pp2_a2a": Layout(4, pp=2, exchange="a2a"),
    "pp2_two_levels": Layout(4, pp=2, exchange="a2a+p2p"),
    "pp2_vpp2_mixed": Layout(4, pp=2, vpp=2, exchange="mixed"),
    "dp4_tp2_sp_pp2_mixed": Layout(4, tp=2, sp=True, pp=2, exchange="mixed", variant="llama_8_heads"),
}
# Two micro-batches placed at random, the others of buckets as elsewhere.
PLACED_LAYOUTS = {
    "dp4_placed": Layout(4, exchange="mixed", ranks_per_node=2),
    "dp4_placed_full_recompute": Layout(
        4, config=FULL_RECOMPUTE, distributed_optimizer=True, overlap_grad_reduce=True, ranks_per_node=1
    ),
    "three_lanes_placed": Layout(3, variant="gpt2", config=SELECTIVE_RECOMPUTE),
    "tp2_sp_placed": Layout(2, tp=2, sp=True, distributed_optimizer=True),
    "pp2_placed": Layout(2, pp=2),
    "pp2_vpp2_placed": Layout(2, pp=2, vpp=2),
}
# The planner's own plans of placed micro-batches, and the limit of tokens per rank.
PLANNED_BLOCKS = {"dp4_blocks": (Layout(4, ranks_per_node=2), 300), "tp2_blocks": (Layout(2, tp=2, sp=True), 600)}


# Six and eight ranks on two cores take longest: with the newest release, and each night.
MANY_RANKS = {name for name, layout in LAYOUTS.items() if layout.topology.world_size > 4}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(LAYOUTS.keys() - MANY_RANKS, id="few"),
        pytest.param(MANY_RANKS, id="many", marks=pytest.mark.nightly),
    ],
)
def test_layouts_equal_single_process(names: set[str], reference_of) -> None:
    samples = BATCHES["long_tail"]
    plans = {name: mixed_plan(samples, layout) for name, layout in LAYOUTS.items() if name in names}
    for name, plan in plans.items():
        assert LAYOUTS[name].lanes < 4 or {1, 2, 4} <= set(plan.cp_histogram), f"{name} does not mix CP sizes"
    cases = {
        name: Case(LAYOUTS[name], samples, plan, reference_of(LAYOUTS[name], "long_tail"))
        for name, plan in plans.items()
    }
    assert_all_equal_to_reference(cases)


@pytest.mark.parametrize("batch", ["few", pytest.param("tiny", marks=pytest.mark.nightly)])
def test_batch_shapes_equal_single_process(batch: str, reference_of) -> None:
    cases = {}
    for name in ("dp4_ring", "dp4_all_gather", "tp2_sp", "pp2"):
        layout, samples = LAYOUTS[name], BATCHES[batch]
        plan = mixed_plan(samples, layout, seed=1)
        cases[name] = Case(layout, samples, plan, reference_of(layout, batch))
    assert_all_equal_to_reference(cases)


def plan_of_exchanges(samples: tuple[Sample, ...], layout: Layout) -> Plan:
    """Return the first random plan that has the layout's exchange, or all of them where it mixes them."""
    all_of_them = set(UNPLACED if layout.model.has_latents else CP_COMM_TYPES)
    wanted = all_of_them if layout.exchange == "mixed" else {layout.exchange}
    plans = (mixed_plan(samples, layout, seed, num_rows=6) for seed in range(50))
    plan = next(plan for plan in plans if wanted <= {exchange for exchange, _ in exchanges_of(plan)})
    check_plan(plan, samples)
    return plan


NIGHTLY = {name for name, layout in HEAD_EXCHANGES.items() if layout.topology.world_size > 4} - {"pp2_vpp2_mixed"}


@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_head_exchanges_equal_single_process(nightly: bool, reference_of) -> None:
    samples = BATCHES["long_tail"]
    cases = {
        name: Case(layout, samples, plan_of_exchanges(samples, layout), reference_of(layout, "long_tail"))
        for name, layout in HEAD_EXCHANGES.items()
        if (name in NIGHTLY) == nightly
    }
    assert_all_equal_to_reference(cases, bytes_too=True)


def test_placed_attention_equals_single_process(reference_of) -> None:
    samples = BATCHES["long_tail"]
    cases = {}
    for name, (layout, plan) in plans_of_blocks(samples, PLACED_LAYOUTS, PLANNED_BLOCKS).items():
        check_plan(plan, samples)
        placements = [bucket.placement for bucket in plan.buckets if bucket.placement is not None]
        assert len(placements) >= (2 if name in PLACED_LAYOUTS else 1)
        assert max(len(placement.tiles) for placement in placements) > 10
        shares_heads = {bucket.inner_cp_size for bucket in plan.buckets if bucket.placement is not None} != {1}
        assert shares_heads or name != "dp4_placed"
        cases[name] = Case(layout, samples, plan, reference_of(layout, "long_tail"))
    assert_all_equal_to_reference(cases, bytes_too=True)


@pytest.mark.by_day("long_tail")
@pytest.mark.parametrize("batch", [pytest.param("long_tail", marks=pytest.mark.in_check), "tiny"])
def test_mixed_exchanges_on_four_lanes_equal_single_process(batch: str, reference_of) -> None:
    """The step with every exchange that `make check` runs."""
    layout, samples = Layout(4, exchange="mixed"), BATCHES[batch]
    expected = reference_of(layout, batch)
    plan = plan_of_exchanges(samples, layout)
    comparisons = run_ranks(4, run_step, layout, samples, plan, expected, None)
    assert_equal_to_reference(comparisons, layout, expected)
    assert_bytes_as_planned(comparisons, layout, plan)


@pytest.mark.in_check
def test_four_lanes_equal_single_process(reference_of) -> None:
    """The one layout that `make check` runs."""
    layout, samples = LAYOUTS["dp4_ring"], BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    plan = static_plan(samples, layout, cp_size=4)
    comparisons = run_ranks(4, run_step, layout, samples, plan, expected, None)
    assert_equal_to_reference(comparisons, layout, expected)


def test_which_layers_are_recomputed_changes_no_bit(reference_of) -> None:
    """On two stages of two model chunks of two layers; errors are equal to the last digit."""
    few = {
        "block": FULL_RECOMPUTE | {"recompute_method": "block"},
        "units": FULL_RECOMPUTE | {"recompute_num_layers": 2},
    }
    ways = {"none": {}, "full": FULL_RECOMPUTE, **few}
    samples, cases = BATCHES["long_tail"], {}
    for name, config in ways.items():
        layout = Layout(2, pp=2, vpp=2, config={"num_layers": 8, **config})
        cases[name] = Case(layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail"))
    found = compare_with_reference(cases)
    without = [(rank.loss_error, rank.gradient_errors) for rank in found["none"]]
    for name, ranks in found.items():
        assert_equal_to_reference(ranks, cases[name].layout, cases[name].expected)
        assert_bytes_as_planned(ranks, cases[name].layout, cases[name].plan)
        assert [(rank.loss_error, rank.gradient_errors) for rank in ranks] == without, name
