"""Properties of the prices that the frozen cases do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import convex_of
from dynamic_cp.types import (
    EVERY_LAYER,
    Bucket,
    DataParallel,
    Experts,
    Hardware,
    LinearAttention,
    ModelShape,
    PlanOptions,
    Problem,
    RecomputedLayers,
    Topology,
)
from tests.unit.support import CURVED_HARDWARE, TINY_HARDWARE, TINY_MODEL, problem_of, samples_of, tiny_cost_model


def test_all_gather_hides_nothing():
    topology = Topology(num_lanes=2)
    ring = tiny_cost_model(topology).cost(2, 0, 4096, 4096**2)
    gather = tiny_cost_model(topology, cp_comm_types=("all_gather",)).cost(2, 0, 4096, 4096**2)
    kv_bytes = TINY_MODEL.num_layers * 2 * TINY_MODEL.kv_size * 4
    step_s = 2048 * kv_bytes / TINY_HARDWARE.bandwidth_in_node_bytes_per_s + TINY_MODEL.num_layers * 1e-5
    assert gather.forward_s - ring.forward_s == pytest.approx(step_s)
    assert gather.backward_s - ring.backward_s == pytest.approx(2 * step_s)
    assert ring == tiny_cost_model(topology, cp_comm_types=("all_gather",)).cost(
        2, 0, 4096, 4096**2, cp_comm_type="p2p"
    )


def test_an_inner_size_that_cannot_be_is_refused():
    """4 query heads, 8 lanes a node: inner sizes 2 and 4."""
    model = tiny_cost_model(Topology(num_lanes=8), cp_comm_types=("p2p", "a2a+p2p"))
    assert [one.inner_cp_size for one in model.attentions] == [1, 1, 1, 2, 1, 4, 2]
    with pytest.raises(UnsupportedFeatureError, match=r"a2a\+p2p with inner_cp_size 8 cannot serve a group of 8 lanes"):
        model.cost(8, 0, 64, 64, "a2a+p2p", 8)
    with pytest.raises(UnsupportedFeatureError, match=r"a2a\+p2p cannot serve a group of 2 lanes.*4 query heads"):
        model.cost(2, 0, 64, 64, "a2a+p2p")
    with pytest.raises(UnsupportedFeatureError, match=r"blocks of at most 1 lanes lie in one node"):
        tiny_cost_model(Topology(num_lanes=8, ranks_per_node=1)).cost(8, 0, 64, 64, "a2a+p2p", 2)
    # Six lanes share a node, but only pairs are blocks that lie in one and divide it.
    with pytest.raises(UnsupportedFeatureError, match=r"blocks of at most 2 lanes lie in one node"):
        tiny_cost_model(Topology(num_lanes=12, ranks_per_node=6)).cost(8, 0, 64, 64, "a2a+p2p", 4)


def test_tensor_parallelism_divides_compute_and_whole_kv_heads():
    one, four = (tiny_cost_model(Topology(num_lanes=2, tp_size=tp)) for tp in (1, 4))
    overhead_s = TINY_MODEL.num_layers * 1e-5 + 1e-5
    compute_s = one.cost(1, 0, 512, 512**2).forward_s - overhead_s
    assert four.cost(1, 0, 512, 512**2).forward_s - overhead_s == pytest.approx(compute_s / 4)
    # 2 KV heads on 4 TP ranks: each rank still exchanges one whole head, half of what tp 1 does.
    exchange_s = [
        tiny_cost_model(Topology(num_lanes=2, tp_size=tp), cp_comm_types=("all_gather",)).cost(2, 0, 10**6, 0).forward_s
        - tiny_cost_model(Topology(num_lanes=2, tp_size=tp)).cost(1, 0, 5 * 10**5, 0).forward_s
        for tp in (1, 4)
    ]
    assert len(exchange_s) == 2
    kv_s = [5 * 10**5 * TINY_MODEL.num_layers * 2 * channels * 4 / 1e8 for channels in (64, 32)]
    short_s = 8 * (10**6 - 5 * 10**5) * TINY_MODEL.num_layers * 2 * TINY_MODEL.query_size / 1e10
    expected = [kv + short_s / tp + TINY_MODEL.num_layers * 1e-5 for kv, tp in zip(kv_s, (1, 4), strict=True)]
    assert exchange_s == pytest.approx(expected)


# A model and a hardware whose prices can be computed in one's head: 1 layer, 8 heads of width 1.
# 16 FLOPs per squared token; causal kernel 1 s per squared token, L_half 2; full tiles half of that, L_half 0.
UNIT_MODEL = ModelShape(
    num_layers=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=8, num_query_groups=8, kv_channels=1,
    vocab_size=10,
)  # fmt: skip
UNIT_HARDWARE = Hardware(
    name="unit",
    peak_flops_per_s=68,
    linear_flops_per_s=68,  # 34 weights: 1 s per token
    attention_flops_per_s=16, attention_extra_tokens=2, attention_full_flops_per_s=32, attention_full_extra_tokens=0,
    attention_backward_flops_per_s=40,  # 2.5 times the FLOPs: 1 s per squared token
    attention_backward_extra_tokens=4,
    attention_full_backward_flops_per_s=80,
    attention_full_backward_extra_tokens=2,
    bandwidth_in_node_bytes_per_s=4,  # 32 bytes of keys and values per token: 8 s
    bandwidth_across_nodes_bytes_per_s=2, p2p_bandwidth_bytes_per_s=1, exchange_latency_s_per_layer=0.5,
    forward_overhead_s_per_layer=0, backward_overhead_s_per_layer=0, overhead_s_per_bucket_stage=0,
)  # fmt: skip
FOUR_LANES = Topology(num_lanes=4)


def unit_prices(model=UNIT_MODEL, hardware=UNIT_HARDWARE, topology=FOUR_LANES, **given):
    return CostModel(problem_of(topology, model, hardware, **given))


def unit_cost(tokens=16, **given):
    return unit_prices(**given).cost(4, 0, tokens, tokens**2)


def test_the_ring_step_by_step():
    """One sample of 16 tokens on 4 ranks, L = 4: step 0 takes 16 + 2*4 = 24 s, the others 16/2 = 8 s, a transfer
    4*8 + 0.5 = 32.5 s, so 8.5 + 2 * 24.5 = 57.5 s of transfers show. Backward: 16 + 4*4 = 32, (16 + 2*4) / 2 = 12, 65 s
    and 33 + 2 * 53 = 139 s."""
    cost = unit_cost()
    assert cost.forward_s == pytest.approx(4 + (24 + 3 * 8) + 57.5)
    assert cost.backward_s == pytest.approx(2 * 4 + (32 + 3 * 12) + 139)


def test_recomputation_repeats_the_exposed_exchange():
    without = unit_cost()
    assert unit_cost(recompute="full").backward_s == pytest.approx(without.backward_s + without.forward_s)
    assert unit_cost(recompute="selective").backward_s == pytest.approx(without.backward_s + without.forward_s - 4)
    overhead = replace(UNIT_HARDWARE, forward_overhead_s_per_layer=3, overhead_s_per_bucket_stage=1)
    # Three of the four seconds are not repeated.
    overhead = replace(overhead, recompute_overhead_credit=0.75)
    assert unit_cost(hardware=overhead, recompute="full").backward_s == pytest.approx(
        1 + without.backward_s + without.forward_s + 1
    )


DELTA = LinearAttention(kind="gated_delta_net", num_heads=8, num_groups=8, key_size=2, value_size=2)
REPEATED = {
    "attention": (UNIT_MODEL, {}),
    "overhead of which some is not repeated": (
        UNIT_MODEL,
        {"forward_overhead_s_per_layer": 3, "overhead_s_per_bucket_stage": 1, "recompute_overhead_credit": 0.75},
    ),
    "the host": (UNIT_MODEL, {"host_forward_s_per_layer": 5e4, "host_backward_s_per_layer": 6e4}),
    "experts": (replace(UNIT_MODEL, experts=Experts(num_experts=8, topk=2, ffn_hidden_size=9)), {}),
    "states": (
        replace(UNIT_MODEL, num_layers=4, linear_attention=DELTA, linear_attention_freq=4),
        {"linear_attention_flops_per_s": 100, "memory_bandwidth_bytes_per_s": 100},
    ),
}


@pytest.mark.parametrize("what", REPEATED)
def test_layers_that_are_recomputed_share_the_price_of_all(what):
    """Three of four layers, on two stages of two chunks three of five and of all three: 6 of 8 on the heavier one."""
    model, measured = REPEATED[what]
    hardware = replace(UNIT_HARDWARE, **measured)
    way = "states" if what == "states" else "heads"
    bucket = Bucket(first_lane=0, cp_size=4, samples=samples_of([16, 40]), state_exchange=way)

    def backward_s(recompute, layers=EVERY_LAYER, **given):
        options = PlanOptions(max_tokens_per_rank=256, recompute=recompute, recompute_layers=layers)
        return CostModel(Problem(hardware=hardware, options=options, **given)).bucket_cost(bucket).backward_s

    uneven = replace(model, num_layers=11, pipeline_layers=((3, 5), (1, 2)))
    staged = Topology(num_lanes=4, pp_size=2, vp_size=2)
    for given in (
        {"model": replace(model, num_layers=4), "topology": FOUR_LANES},
        {"model": uneven, "topology": staged},
    ):
        none, full = backward_s("none", **given), backward_s("full", **given)
        assert full > 1.01 * none
        block = backward_s("full", RecomputedLayers("block", 3), **given)
        assert block == pytest.approx(none + 0.75 * (full - none))
    even = {"model": replace(model, num_layers=4), "topology": FOUR_LANES}
    assert backward_s("full", RecomputedLayers("uniform", 2), **even) == backward_s("full", **even)


def test_recomputed_modules_by_hand():
    """2 of the 34 weights are the MLP's: of the 4 s of matrices forward, 4 * 2 / 34 are repeated with it."""
    without, mlp_s = unit_cost().backward_s, 4 * 2 / 34
    of = {
        names: unit_cost(recompute="selective", recompute_modules=names).backward_s - without
        for names in [("mlp",), ("layernorm",), ("mlp", "core_attn"), ()]
    }
    assert of["mlp",] == pytest.approx(mlp_s)
    assert of["layernorm",] == of[()] == 0
    assert of["mlp", "core_attn"] == pytest.approx(mlp_s + unit_cost().forward_s - 4)


