"""Names of layers with linear attention, and of layers that are halves. No torch here.

    rows that transformers keep together                          megatron-core
    Qwen3-Next   in_proj_qkvz   of each key head: q, k, v, z      in_proj.weight.{query, key, value, z}, and so on:
                 in_proj_ba     of each key head: b, a            all sections are tensors of their own
    Qwen3.5      in_proj_qkv    q, k, v
    all          conv1d         channels of q, k, v, or x, B, C
    Nemotron-H   in_proj        z, x, B, C, dt

The norm of what a gated delta net finds multiplies by its weight alone in transformers, by 1 + its weight as all norms
of such a model in megatron-core.
"""

from __future__ import annotations

from dynamic_cp.types import LinearAttention
from megatron.integrations.weights.rows import Section, attention, rows

_DELTA = """
self_attention.conv1d.weight.(query key value) | linear_attn.conv1d.weight | qkv one kernel | rows * alone
self_attention.(A_log dt_bias) | linear_attn.* | state_heads
self_attention.out_norm.weight | linear_attn.norm.weight | state_values | less one
self_attention.out_proj.weight | linear_attn.out_proj.weight | hidden state_channels
"""
_NORM = "self_attention.in_proj.layer_norm_weight | input_layernorm.weight | hidden"
QWEN3_NEXT = rows(
    _DELTA,
    *rows(
        f"""{_NORM}
self_attention.in_proj.weight.(query key value z) | linear_attn.in_proj_qkvz.weight | qkvz hidden | rows * of a key head
self_attention.in_proj.weight.(beta alpha) | linear_attn.in_proj_ba.weight | ba hidden | rows * of a key head
"""
    ),
)
QWEN3_5 = rows(
    _DELTA,
    *rows(
        f"""{_NORM}
self_attention.in_proj.weight.(query key value) | linear_attn.in_proj_qkv.weight | qkv hidden | rows * alone
self_attention.in_proj.weight.z | linear_attn.in_proj_z.weight | state_channels hidden
self_attention.in_proj.weight.beta | linear_attn.in_proj_b.weight | state_heads hidden
self_attention.in_proj.weight.alpha | linear_attn.in_proj_a.weight | state_heads hidden
"""
    ),
)
NEMOTRON_MAMBA = rows(
    """
mixer.in_proj.layer_norm_weight | norm.weight | hidden
mixer.in_proj.weight.(z x B C dt) | mixer.in_proj.weight | zxBCdt hidden | rows *
mixer.conv1d.weight.(x B C) | mixer.conv1d.weight | xBC one kernel | rows * convolved
mixer.conv1d.bias.(x B C) | mixer.conv1d.bias | xBC | rows * convolved
mixer.(A_log D dt_bias) | mixer.* | state_heads
mixer.norm.weight | mixer.norm.weight | state_channels
mixer.out_proj.weight | mixer.out_proj.weight | hidden state_channels
"""
)
NEMOTRON_ATTENTION = attention("mixer", "norm.weight")
NEMOTRON_MLP = rows(
    """
mlp.linear_fc1.layer_norm_weight | norm.weight | hidden
mlp.linear_fc1.weight | mixer.up_proj.weight | ffn hidden
mlp.linear_fc2.weight | mixer.down_proj.weight | hidden ffn
"""
)
NEMOTRON_EXPERTS = rows(
    """
pre_mlp_layernorm.weight | norm.weight | hidden
mlp.router.weight | mixer.gate.weight | experts hidden
mlp.router.expert_bias | mixer.gate.e_score_correction_bias | experts
mlp.experts.experts.linear_fc1.weight | mixer.experts.{}.up_proj.weight | expert_ffn hidden
mlp.experts.experts.linear_fc2.weight | mixer.experts.{}.down_proj.weight | hidden expert_ffn
mlp.shared_experts.linear_fc1.weight | mixer.shared_experts.up_proj.weight | shared_ffn hidden | if shared experts
mlp.shared_experts.linear_fc2.weight | mixer.shared_experts.down_proj.weight | hidden shared_ffn | if shared experts
"""
)


def sizes(linear: LinearAttention) -> dict[str, int]:
    """Return the widths of axes."""
    keys, values = linear.num_groups * linear.key_size, linear.num_heads * linear.value_size
    return {
        "kernel": linear.kernel_size,
        "state_heads": linear.num_heads,
        "state_values": linear.value_size,
        "state_channels": values,
        "qkv": 2 * keys + values,
        "qkvz": 2 * keys + 2 * values,
        "ba": 2 * linear.num_heads,
        "xBC": 2 * keys + values,
        "zxBCdt": 2 * keys + 2 * values + linear.num_heads,
    }


def sections(linear: LinearAttention) -> dict[str, Section]:
    """Return the rows of sections by their names."""
    keys, values, heads = linear.key_size, linear.value_size, linear.num_heads // linear.num_groups
    groups, all_keys, all_values = linear.num_groups, linear.num_groups * keys, linear.num_heads * values
    of_head = [("query", keys), ("key", keys), ("value", heads * values), ("z", heads * values)]
    alone_ = [("query", all_keys), ("key", all_keys), ("value", all_values)]
    convolved = [("x", all_values), ("B", all_keys), ("C", all_keys)]
    return {
        **_named(of_head, groups, " of a key head"),
        **_named([("beta", heads), ("alpha", heads)], groups, " of a key head"),
        **_named(alone_, 1, " alone"),
        **_named([("z", all_values), *convolved, ("dt", linear.num_heads)], 1, ""),
        **_named(convolved, 1, " convolved"),
    }


def _named(widths: list[tuple[str, int]], num_groups: int, suffix: str) -> dict[str, Section]:
    found, start = {}, 0
    for name, width in widths:
        found[f"{name}{suffix}"] = Section(num_groups, start, start + width)
        start += width
    return found
