"""Properties of the prices that the frozen cases do not show."""

from __future__ import annotations

import pytest

from dynamic_cp.cost_model import CostModel
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import Bucket, ModelShape, PlanOptions, Topology
from tests.unit.planner.support import TINY_HARDWARE, TINY_MODEL, samples_of, tiny_cost_model


def test_a_group_across_nodes_costs_more_than_one_inside():
    model = tiny_cost_model(Topology(num_lanes=12, ranks_per_node=6))
    inside, across = model.cost(4, 0, 512, 512), model.cost(4, 4, 512, 512)
    assert inside.forward_s < across.forward_s
    assert inside.backward_s < across.backward_s


def test_a_price_is_not_the_sum_of_its_samples():
    """Short samples' exchange hides behind a long sample's attention, so together they cost less than apart."""
    model = tiny_cost_model(Topology(num_lanes=2))
    short, long = model.cost(2, 0, 4096, 4096), model.cost(2, 0, 2048, 2048**2)
    together = model.cost(2, 0, 6144, 4096 + 2048**2)
    fixed_s = model.cost(1, 0, 0, 0).forward_s
    assert short.forward_s + long.forward_s - fixed_s - together.forward_s > 0.03 * short.forward_s


def test_recompute_adds_to_the_backward_only():
    topology = Topology(num_lanes=2)
    none, selective, full = (
        tiny_cost_model(topology, recompute=mode).cost(2, 0, 512, 512**2) for mode in ("none", "selective", "full")
    )
    assert none.forward_s == selective.forward_s == full.forward_s
    assert none.backward_s < selective.backward_s < full.backward_s


def test_all_gather_hides_nothing():
    topology = Topology(num_lanes=2)
    ring = tiny_cost_model(topology).cost(2, 0, 4096, 4096**2)
    gather = tiny_cost_model(topology, cp_comm_types=("all_gather",)).cost(2, 0, 4096, 4096**2)
    kv_bytes = TINY_MODEL.num_layers * 2 * TINY_MODEL.kv_size * 4
    step_s = 2048 * kv_bytes / TINY_HARDWARE.bandwidth_in_node_bytes_per_s + TINY_MODEL.num_layers * 1e-5
    assert gather.forward_s - ring.forward_s == pytest.approx(step_s)
    assert gather.backward_s - ring.backward_s == pytest.approx(2 * step_s)
    assert ring == tiny_cost_model(topology, cp_comm_types=("all_gather",)).cost(2, 0, 4096, 4096**2, cp_comm_type="p2p")


def test_an_exchange_without_a_price_is_refused():
    with pytest.raises(UnsupportedFeatureError, match=r"--cp-comm-type a2a\+p2p has no price"):
        tiny_cost_model(Topology(num_lanes=2), cp_comm_types=("p2p", "a2a+p2p"))
    with pytest.raises(UnsupportedFeatureError, match=r"--cp-comm-type a2a\+p2p has no price"):
        tiny_cost_model(Topology(num_lanes=2)).cost(2, 0, 4, 16, "a2a+p2p")


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


def test_only_sequence_parallelism_splits_the_hops():
    plain = tiny_cost_model(Topology(num_lanes=1, tp_size=2, pp_size=2))
    split = tiny_cost_model(Topology(num_lanes=1, tp_size=2, pp_size=2, sequence_parallel=True))
    assert plain.cost(1, 0, 100, 0).p2p_s == 2 * split.cost(1, 0, 100, 0).p2p_s > 0
    assert tiny_cost_model(Topology(num_lanes=1)).cost(1, 0, 100, 0).p2p_s == 0


def test_padding_is_priced():
    model = tiny_cost_model(Topology(num_lanes=4, tp_size=4, sequence_parallel=True))
    bucket = Bucket(first_lane=0, cp_size=2, samples=samples_of([5, 9]))
    # 5 and 9 become 8 and 12, 10 tokens a rank; a multiple of 4 needs 12: the last sample grows to 16.
    assert model.bucket_cost(bucket) == model.cost(2, 0, 24, 8**2 + 16**2)
    assert model.bucket_cost(Bucket(first_lane=3)) == model.cost(1, 3, 4, 4**2)


def test_structure_follows_the_model():
    """Twice the layers cost twice, but for the fixed overhead of a bucket."""
    options = PlanOptions(max_tokens_per_rank=256)
    shapes = [
        ModelShape(
            num_layers=layers,
            hidden_size=128,
            ffn_hidden_size=512,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=32,
            vocab_size=257,
        )
        for layers in (4, 8)
    ]
    prices = [
        CostModel(shape, TINY_HARDWARE, Topology(num_lanes=2), options).cost(2, 0, 100, 5000).forward_s - 1e-5
        for shape in shapes
    ]
    assert prices[1] == pytest.approx(2 * prices[0])