def test_norms_and_activation_functions_are_computed_again_by_memory_bandwidth():
    """A norm reads and writes the hidden state; gated experts read 2 * 9 channels of each copy and write 9."""
    model = replace(UNIT_MODEL, gated_linear_unit=True, experts=Experts(num_experts=8, topk=2, ffn_hidden_size=9))
    given = {"model": model, "hardware": replace(UNIT_HARDWARE, memory_bandwidth_bytes_per_s=100)}
    tokens, element = 16 // 4, PlanOptions(max_tokens_per_rank=1).element_bytes.activation
    without = unit_cost(**given).backward_s
    for name, channels in ("layernorm", 2 * 2 * model.hidden_size), ("moe_act", 2 * 3 * 9):
        again = unit_cost(recompute="selective", recompute_modules=(name,), **given).backward_s
        assert again - without == pytest.approx(model.num_layers * tokens * channels * element / 100)


def test_a_ring_step_may_have_an_overhead_of_its_own():
    plain, slow = unit_cost(), unit_cost(hardware=replace(UNIT_HARDWARE, ring_step_overhead_s_per_layer=10))
    assert slow.forward_s - plain.forward_s == pytest.approx(3 * 10)
    assert slow.backward_s - plain.backward_s == pytest.approx(3 * 2 * 10)


