"""Flags of pretrain_gpt.py for a setting."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from math import lcm
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.setting import POOL_POLICIES, Setting
from dynamic_cp.types import (
    FP32_STATE,
    SHARDED,
    DataParallel,
    Experts,
    LinearAttention,
    ModelShape,
    PlanOptions,
    StateDtypes,
)
from dynamic_cp.types.stage_layers import flags_of

_POLICY_FLAGS = {
    "dynamic": ("--dynamic-cp",),
    **{name: ("--dynamic-cp", f"--dynamic-cp-pool {use}") for name, use in POOL_POLICIES.items()},
    "balanced": ("--static-cp-policy balanced",),
    "static": (),
}
_VOCAB_MULTIPLE = 128
"""The trainer pads the vocabulary to a multiple of this unless it is told another."""


def why_not_trained(model: ModelShape, architecture: Architecture | None) -> str | None:
    """Return what of a model pretrain_gpt.py does not have, None where it trains it."""
    if not model.causal_attention:
        return "attention without a mask: this model is for planning"
    linear = model.linear_attention
    if linear is not None and not linear.has_delta_rule and not (model.layer_pattern and linear.kernel_size == 4):
        return "Mamba-2 is in patterns of layers alone, with a convolution of 4 tokens"
    if flags_of(model.pipeline_layers) is None:
        return f"no flags give stages the layers {[list(one) for one in model.pipeline_layers]}"
    return None if architecture is None or not architecture.not_trained else "; ".join(architecture.not_trained)


def launch_flags(
    setting: Setting,
    *,
    model: ModelShape,
    architecture: Architecture | None,
    hardware_name: str,
    max_seqlen: int,
    global_batch_size: int,
    options: PlanOptions | None = None,
    data_parallel: DataParallel = SHARDED,
) -> tuple[tuple[str, ...], ...]:
    """Return the flags, each with its value if it has one, in groups of one line: parallelism, dynamic CP, model.

    What is not here is the user's: data, tokenizer, learning rate, length of the run.

    Args:
        architecture: of the model; None = as `Architecture.assumed` says.
        options: of the planner, with what is no part of the setting; None = as that has them.

    Raises:
        UnsupportedFeatureError: the trainer does not have this model; the message names what.
    """
    if reason := why_not_trained(model, architecture):
        raise UnsupportedFeatureError(f"pretrain_gpt.py does not train this model: {reason}")
    architecture = architecture or Architecture.assumed(gated=model.gated_linear_unit)
    return (
        _parallelism(setting, data_parallel),
        _planning(setting, hardware_name, options or setting.options()),
        _lengths(max_seqlen, global_batch_size, grouped=model.experts is not None and model.experts.grouped),
        _recompute(setting),
        _shape(model, architecture, setting.topology.tp_size),
        _architecture(model, architecture, max_seqlen),
    )


def model_flags(model: ModelShape, architecture: Architecture, *, tp_size: int, max_seqlen: int = 0) -> tuple[str, ...]:
    """Return the flags that decide the model, each with its value if it has one.

    Args:
        tp_size: of the run, which pads the vocabulary.
        max_seqlen: of the run; --max-position-embeddings is at least that.
    """
    return (*_shape(model, architecture, tp_size), *_architecture(model, architecture, max_seqlen))


def launcher(setting: Setting) -> str:
    """Return the torchrun words before the script."""
    topology = setting.topology
    per_node = min(topology.ranks_per_node, topology.world_size)
    num_nodes = topology.world_size // per_node
    # Nodes in a fixed order, c10d would number them by address: the lanes of a CP group are neighbours.
    static = f" --nnodes {num_nodes} --node-rank $NODE_RANK --master-addr $HEAD_NODE --master-port 29500"
    nodes = static if num_nodes > 1 else " --local-addr localhost"  # the host's own name may not resolve
    return f"torchrun{nodes} --nproc-per-node {per_node}"


Flags = tuple[str, ...]


def _given(*flags: tuple[str, Any]) -> Flags:
    """Return the flags with their values, without those whose value is None or False; True: a flag without a value."""
    return tuple(
        name if value is True else f"{name} {value}"
        for name, value in flags
        if value is not None and value is not False
    )


def _parallelism(setting: Setting, data_parallel: DataParallel) -> Flags:
    topology = setting.topology
    return (
        f"--tensor-model-parallel-size {topology.tp_size}",
        f"--pipeline-model-parallel-size {topology.pp_size}",
        *((flags_of(setting.pipeline_layers) or ()) if topology.pp_size > 1 else ()),
        *_given(
            ("--num-virtual-stages-per-pipeline-rank", topology.vp_size > 1 and topology.vp_size),
            ("--expert-model-parallel-size", topology.ep_size > 1 and topology.ep_size),
            ("--sequence-parallel", topology.sequence_parallel),
            ("--use-distributed-optimizer", data_parallel.distributed_optimizer),
            ("--overlap-grad-reduce", data_parallel.overlap_grad_reduce),
            ("--overlap-param-gather", data_parallel.overlap_param_gather),
            *_dtypes(data_parallel.state),
        ),
    )


def _dtypes(state: StateDtypes) -> Iterator[tuple[str, Any]]:
    """Yield the flags of dtypes that are not the usual ones, and their values."""
    for name, value in asdict(state).items():
        if value != getattr(FP32_STATE, name):
            yield f"--{name.replace('_', '-')}", value


def _planning(setting: Setting, hardware_name: str, options: PlanOptions) -> Flags:
    search, states = options.search, options.state_exchange
    return _POLICY_FLAGS[setting.policy] + _given(
        ("--context-parallel-size", setting.static_cp_size),
        ("--max-dynamic-cp-size", setting.max_cp_size),
        ("--max-seqlen-per-dp-cp-rank", setting.max_tokens_per_rank),
        ("--loss-chunk-tokens", setting.loss_chunk_tokens or None),
        ("--cp-comm-type", setting.cp_comm_type),
        ("--dynamic-cp-state-exchange", states != "auto" and states),
        ("--dynamic-cp-hardware", shlex.quote(hardware_name)),
        ("--dynamic-cp-search", search != "fast" and search),
    )


def _lengths(max_seqlen: int, global_batch_size: int, *, grouped: bool) -> Flags:
    given = (f"--seq-length {max_seqlen}", f"--global-batch-size {global_batch_size}", "--bf16")
    return (*given, *_given(("--moe-grouped-gemm", grouped)))


def _recompute(setting: Setting) -> Flags:
    if setting.recompute == "full":
        method, number = setting.recompute_layers
        return "--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {number}"
    return ("--recompute-granularity selective",) if setting.recompute == "selective" else ()


def _shape(model: ModelShape, architecture: Architecture, tp_size: int) -> Flags:
    is_grouped, is_latent = model.num_query_groups != model.num_attention_heads, model.kv_lora_rank > 0
    is_clamped = architecture.quick_geglu and architecture.activation_func_clamp_value > 0
    return _given(
        ("--num-layers", model.num_layers),
        ("--hidden-size", model.hidden_size),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--num-attention-heads", model.num_attention_heads),
        ("--group-query-attention", is_grouped),
        ("--num-query-groups", is_grouped and model.num_query_groups),
        ("--multi-latent-attention", is_latent),
        ("--kv-lora-rank", is_latent and model.kv_lora_rank),
        ("--q-lora-rank", is_latent and model.q_lora_rank > 0 and model.q_lora_rank),
        ("--qk-head-dim", is_latent and model.qk_head_dim),
        ("--qk-pos-emb-head-dim", is_latent and model.qk_pos_emb_head_dim),
        ("--v-head-dim", is_latent and model.v_head_dim),
        ("--kv-channels", not is_latent and model.kv_channels),
        ("--squared-relu", architecture.squared_relu),
        ("--geglu", architecture.geglu),
        ("--quick-geglu", architecture.quick_geglu),
        ("--glu-linear-offset", architecture.quick_geglu and architecture.glu_linear_offset),
        ("--activation-func-clamp-value", is_clamped and architecture.activation_func_clamp_value),
        ("--swiglu", model.gated_linear_unit and not architecture.quick_geglu and not architecture.geglu),
        ("--sandwich-norm", model.sandwich_norm),
        ("--attention-output-gate", model.attention_output_gate),
        *(_windows(model) if model.window is not None else ()),
        *(_linear_attention(model.linear_attention, model) if model.linear_attention is not None else ()),
        *(_experts(model.experts) if model.experts is not None else ()),
        ("--mtp-num-layers", model.mtp_num_layers or None),
        ("--untie-embeddings-and-output-weights", not model.share_embeddings_and_output_weights),
        ("--vocab-size", model.vocab_size),
        ("--make-vocab-size-divisible-by", model.vocab_size % lcm(_VOCAB_MULTIPLE, tp_size) > 0 and 1),
    )


def _windows(model: ModelShape) -> tuple[tuple[str, Any], ...]:
    skip = model.window_attn_skip_freq
    return (
        ("--window-size", f"{model.window_tokens - 1},0"),
        ("--window-attn-skip-freq", _by_layer(skip) if skip else None),
        ("--window-sink-tokens", model.window_sink_tokens or None),
    )


def _linear_attention(linear: LinearAttention, model: ModelShape) -> tuple[tuple[str, Any], ...]:
    pattern = model.layer_pattern
    is_delta, is_mamba = linear.has_delta_rule, not linear.has_delta_rule
    return (
        ("--experimental-attention-variant", not pattern and linear.kind),
        ("--linear-attention-freq", not pattern and _by_layer(model.linear_attention_freq)),
        ("--hybrid-override-pattern", pattern != "" and shlex.quote(pattern)),
        ("--linear-conv-kernel-dim", is_delta and linear.kernel_size),
        ("--linear-key-head-dim", is_delta and linear.key_size),
        ("--linear-value-head-dim", is_delta and linear.value_size),
        ("--linear-num-key-heads", is_delta and linear.num_groups),
        ("--linear-num-value-heads", is_delta and linear.num_heads),
        ("--mamba-state-dim", is_mamba and linear.key_size),
        ("--mamba-head-dim", is_mamba and linear.value_size),
        ("--mamba-num-groups", is_mamba and linear.num_groups),
        ("--mamba-num-heads", is_mamba and linear.num_heads),
    )


def _experts(experts: Experts) -> tuple[tuple[str, Any], ...]:
    shared = experts.shared_ffn_hidden_size or None
    return (
        ("--num-experts", experts.num_experts),
        ("--moe-router-topk", experts.topk),
        ("--moe-ffn-hidden-size", experts.ffn_hidden_size),
        ("--moe-shared-expert-intermediate-size", shared),
        ("--moe-shared-expert-gate", shared is not None and experts.shared_gate),
        ("--moe-layer-freq", experts.layer_freq != 1 and _by_layer(experts.layer_freq)),
    )


def _by_layer(which: int | tuple[int, ...]) -> str:
    """Return a frequency, or a list with an entry for each layer, as an argument of a shell."""
    return shlex.quote(str(list(which)).replace(" ", "") if isinstance(which, tuple) else str(which))


def _architecture(model: ModelShape, architecture: Architecture, max_seqlen: int) -> Flags:
    return _given(
        ("--normalization", architecture.normalization),
        ("--norm-epsilon", architecture.norm_epsilon),
        ("--apply-layernorm-1p", architecture.zero_centered_gamma),
        *_positions(architecture, max_seqlen, latent=model.kv_lora_rank > 0),
        ("--disable-bias-linear", not architecture.add_bias_linear),
        ("--add-qkv-bias", architecture.add_qkv_bias),
        ("--qk-layernorm", architecture.qk_layernorm),
        ("--softmax-type", architecture.softmax_type != "vanilla" and architecture.softmax_type),
        *_factors(architecture),
        *(_routing(architecture) if model.experts is not None else ()),
        ("--init-method-std", architecture.init_method_std),
    )


def _factors(architecture: Architecture) -> tuple[tuple[str, Any], ...]:
    """Return the flags of factors that are not 1, or not what follows from the width of a head."""
    names = ("residual_multiplier", "embedding_multiplier", "logits_scaling")
    factors = [(f"--{name.replace('_', '-')}", getattr(architecture, name)) for name in names]
    scale = architecture.softmax_scale
    return *((flag, value != 1 and value) for flag, value in factors), ("--softmax-scale", scale > 0 and scale)


def _positions(architecture: Architecture, max_seqlen: int, *, latent: bool) -> tuple[tuple[str, Any], ...]:
    kind = architecture.position_embedding_type
    is_yarn = kind == "yarn"
    yarn = (
        ("--rotary-scaling-factor", architecture.rotary_scaling_factor),
        ("--yarn-original-max-position-embeddings", architecture.yarn_original_max_position_embeddings),
        ("--yarn-beta-fast", architecture.yarn_beta_fast),
        ("--yarn-beta-slow", architecture.yarn_beta_slow),
        ("--mscale", architecture.mscale),
        ("--mscale-all-dim", architecture.mscale_all_dim),
        ("--no-yarn-correction-range-round-to-int", not architecture.yarn_correction_range_round_to_int),
    )
    return (
        # Latent attention has RoPE and YaRN of its own, which follow from the flags of YaRN.
        ("--position-embedding-type", "rope" if is_yarn and latent else kind),
        # What the weights were made for is no limit of RoPE, so a run may have longer samples.
        ("--max-position-embeddings", max(architecture.max_position_embeddings, max_seqlen)),
        ("--rotary-base", kind in ("rope", "yarn") and architecture.rotary_base),
        ("--rotary-percent", kind == "rope" and architecture.rotary_percent != 1 and architecture.rotary_percent),
        ("--window-rotary-base", architecture.window_rotary_base or None),
        ("--rotary-interleaved", architecture.rotary_interleaved),
        ("--no-rope-freq", len(architecture.no_rope_freq) > 0 and _by_layer(architecture.no_rope_freq)),
        ("--use-rope-scaling", architecture.use_rope_scaling),
        ("--rope-scaling-factor", architecture.use_rope_scaling and architecture.rope_scaling_factor),
        *(yarn if is_yarn else ()),
    )


def _routing(architecture: Architecture) -> tuple[tuple[str, Any], ...]:
    function, factor = architecture.router_score_function, architecture.router_scaling_factor
    groups = architecture.router_num_groups or None
    return (
        ("--moe-router-score-function", function != "softmax" and function),
        ("--moe-router-pre-softmax", architecture.router_pre_softmax),
        ("--moe-router-num-groups", groups),
        ("--moe-router-group-topk", groups and architecture.router_group_topk),
        ("--moe-router-topk-scaling-factor", factor != 1 and factor),
        ("--moe-router-enable-expert-bias", architecture.router_expert_bias),
    )
