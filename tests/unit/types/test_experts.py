"""The values of models with experts: what they hold, what a token meets, how ranks share them, what a plan may do."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynamic_cp.errors import IllegalPlanError, InvalidInputError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.plans.serialize import digest, dumps, format_plan, loads, parse_plan
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.experts import expert_prices
from dynamic_cp.types import Bucket, Experts, Plan, Sample, Topology, parse_placement
from megatron.dynamic_cp.flags.experts import experts_of
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL, plan_of_buckets, problem_of

EXPERTS = Experts(num_experts=8, topk=2, ffn_hidden_size=128, shared_ffn_hidden_size=64, shared_gate=True)
MODEL = replace(TINY_MODEL, experts=EXPERTS)
LARGE = replace(CURVED_HARDWARE, hbm_bytes=1e12)


@pytest.mark.parametrize(
    ("freq", "found"), [(1, (1, 1, 1, 1)), (2, (1, 0, 1, 0)), (3, (1, 0, 0, 1)), ([0, 1, 1, 0], (0, 1, 1, 0))]
)
def test_which_layers_have_experts(freq, found):
    model = replace(MODEL, num_layers=4, experts=replace(EXPERTS, layer_freq=freq))
    assert tuple(map(int, model.moe_layers)) == found
    (stage,) = model.stages(1)
    assert {layer.num_experts: number for number, layer in stage.layers} == {
        kind: number for kind, number in ((0, 4 - sum(found)), (8, sum(found))) if number
    }
    dense, all_moe = replace(TINY_MODEL, num_layers=4), replace(MODEL, num_layers=4)
    share = sum(found) / 4
    assert model.num_parameters == dense.num_parameters * (1 - share) + all_moe.num_parameters * share


def test_windows_and_experts_are_of_layers_apart():
    """Windows in all but every 2nd layer, experts in the first of every 3: all four kinds are there."""
    model = replace(
        MODEL, num_layers=6, window_tokens=32, window_attn_skip_freq=2, experts=replace(EXPERTS, layer_freq=3)
    )
    (stage,) = model.stages(1)
    kinds = {(layer.mask == model.window, layer.num_experts > 0): number for number, layer in stage.layers}
    assert kinds == {(False, False): 2, (False, True): 1, (True, False): 2, (True, True): 1}
    assert len(model.layer_masks) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 9}, r"sent to 9 experts, a layer has 8: give topk \(--moe-router-topk\)"),
        ({"num_experts": 0}, "num_experts is 0, the smallest allowed value is 1"),
        ({"layer_freq": (0, 0)}, r"layer_freq \(--moe-layer-freq\) \[0, 0\] must be 1 \(experts\) or 0"),
        ({"layer_freq": (1, 0, 1)}, "is of 3 layers, the model has 2"),
        ({"imbalance": 0.9}, "the imbalance of experts is 0.9, it must be a number >= 1"),
        ({"shared_ffn_hidden_size": 0}, "shared_gate is true and shared_ffn_hidden_size 0"),
    ],
)
def test_experts_that_are_none(change, message):
    with pytest.raises(InvalidInputError, match=message):
        replace(MODEL, num_layers=2, experts=replace(EXPERTS, **change))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep_size": 3, "num_lanes": 6}, "ep_size 3 is not a power of two"),
        ({"ep_size": 4, "num_lanes": 6}, "ep_size 4 makes blocks of 4 lanes .* do not divide the 6 lanes"),
        ({"ep_size": 8, "tp_size": 3, "num_lanes": 8}, "ep_size 8 and tp_size 3: one must be a multiple"),
    ],
)
def test_blocks_that_do_not_tile_the_lanes(sizes, message):
    with pytest.raises(InvalidInputError, match=message):
        Topology(**sizes)


def test_lanes_of_a_block():
    """Expert TP is 1, so the TP ranks of a lane are ranks of a block."""
    for tp_size, ep_size, lanes in ((1, 4, 4), (2, 4, 2), (4, 4, 1), (4, 2, 1), (2, 1, 1)):
        assert Topology(num_lanes=8, tp_size=tp_size, ep_size=ep_size).expert_lanes == lanes


def test_a_model_that_ep_does_not_fit():
    for model, ep_size, message in ((MODEL, 16, "EP 16 does not divide 8 experts"), (TINY_MODEL, 2, "EP 2 without ex")):
        with pytest.raises(InvalidInputError, match=message):
            CostModel(problem_of(Topology(num_lanes=16, ep_size=ep_size), model))


@pytest.mark.parametrize("ep_size", [1, 4])
def test_one_expert_after_the_other_is_launched_and_multiplied_alone(ep_size):
    """By hand: products at the rate of any, and a quarter of a layer's constants for each expert of a rank."""
    hardware = replace(CURVED_HARDWARE, expert_flops_per_s=2e10, expert_extra_tokens=3)
    priced = {
        grouped: expert_prices(model.stages(1)[0], problem_of(Topology(num_lanes=8, ep_size=ep_size), model, hardware))
        for grouped in (True, False)
        for model in [replace(MODEL, experts=replace(EXPERTS, grouped=grouped))]
    }
    slower = 1 / hardware.linear_flops_per_s - 1 / hardware.expert_flops_per_s
    read = 2 * TINY_MODEL.num_layers * MODEL.layer.held_expert_weights / ep_size * 3 * slower
    launched = TINY_MODEL.num_layers * 8 / ep_size / 4
    for backward, overhead_s in enumerate(
        (hardware.forward_overhead_s_per_layer, hardware.backward_overhead_s_per_layer)
    ):
        looped, grouped = priced[False][backward], priced[True][backward]
        assert looped.constant - grouped.constant == pytest.approx((1, 2)[backward] * read + launched * overhead_s)
        assert looped.per_routed == grouped.per_routed
        assert looped.per_mean < grouped.per_mean  # grouped products are of a lower rate here