def test_a_bucket_lasts_as_long_as_the_slower_of_gpu_and_host():
    """Of 109.5 and 215 s on the GPU: a layer, three ring steps, and the forward pass again where it is recomputed."""
    plain = unit_cost()
    host = {"host_forward_s_per_layer": 50, "host_backward_s_per_layer": 60, "host_ring_step_s_per_layer": 20}
    hardware = replace(UNIT_HARDWARE, **host, host_message_s_per_layer=70)
    cost = unit_cost(hardware=hardware)
    assert cost == plain._replace(forward_s=max(plain.forward_s, 50 + 3 * 20))
    assert cost.forward_s > plain.forward_s
    again, of_gpu = (unit_cost(hardware=one, recompute="full") for one in (hardware, UNIT_HARDWARE))
    assert again.backward_s == max(of_gpu.backward_s, 60 + 50 + 2 * 3 * 20)
    slow = replace(hardware, host_message_s_per_layer=7000)
    assert unit_cost(hardware=slow, cp_comm_types=("a2a",)).backward_s == 60 + 7000
    assert unit_cost(hardware=slow, cp_comm_types=("all_gather",)).forward_s == 50 + 20 + 7000


def test_all_gather_by_hand():
    cost = unit_cost(cp_comm_types=("all_gather",))
    assert cost.forward_s == pytest.approx(4 + 48 + 3 * 32.5)
    assert cost.backward_s == pytest.approx(8 + 68 + 3 * 65)


