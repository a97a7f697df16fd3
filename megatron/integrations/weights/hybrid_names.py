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
from megatron.integrations.weights.rows import Row, Section, alone, attention

_MODULE = "self_attention."
_IN, _CONV = "in_proj.weight", "conv1d.weight"


def _of_gated_delta(rows: dict[str, tuple[str, str, str]]) -> tuple[Row, ...]:
    """Return the lines of a gated delta net; `rows`: section of its projection -> name, axes and section there."""
    return (
        alone(f"{_MODULE}in_proj.layer_norm_weight", "input_layernorm.weight", "hidden"),
        *(
            alone(f"{_MODULE}{_IN}.{name}", f"linear_attn.{theirs}.weight", axes, section=section)
            for name, (theirs, axes, section) in rows.items()
        ),
        *(
            alone(f"{_MODULE}{_CONV}.{name}", "linear_attn.conv1d.weight", "qkv one kernel", section=f"{name} alone")
            for name in ("query", "key", "value")
        ),
        *(alone(f"{_MODULE}{name}", f"linear_attn.{name}", "state_heads") for name in ("A_log", "dt_bias")),
        Row(ours=f"{_MODULE}out_norm.weight", theirs={"linear_attn.norm.weight": "state_values"}, joined="less one"),
        alone(f"{_MODULE}out_proj.weight", "linear_attn.out_proj.weight", "hidden state_channels"),
    )


QWEN3_NEXT = _of_gated_delta(
    {
        **{name: ("in_proj_qkvz", "qkvz hidden", f"{name} of a key head") for name in ("query", "key", "value", "z")},
        **{name: ("in_proj_ba", "ba hidden", f"{name} of a key head") for name in ("beta", "alpha")},
    }
)
QWEN3_5 = _of_gated_delta(
    {
        **{name: ("in_proj_qkv", "qkv hidden", f"{name} alone") for name in ("query", "key", "value")},
        "z": ("in_proj_z", "state_channels hidden", ""),
        "beta": ("in_proj_b", "state_heads hidden", ""),
        "alpha": ("in_proj_a", "state_heads hidden", ""),
    }
)
NEMOTRON_MAMBA = (
    alone("mixer.in_proj.layer_norm_weight", "norm.weight", "hidden"),
    *(
        alone(f"mixer.{_IN}.{name}", "mixer.in_proj.weight", "zxBCdt hidden", section=name)
        for name in ("z", "x", "B", "C", "dt")
    ),
    *(
        alone(f"mixer.{_CONV}.{name}", "mixer.conv1d.weight", "xBC one kernel", section=f"{name} convolved")
        for name in ("x", "B", "C")
    ),
    *(
        alone(f"mixer.conv1d.bias.{name}", "mixer.conv1d.bias", "xBC", section=f"{name} convolved")
        for name in ("x", "B", "C")
    ),
    *(alone(f"mixer.{name}", f"mixer.{name}", "state_heads") for name in ("A_log", "D", "dt_bias")),
    alone("mixer.norm.weight", "mixer.norm.weight", "state_channels"),
    alone("mixer.out_proj.weight", "mixer.out_proj.weight", "hidden state_channels"),
)
NEMOTRON_ATTENTION = attention("mixer", "norm.weight")
NEMOTRON_MLP = (
    alone("mlp.linear_fc1.layer_norm_weight", "norm.weight", "hidden"),
    alone("mlp.linear_fc1.weight", "mixer.up_proj.weight", "ffn hidden"),
    alone("mlp.linear_fc2.weight", "mixer.down_proj.weight", "hidden ffn"),
)
NEMOTRON_EXPERTS = (
    alone("pre_mlp_layernorm.weight", "norm.weight", "hidden"),
    alone("mlp.router.weight", "mixer.gate.weight", "experts hidden"),
    alone("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", "experts"),
    alone("mlp.experts.experts.linear_fc1.weight", "mixer.experts.{}.up_proj.weight", "expert_ffn hidden"),
    alone("mlp.experts.experts.linear_fc2.weight", "mixer.experts.{}.down_proj.weight", "hidden expert_ffn"),
    alone(
        "mlp.shared_experts.linear_fc1.weight",
        "mixer.shared_experts.up_proj.weight",
        "shared_ffn hidden",
        "shared experts",
    ),
    alone(
        "mlp.shared_experts.linear_fc2.weight",
        "mixer.shared_experts.down_proj.weight",
        "hidden shared_ffn",
        "shared experts",
    ),
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
