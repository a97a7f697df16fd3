"""FLOPs by hand, and those of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamic_cp.models.catalog import load_model
from dynamic_cp.pricing.work import batch_flops, length_sums, mfu, plan_flops, tflops_per_rank
from dynamic_cp.types import Bucket, ModelShape, Topology
from tests.unit.support import TINY_HARDWARE, plan_of_buckets, samples_of

# 2 layers of 3*(2*4 + 2*2) + 2*3*5 = 66 weights, query width 4, a head of 3 * 7 weights.
MODEL = ModelShape(
    num_layers=2, hidden_size=3, ffn_hidden_size=5, num_attention_heads=2, num_query_groups=1, kv_channels=2,
    vocab_size=7,
)  # fmt: skip


def test_a_batch_by_hand():
    """Lengths 10 and 4: S = 14, S^2 = 116. Layers 2*2*66*14, attention 2*2*4*116, head 2*21*14."""
    layers, attention, head = 3696, 1856, 588
    assert length_sums(samples_of([10, 4]), MODEL) == (14, 116)
    flops = batch_flops(MODEL, 14, 116)
    assert flops == (layers + attention + head, 2 * (layers + attention + head), 0)
    assert flops.model_flops == flops.hardware_flops == 3 * 6140
    assert batch_flops(MODEL, 14, 116, "selective").recompute == attention
    full = batch_flops(MODEL, 14, 116, "full")
    assert full.recompute == layers + attention
    assert batch_flops(MODEL, 14, 116, "full", 0.5).recompute == (layers + attention) / 2
    assert full.model_flops == 3 * 6140
    assert full.hardware_flops == 3 * 6140 + layers + attention


def test_without_a_mask_attention_counts_twice():
    seen = batch_flops(replace(MODEL, causal_attention=False), 14, 116).forward
    assert seen - batch_flops(MODEL, 14, 116).forward == 1856
    gated = batch_flops(replace(MODEL, gated_linear_unit=True), 14, 116).forward
    assert gated - batch_flops(MODEL, 14, 116).forward == 2 * 2 * 15 * 14


def test_six_flops_per_weight_and_token_where_attention_is_small():
    model = load_model("llama-3-8b")
    weights = model.num_layers * model.linear_weights_per_layer + model.vocab_size * model.hidden_size
    tokens = 8 * 10**6
    assert batch_flops(model, tokens, tokens).model_flops == pytest.approx(6 * weights * tokens, rel=1e-4)


def test_padding_is_run_but_not_achieved():
    """5 and 9 tokens on 2 lanes are padded to 8 and 12, an empty place holds 1 token."""
    held = [Bucket(first_lane=0, cp_size=2, samples=samples_of([5, 9]))]
    plan = plan_of_buckets(held, [Bucket(first_lane=0), Bucket(first_lane=1)], topology=Topology(num_lanes=2))
    true, padded = plan_flops(MODEL, plan, "full")
    assert true == batch_flops(MODEL, 14, 25 + 81, "full")
    assert padded == batch_flops(MODEL, 20 + 2, 64 + 144 + 2, "full")
    # With sequence parallelism over 4 ranks the 10 tokens of a lane become 12, the empty places 4.
    wide = replace(plan, topology=Topology(num_lanes=2, tp_size=4, sequence_parallel=True))
    assert plan_flops(MODEL, wide)[1] == batch_flops(MODEL, 24 + 8, 8**2 + 16**2 + 2 * 4**2)


def test_throughput():
    assert tflops_per_rank(6e15, 2.0, 3) == pytest.approx(1000)
    assert mfu(6e11, 2.0, 12, TINY_HARDWARE) == pytest.approx(0.25)