def test_attention_without_a_mask_has_twice_the_flops_and_only_full_tiles():
    """Every step takes 2 * 8 = 16 s and hides as much of 32.5 s."""
    cost = unit_cost(model=replace(UNIT_MODEL, causal_attention=False))
    assert cost.forward_s == pytest.approx(4 + 4 * 16 + 3 * 16.5)
    alone = unit_prices(model=replace(UNIT_MODEL, causal_attention=False))
    assert alone.cost(1, 0, 16, 256).forward_s == pytest.approx(16 + 2 * 256 / 2)


def test_equal_curves_are_the_frozen_form():
    """(cp - 1) * max(0, transfer - attention / cp): one kink, not two."""
    hardware = replace(UNIT_HARDWARE, attention_full_flops_per_s=0)
    model = unit_prices(hardware=hardware)
    row = model.table.terms[model.table.first_option[2, 0], 0]
    assert [weight for weight, _ in convex_of(row).kinks] == [3]
    cost = model.cost(4, 0, 16, 256)
    attention_s = 256 / 4 + 2 * 16
    assert cost.forward_s == pytest.approx(4 + attention_s + 3 * (32.5 - attention_s / 4))


def test_the_fastest_exchange_is_taken_for_every_bucket():
    both = ("p2p", "a2a")
    short, long = unit_cost(cp_comm_types=both), unit_cost(cp_comm_types=both, tokens=64)
    assert short == unit_cost(cp_comm_types=("a2a",)) != unit_cost()
    assert long == unit_cost(tokens=64) != unit_cost(cp_comm_types=("a2a",), tokens=64)
    model = unit_prices(cp_comm_types=both)
    assert model.best_exchange(4, 0, 16, 256) == ("a2a", 4)
    assert model.best_exchange(4, 0, 64, 4096) == ("p2p", 1)
    assert model.best_exchange(1, 0, 64, 4096) == ("p2p", 1)
    # A bucket says itself which one it uses.
    bucket = Bucket(first_lane=0, cp_size=4, samples=samples_of([16]), cp_comm_type="p2p")
    assert model.bucket_cost(bucket) == unit_cost()


