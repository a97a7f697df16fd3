"""Layers with linear attention: their sizes, which layers they are, and how plans name what their lanes exchange."""

import json
from dataclasses import replace

import pytest

from dynamic_cp.errors import IllegalPlanError, InvalidInputError
from dynamic_cp.plans.lane_plan import _decode_bucket, _encode_bucket
from dynamic_cp.plans.serialize import digest, dumps, format_plan, loads, parse_plan
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import CAUSAL, Bucket, Experts, LinearAttention, ModelShape, Plan, Sample, Topology
from tests.unit.support import plan_of_buckets

GATED_DELTA = LinearAttention(kind="gated_delta_net", num_heads=32, num_groups=16, key_size=128, value_size=128)
MAMBA = LinearAttention(kind="mamba2", num_heads=64, num_groups=8, key_size=128, value_size=64)
SHAPE = ModelShape(
    num_layers=8, hidden_size=2048, ffn_hidden_size=5120, num_attention_heads=16, num_query_groups=2, kv_channels=256,
    vocab_size=1000, gated_linear_unit=True, linear_attention=GATED_DELTA, linear_attention_freq=4,
)  # fmt: skip
EXPERTS = Experts(num_experts=4, topk=2, ffn_hidden_size=64)


def test_sizes_of_a_gated_delta_net_are_those_of_qwen3_next():
    assert GATED_DELTA.convolved_channels == 8192
    assert GATED_DELTA.weights(2048) == 2048 * (8192 + 4096 + 64) + 4096 * 2048
    assert GATED_DELTA.state_bytes == 2**21
    assert GATED_DELTA.summary_bytes == 2**22
    assert (GATED_DELTA.core_flops, GATED_DELTA.summary_flops) == (4718592, 8388608)