def plan_of(topology: Topology) -> Plan:
    buckets = (Bucket(first_lane=0, cp_size=2, samples=(Sample(sample_id=0, seqlen=9),)), *map(_empty, (2, 3)))
    return plan_of_buckets(buckets, topology=topology)


def _empty(lane: int) -> Bucket:
    return Bucket(first_lane=lane)


def test_plans_without_ep_are_written_as_before():
    before, plan = plan_of(Topology(num_lanes=4)), plan_of(Topology(num_lanes=4, ep_size=2))
    assert "ep_size" not in dumps(before) + format_plan(before)
    assert loads(dumps(before)) == before
    assert loads(dumps(plan)) == plan == parse_plan(format_plan(plan))
    assert digest(plan) != digest(before)


def test_a_bucket_does_not_cut_blocks():
    """Buckets of CP are aligned, so only placed ones could; a plan says so before any rank runs it."""
    check_plan(plan_of(Topology(num_lanes=4, ep_size=2)))
    check_plan(plan_of(Topology(num_lanes=4, ep_size=4)))
    placement = parse_placement("0.0.4.0,0.4.9.1/0.0.0.0,1.0.3.1,1.1.3.0")
    samples = (Sample(sample_id=0, seqlen=9),)
    cut = Bucket(first_lane=1, cp_size=2, samples=samples, cp_comm_type="blocks", placement=placement)
    plan = plan_of_buckets((_empty(0), cut, _empty(3)), topology=Topology(num_lanes=4, ep_size=2))
    with pytest.raises(IllegalPlanError, match="lanes 1-2: 2 lanes cut blocks of 2 lanes that share experts"):
        check_plan(plan)


def test_memory_by_hand():
    """EP divides what a rank holds of experts; the optimizer's share of them is over the ranks that have the same."""
    whole, shared = (
        MemoryModel(problem_of(Topology(num_lanes=8, ep_size=ep_size), MODEL, LARGE)) for ep_size in (1, 4)
    )
    all_experts = TINY_MODEL.num_layers * MODEL.layer.held_expert_weights
    assert (whole.num_expert_weights(0), shared.num_expert_weights(0)) == (all_experts, all_experts / 4)
    (one,), (other,) = whole.peak_at(0), shared.peak_at(0)
    assert one.weights_bytes - other.weights_bytes == 2 * 3 / 4 * all_experts
    assert one.optimizer_bytes == pytest.approx(other.optimizer_bytes)  # 8 copies of all, or 2 of a quarter

    # Routed copies: twice per token, each its own 64 channels and what its MLP keeps, a quarter more with EP.
    (one,), (other,) = whole.peak_at(100), shared.peak_at(100)
    copies = 2 * 100 * TINY_MODEL.num_layers * MODEL.layer.routed_kept_channels / 2 * 2
    assert other.activations_bytes - one.activations_bytes == pytest.approx(0.25 * copies)
    of_shared = 2 * 100 * TINY_MODEL.num_layers * MODEL.layer.mlp_kept_channels
    put_out = copies * (1 - MODEL.layer.routed_channels / MODEL.layer.routed_kept_channels) / 2
    for name, dropped in ("moe", copies + of_shared), ("moe_act", put_out):
        again = problem_of(Topology(num_lanes=8), MODEL, LARGE, recompute="selective", recompute_modules=(name,))
        (less,) = MemoryModel(again).peak_at(100)
        assert one.activations_bytes - less.activations_bytes == pytest.approx(dropped)


def test_memory_counts_the_mean_of_a_block():
    """A lane alone with tokens computes half of its copies where two share the experts."""
    topology = Topology(num_lanes=2, ep_size=2)
    alone = Bucket(first_lane=0, samples=(Sample(sample_id=0, seqlen=100),))
    plan = plan_of_buckets((alone, _empty(1)), topology=topology, max_tokens_per_rank=256)
    even = replace(EXPERTS, imbalance=1.0)
    models = [replace(MODEL, experts=one) for one in (even, replace(even, topk=1))]
    (peak,), (dense,) = (MemoryModel(problem_of(topology, model, LARGE)).peak(plan) for model in models)
    per_copy = 2 * TINY_MODEL.num_layers * MODEL.layer.routed_kept_channels / 2
    assert peak.activations_bytes - dense.activations_bytes == pytest.approx(per_copy * (100 + 1) / 2)


def test_flags_give_the_experts():
    flags = SimpleNamespace(ffn_hidden_size=512)
    assert experts_of(flags) is None
    flags = SimpleNamespace(
        ffn_hidden_size=512, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=None, moe_layer_freq=[0, 1],
        moe_shared_expert_intermediate_size=64, moe_shared_expert_gate=True, moe_grouped_gemm=True,
    )  # fmt: skip
    assert experts_of(flags) == replace(EXPERTS, ffn_hidden_size=512, layer_freq=(0, 1))