def test_a2a_by_hand_with_fewer_kv_heads():
    """2 KV heads on 4 lanes, each repeated once: 4 of them. Queries and outputs 32 bytes a token, keys and values with
    the copies 16; 3/4 of 4 * 48 bytes move: 144 bytes, 36 s. The ring sends no copies: 8 bytes, 2 s a token."""
    grouped = replace(UNIT_MODEL, num_query_groups=2)
    cost = unit_cost(model=grouped, cp_comm_types=("a2a",))
    # 30 weights, not 34: the linear layers take 16 / 4 * 30 / 34 s.
    weights = grouped.linear_weights_per_layer / UNIT_MODEL.linear_weights_per_layer
    assert cost.forward_s == pytest.approx(4 * weights + 72 + 36 + 2)
    assert unit_cost(model=grouped, cp_comm_types=("all_gather",)).forward_s == pytest.approx(
        4 * weights + 48 + 3 * (4 * 2 + 0.5)
    )


def test_a2a_over_nodes_pays_the_nic_for_what_leaves_the_node():
    """Of the three quarters that move, one stays on the node: 64 bytes at 4 bytes/s and 128 bytes at 2."""
    topology = Topology(num_lanes=4, ranks_per_node=2)
    assert unit_cost(topology=topology, cp_comm_types=("a2a",)).forward_s == pytest.approx(4 + 72 + 16 + 64 + 2)
    alone = Topology(num_lanes=4, ranks_per_node=1)
    assert unit_cost(topology=alone, cp_comm_types=("a2a",)).forward_s == pytest.approx(4 + 72 + 96 + 2)


def test_the_hierarchical_exchange_by_hand():
    """Two nodes of two lanes. Inside: half of 4 * 64 bytes, 32 s at 4 bytes/s, and four latencies. Half of the heads on
    8 tokens: step 0 takes (64 + 2 * 8) / 2 = 40 s, step 1 64 / 4 = 16 s. One step of 4 * 32 bytes over the NIC, 64.5 s:
    24.5 s show. Backward: (64 + 4 * 8) / 2 = 48, (64 + 2 * 8) / 4 = 20, 129 s, of which 81 show."""
    topology = Topology(num_lanes=4, ranks_per_node=2)
    cost = unit_cost(topology=topology, cp_comm_types=("a2a+p2p",))
    assert cost.forward_s == pytest.approx(4 + 40 + 16 + 34 + 24.5)
    assert cost.backward_s == pytest.approx(8 + 48 + 20 + 34 + 81)
    # Inside one node the step takes 32.5 s and is hidden.
    assert unit_cost(cp_comm_types=("a2a+p2p",)).forward_s == pytest.approx(4 + 40 + 16 + 34)


def test_the_ring_step_of_a_hierarchy_has_the_overhead_of_a_ring_step():
    slow = replace(UNIT_HARDWARE, ring_step_overhead_s_per_layer=10)
    both = [
        unit_prices(hardware=one, topology=Topology(num_lanes=8), cp_comm_types=("a2a+p2p",))
        for one in (slow, UNIT_HARDWARE)
    ]
    for inner, steps in ((2, 3), (4, 1)):
        one, other = (each.cost(8, 0, 16, 256, "a2a+p2p", inner) for each in both)
        assert one.forward_s - other.forward_s == pytest.approx(10 * steps)
        assert one.backward_s - other.backward_s == pytest.approx(20 * steps)