def test_mamba_2_has_a_number_for_the_matrix_of_a_state():
    assert MAMBA.summary_bytes == MAMBA.state_bytes + 4 * 64
    assert MAMBA.core_flops == 64 * (4 * 128 * 64 + 64 * 64) + 8 * 64 * 128


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 8, 64, 128])
def test_lanes_share_out_whole_heads_and_have_the_groups_of_theirs(num_lanes):
    shares = [GATED_DELTA.heads_of_lane(lane, num_lanes) for lane in range(num_lanes)]
    assert [head for share in shares for head in share] == list(range(32))
    assert max(map(len, shares)) == GATED_DELTA.most_heads(num_lanes) <= -(-32 // num_lanes)
    for lane, share in enumerate(shares):
        assert sorted({head // 2 for head in share}) == list(GATED_DELTA.groups_of_lane(lane, num_lanes))
    assert GATED_DELTA.copied_groups(num_lanes) >= 16


def test_tensor_parallel_ranks_have_whole_heads_and_groups():
    assert GATED_DELTA.of_rank(4) == replace(GATED_DELTA, num_heads=8, num_groups=4)
    with pytest.raises(InvalidInputError, match="TP 3 does not divide 32 heads"):
        GATED_DELTA.of_rank(3)


def test_every_fourth_layer_has_attention():
    assert SHAPE.linear_layers == (True, True, True, False) * 2
    (stage,) = SHAPE.stages(1)
    assert [(number, layer.has_attention) for number, layer in stage.layers] == [(2, True), (6, False)]
    assert stage.attention.num_layers == 2
    assert stage.linear_attention.num_layers == 6


def test_a_list_says_the_same_as_a_number():
    listed = replace(SHAPE, linear_attention_freq=(1, 1, 1, 0) * 2)
    assert listed.stages(2) == SHAPE.stages(2)


def test_a_pattern_has_halves_of_layers_with_as_many_weights():
    dense = replace(SHAPE, num_layers=2, linear_attention_freq=2)
    halves = replace(dense, num_layers=4, layer_pattern="G-*-", linear_attention_freq=0)
    assert halves.linear_layers == (True, False, False, False)
    assert halves.num_parameters == dense.num_parameters
    (stage,) = halves.stages(1)
    assert {layer.halves for _, layer in stage.layers} == {1}


def test_windows_are_of_layers_with_attention():
    """Layer 4 has one, 8 has not: work of attention is their mean, whatever layers lie between."""
    shape = replace(SHAPE, window_tokens=16, window_attn_skip_freq=8)
    assert [layer for layer, has_one in enumerate(shape.windowed_layers, 1) if has_one] == [4]
    assert shape.layer_masks == (CAUSAL, shape.window)
    assert [number for number, layer in shape.stages(1)[0].attention.layers] == [1, 1]
    sample = Sample(sample_id=0, seqlen=100)
    all_windowed = replace(shape, window_attn_skip_freq=0)
    assert all_windowed.layer_masks == (shape.window,)
    in_window = all_windowed.squared_tokens(sample)
    assert in_window < 0.4 * sample.squared_tokens
    assert shape.squared_tokens(sample) == (in_window + sample.squared_tokens) / 2
    halves = replace(shape, layer_pattern="G-G-*-*-", linear_attention_freq=0, window_attn_skip_freq=7)
    assert halves.windowed_layers.index(True) == 4
    assert halves.squared_tokens(sample) == shape.squared_tokens(sample)


def test_latents_are_of_layers_with_attention():
    sizes = {"kv_lora_rank": 128, "q_lora_rank": 64, "qk_head_dim": 192, "qk_pos_emb_head_dim": 64, "v_head_dim": 192}
    latent = replace(SHAPE, num_query_groups=16, **sizes)
    linear = [layer for _, layer in SHAPE.stages(1)[0].linear_attention.layers]
    assert [layer for _, layer in latent.stages(1)[0].linear_attention.layers] == linear
    full = replace(latent, linear_attention=None, linear_attention_freq=0)
    assert [layer for _, layer in latent.stages(1)[0].attention.layers] == [
        layer for _, layer in full.stages(1)[0].layers
    ]
    halves = replace(latent, num_layers=8, layer_pattern="G-G-G-*-", linear_attention_freq=0)
    whole = replace(latent, num_layers=4)
    assert halves.num_parameters == whole.num_parameters


def test_a_pattern_says_which_layers_have_experts():
    shape = replace(SHAPE, layer_pattern="MEM*EM-E", linear_attention=MAMBA, linear_attention_freq=0, experts=EXPERTS)
    assert shape.moe_layers == tuple(symbol == "E" for symbol in "MEM*EM-E")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attention_freq": 1}, "gives none of the 8 layers linear attention"),
        ({"linear_attention_freq": (1,) * 8}, "gives none of the 8 layers attention"),
        ({"linear_attention_freq": (1, 0)}, "is of 2 layers, the model has 8"),
        ({"linear_attention_freq": 0}, "linear_attention_freq .* is 0"),
        ({"linear_attention": None}, "there is none: give its sizes"),
        ({"layer_pattern": "G-*-G-*-"}, "leave one of them out"),
        ({"linear_attention_freq": 0, "layer_pattern": "G-*-"}, "is of 4 layers, the model has 8"),
        ({"linear_attention_freq": 0, "layer_pattern": "G-*-G-*X"}, "has X: its symbols"),
        ({"linear_attention_freq": 0, "layer_pattern": "G-G-G-G-"}, "a layer with attention is needed"),
        ({"linear_attention_freq": 0, "layer_pattern": "M-*-M-*-"}, "has layers of mamba2"),
        ({"linear_attention_freq": 0, "layer_pattern": "G-*EG-*-"}, "the model has no experts"),
        ({"causal_attention": False}, "beside attention that is not causal is not supported"),
    ],
)
def test_layers_that_contradict_their_linear_attention_are_refused(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        replace(SHAPE, **changes)


def test_heads_that_groups_do_not_divide_are_refused():
    with pytest.raises(InvalidInputError, match="no multiple of its 5 groups"):
        replace(GATED_DELTA, num_groups=5)


def _plan(bucket: Bucket) -> Plan:
    return plan_of_buckets([bucket], topology=Topology(num_lanes=bucket.cp_size))


@pytest.mark.parametrize("exchange", ["p2p", "a2a", "a2a+p2p"])
def test_a_plan_says_where_states_are_passed_on(exchange):
    inner = 2 if exchange == "a2a+p2p" else 1
    sample = Sample(sample_id=7, seqlen=100)
    bucket = Bucket(
        first_lane=0, cp_size=4, samples=(sample,), cp_comm_type=exchange, inner_cp_size=inner, state_exchange="states"
    )
    plan = _plan(bucket)
    assert " states: 7:100 |" in format_plan(plan)
    assert parse_plan(format_plan(plan)) == plan == loads(dumps(plan))
    assert _decode_bucket(json.loads(_encode_bucket(bucket))) == bucket
    heads = _plan(replace(bucket, state_exchange="heads"))
    assert digest(heads) != digest(plan)
    assert "heads" not in dumps(heads) + format_plan(heads)


def test_one_lane_passes_on_no_states():
    plan = _plan(Bucket(first_lane=0, samples=(Sample(sample_id=0, seqlen=8),), state_exchange="states"))
    with pytest.raises(IllegalPlanError, match="among 1 lane"):
        check_plan(plan)
