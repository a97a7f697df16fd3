"""Latent attention of a checkout: its validated flags are checked, and what it is planned as."""

from __future__ import annotations

from typing import Any

import pytest

from dynamic_cp.errors import DynamicCPError
from megatron.lm_adaptor import flags
from tests.megatron_lm.test_experts import SIZES, validated

LATENT = {
    **SIZES,
    "multi_latent_attention": True,
    "num_layers": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
"""As Megatron-LM validates them: it does not say KV heads, and another width of a head."""


def test_a_checkouts_latents_are_planned() -> None:
    args = validated(**LATENT)
    flags.refuse_loaded(args)
    shape = flags.model_shape(args)
    assert (shape.kv_lora_rank, shape.q_lora_rank, shape.qk_head_dim, shape.v_head_dim) == (32, 0, 24, 16)
    assert (shape.num_query_groups, shape.kv_channels, flags.with_heads(args).kv_channels) == (4, 32, 32)
    assert (args.num_query_groups, args.kv_channels) == (1, 16), "Megatron-LM's own stay"


def test_biases_of_all_linear_layers_set_those_of_qkv_unasked() -> None:
    """As Megatron-LM validates a command line without --disable-bias-linear: nobody gave --add-qkv-bias."""
    flags.refuse_loaded(validated(**LATENT, add_bias_linear=True, add_qkv_bias=True))
    with pytest.raises(DynamicCPError, match="--multi-latent-attention with --add-qkv-bias is not supported"):
        flags.refuse_loaded(validated(**LATENT, add_bias_linear=False, add_qkv_bias=True))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"qk_pos_emb_head_dim": 7}, "--qk-pos-emb-head-dim is 7, RoPE rotates pairs"),
        ({"v_head_dim": 40}, "--v-head-dim is 40 and --kv-channels 32, queries and keys have 32 channels"),
        ({"attention_output_gate": True}, "--multi-latent-attention with --attention-output-gate is not supported"),
    ],
)
def test_validated_flags_are_checked(values: dict[str, Any], says: str) -> None:
    with pytest.raises(DynamicCPError, match=says):
        flags.refuse_loaded(validated(**{**LATENT, **values}))