def test_a2a_needs_whole_heads():
    """4 query heads serve 4 lanes, 2 on each of two TP ranks; the 2 KV heads are repeated where that is not enough."""
    lanes = Topology(num_lanes=8)
    assert tiny_cost_model(lanes, cp_comm_types=("a2a",)).table.capacities.tolist() == [256, 512, 1024, 0]
    assert tiny_cost_model(lanes, cp_comm_types=("a2a", "p2p")).table.capacities.tolist() == [256, 512, 1024, 2048]
    split = tiny_cost_model(Topology(num_lanes=4, tp_size=2), cp_comm_types=("a2a",))
    assert split.table.capacities.tolist() == [256, 512, 0]
    with pytest.raises(UnsupportedFeatureError, match=r"group of 8 lanes.*are 4 query heads, 2 KV.*; allow p2p"):
        tiny_cost_model(lanes, cp_comm_types=("a2a",), min_cp_size=8)
    with pytest.raises(UnsupportedFeatureError, match="group of 8 lanes"):
        tiny_cost_model(lanes).cost(8, 0, 64, 64, "a2a")
    with pytest.raises(UnsupportedFeatureError, match="group of 8 lanes"):
        tiny_cost_model(lanes, cp_comm_types=("a2a",)).cost(8, 0, 64, 64)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_embedding_and_head_by_hand(pp_size):
    """Width 1, 10 words, 2 bytes: the embedding moves 4 bytes forward and 2 + 8 backward, the head has 20 FLOPs and 220
    bytes of loss forward, 40 and 140 backward."""
    hardware = replace(UNIT_HARDWARE, head_flops_per_s=5, memory_bandwidth_bytes_per_s=2)
    topology = Topology(num_lanes=4, pp_size=pp_size)
    cost = unit_cost(hardware=hardware, topology=topology)
    assert cost.embedding_forward_s == pytest.approx(4 * 4 / 2)
    assert cost.embedding_backward_s == pytest.approx(4 * 10 / 2)
    assert cost.head_forward_s == pytest.approx(4 * (20 / 5 + 220 / 2))
    assert cost.head_backward_s == pytest.approx(4 * (40 / 5 + 140 / 2))
    over_chunks = unit_cost(hardware=hardware, topology=topology, loss_chunk_tokens=64)
    added_s = 4 / 64 * 2 * (2 + 4) * 10 / 2  # by each of the chunks: a gradient of 10 weights
    repeated = cost._replace(head_backward_s=cost.head_backward_s + cost.head_forward_s + added_s)
    assert over_chunks == pytest.approx(repeated), "once more forward"
    table = unit_prices(hardware=hardware, topology=topology).table
    assert table.slowest_s_per_token == pytest.approx(114 + 78 + (7 if pp_size == 1 else 0))


def test_tensor_parallel_collectives_by_hand():
    """Two TP ranks exchange half of 2 * 2 bytes per token in each of 2 all-reduces: 4 bytes a layer and direction."""
    hardware = replace(UNIT_HARDWARE, collective_bandwidth_in_node_bytes_per_s=0.5)
    topology = Topology(num_lanes=4, tp_size=2)
    plain, split = unit_cost(topology=topology), unit_cost(hardware=hardware, topology=topology)
    assert split.forward_s - plain.forward_s == pytest.approx(4 * 4 / 0.5)
    assert split.backward_s - plain.backward_s == pytest.approx(4 * 4 / 0.5)
    # Embedding, head: one all-reduce of 2 bytes each, or half of one.
    edges = (split.embedding_forward_s, split.embedding_backward_s, split.head_forward_s, split.head_backward_s)
    assert edges == pytest.approx((16, 8, 8, 16))
    across = replace(hardware, collective_bandwidth_in_node_bytes_per_s=4)
    over_nodes = Topology(num_lanes=4, tp_size=2, ranks_per_node=1)  # 2 bytes per s of the NIC
    fast, slow = (
        unit_prices(hardware=across, topology=one).cost(1, 0, 4, 0).forward_s for one in (topology, over_nodes)
    )
    assert slow - fast == pytest.approx(4 * 4 / 2 - 4 * 4 / 4)


