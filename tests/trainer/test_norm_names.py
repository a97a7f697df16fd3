"""Norms before projections, whichever layers have saved them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.trainer.checkpoints.state import ask_as_found, found_as

NAMES = {
    "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.self_attention.q_layernorm.weight": (
        "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight"
    ),
    "mtp.layers.0.transformer_layer.self_attention.kv_layernorm.weight": (
        "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.layer_norm_weight"
    ),
}


@pytest.mark.parametrize("alone", NAMES)
def test_either_name_is_found(alone):
    fused = NAMES[alone]
    for there, asked in ((alone, fused), (fused, alone), (alone, alone), (fused, fused)):
        assert found_as(asked, {there, "decoder.final_layernorm.weight"}) == there
    assert found_as(alone, {}) == alone, "what is missing keeps its name for the message"


def test_weights_and_their_optimizer_are_asked_for_as_they_are_there():
    moment = "optimizer.state.exp_avg."
    there = set(NAMES.values()) | {moment + fused for fused in NAMES.values()} | {"output_layer.weight"}
    asked = [SimpleNamespace(key=name) for alone in NAMES for name in (alone, moment + alone)]
    head = SimpleNamespace(key="output_layer.weight")
    ask_as_found({"model": {"w": asked[0], "more": [asked[1:4], head]}, "rng": 3, "o": {0: tuple(asked[4:])}}, there)
    assert [one.key for one in asked] == [name for fused in NAMES.values() for name in (fused, moment + fused)]
    assert head.key == "output_layer.weight"