def test_gradient_reduction_by_hand():
    """34 weights and 2 tables of 10: 4 bytes of gradient and 2 of weight each, 3/4 of them move; nothing overlaps."""
    hardware = replace(UNIT_HARDWARE, collective_bandwidth_in_node_bytes_per_s=9)

    def reduction_s(model=UNIT_MODEL, **sizes):
        problem = problem_of(Topology(**sizes), model, hardware)
        return CostModel(replace(problem, data_parallel=DataParallel())).reduction.least_s

    assert reduction_s(num_lanes=4) == pytest.approx(54 * 6 * 0.75 / 9)
    assert reduction_s(replace(UNIT_MODEL, share_embeddings_and_output_weights=True), num_lanes=4) == pytest.approx(
        44 * 6 * 0.75 / 9
    )
    assert reduction_s(num_lanes=4, pp_size=2, tp_size=2) == pytest.approx((17 + 10) / 2 * 6 * 0.75 / 9)
    assert reduction_s(num_lanes=1) == 0
    # Two lanes a node: two NICs of 2 bytes per s; with 8 a node the bandwidth inside is less than that of all NICs.
    assert reduction_s(num_lanes=4, ranks_per_node=2) == pytest.approx(54 * 6 * 0.75 / 4)
    assert reduction_s(num_lanes=16) == pytest.approx(54 * 6 * (15 / 16) / 9)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_prices_increase_and_are_convex(recompute, exchange):
    topology, shape = Topology(num_lanes=8, ranks_per_node=4), replace(TINY_MODEL, num_attention_heads=8)
    model = unit_prices(shape, CURVED_HARDWARE, topology, recompute=recompute)
    for cp_size, inner in ((1, 1), (2, 1), (4, 1), (8, 1)) if exchange != "a2a+p2p" else ((4, 2), (8, 2), (8, 4)):
        inner = cp_size if exchange == "a2a" else inner
        for length in (16, 160, 1600, 16000):
            for other in (16, 320, 6400):
                one, two = (length, length**2), (other, other**2)
                both = tuple(first + second for first, second in zip(one, two, strict=True))
                middle = tuple(value / 2 for value in both)
                for direction in (0, 1):
                    price = [
                        model.cost(cp_size, 0, *sums, exchange, inner)[direction] for sums in (one, two, both, middle)
                    ]
                    assert max(price[:2]) < price[2]
                    assert price[3] <= (price[0] + price[1]) / 2 * (1 + 1e-12)


@pytest.mark.parametrize("name", ["bandwidth_in_node_bytes_per_s", "bandwidth_across_nodes_bytes_per_s"])
def test_no_exchange_becomes_dearer_on_a_faster_link(name):
    """And each of them becomes cheaper on some link: none ignores both."""
    topology, shape = Topology(num_lanes=8, ranks_per_node=4), replace(TINY_MODEL, num_attention_heads=8)
    slow, fast = (
        unit_prices(shape, hardware, topology)
        for hardware in (TINY_HARDWARE, replace(TINY_HARDWARE, **{name: 10 * getattr(TINY_HARDWARE, name)}))
    )
    cheaper = set()
    for cp_size in (2, 4, 8):
        inner_of = {"p2p": (1,), "all_gather": (1,), "a2a": (cp_size,), "a2a+p2p": (2, 4)}
        for exchange, sizes in inner_of.items():
            for inner in sizes:
                if exchange == "a2a+p2p" and inner >= cp_size:
                    continue
                before, after = (each.cost(cp_size, 0, 640, 640 * 64, exchange, inner) for each in (slow, fast))
                assert after.forward_s <= before.forward_s
                assert after.backward_s <= before.backward_s
                if after.forward_s < before.forward_s:
                    cheaper.add((cp_size, exchange))
    if "across" in name:
        wanted = {(8, exchange) for exchange in ("p2p", "all_gather", "a2a", "a2a+p2p")}
    else:
        wanted = {(2, "p2p"), (4, "p2p"), (8, "a2a"), (8, "a2a+p2p")}
    assert wanted <= cheaper
    assert ("across" in name) == ((4, "p2p") not in cheaper)
