"""Flags of pretrain_gpt.py for a setting."""

from __future__ import annotations

import shlex
from math import lcm

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.architecture import Architecture
from dynamic_cp.setting import POOL_POLICIES, Setting
from dynamic_cp.types import Experts, ModelShape
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
    search: str = "fast",
    distributed_optimizer: bool = True,
) -> tuple[tuple[str, ...], ...]:
    """Return the flags, each with its value if it has one, in groups of one line: parallelism, dynamic CP, model.

    What is not here is the user's: data, tokenizer, learning rate, length of the run.

    Args:
        architecture: of the model; None = as `Architecture.assumed` says.

    Raises:
        UnsupportedFeatureError: the trainer does not have this model; the message names what.
    """
    if reason := why_not_trained(model, architecture):
        raise UnsupportedFeatureError(f"pretrain_gpt.py does not train this model: {reason}")
    architecture = architecture or Architecture.assumed(gated=model.gated_linear_unit)
    return (
        _parallelism(setting, distributed_optimizer),
        _planning(setting, hardware_name, search),
        _lengths(max_seqlen, global_batch_size),
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
    nodes = static if num_nodes > 1 else ""
    return f"torchrun{nodes} --nproc-per-node {per_node}"


def _parallelism(setting: Setting, distributed_optimizer: bool) -> tuple[str, ...]:
    topology = setting.topology
    flags = [
        f"--tensor-model-parallel-size {topology.tp_size}",
        f"--pipeline-model-parallel-size {topology.pp_size}",
    ]
    if topology.pp_size > 1:
        flags += flags_of(setting.pipeline_layers) or ()
    if topology.vp_size > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {topology.vp_size}")
    if topology.ep_size > 1:
        flags.append(f"--expert-model-parallel-size {topology.ep_size}")
    if topology.sequence_parallel:
        flags.append("--sequence-parallel")
    return (*flags, "--use-distributed-optimizer") if distributed_optimizer else tuple(flags)


def _planning(setting: Setting, hardware_name: str, search: str) -> tuple[str, ...]:
    flags = list(_POLICY_FLAGS[setting.policy])
    if setting.static_cp_size is not None:
        flags.append(f"--context-parallel-size {setting.static_cp_size}")
    if setting.max_cp_size is not None:
        flags.append(f"--max-dynamic-cp-size {setting.max_cp_size}")
    flags += [
        f"--max-seqlen-per-dp-cp-rank {setting.max_tokens_per_rank}",
        f"--cp-comm-type {setting.cp_comm_type}",
        f"--dynamic-cp-hardware {shlex.quote(hardware_name)}",
    ]
    return (*flags, f"--dynamic-cp-search {search}") if search != "fast" else tuple(flags)


def _lengths(max_seqlen: int, global_batch_size: int) -> tuple[str, ...]:
    return f"--seq-length {max_seqlen}", f"--global-batch-size {global_batch_size}", "--bf16"


def _recompute(setting: Setting) -> tuple[str, ...]:
    if setting.recompute == "full":
        return "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"
    return ("--recompute-granularity selective",) if setting.recompute == "selective" else ()


def _shape(model: ModelShape, architecture: Architecture, tp_size: int) -> tuple[str, ...]:
    flags = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.num_attention_heads}",
    ]
    if model.num_query_groups != model.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.num_query_groups}"]
    if model.kv_lora_rank:
        flags += ["--multi-latent-attention", f"--kv-lora-rank {model.kv_lora_rank}"]
        flags += [f"--q-lora-rank {model.q_lora_rank}"] * (model.q_lora_rank > 0)
        flags += [f"--qk-head-dim {model.qk_head_dim}", f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}"]
        flags.append(f"--v-head-dim {model.v_head_dim}")
    else:
        flags.append(f"--kv-channels {model.kv_channels}")
    if architecture.quick_geglu:
        flags += ["--quick-geglu", f"--glu-linear-offset {architecture.glu_linear_offset}"]
        clamp = architecture.activation_func_clamp_value
        flags += [f"--activation-func-clamp-value {clamp}"] * (clamp > 0)
    elif model.gated_linear_unit:
        flags.append("--swiglu")
    if model.attention_output_gate:
        flags.append("--attention-output-gate")
    if model.window is not None:
        flags.append(f"--window-size {model.window_tokens - 1},0")
        skip = model.window_attn_skip_freq
        if skip:
            text = str(list(skip)).replace(" ", "") if isinstance(skip, tuple) else str(skip)
            flags.append(f"--window-attn-skip-freq {shlex.quote(text)}")
        if model.window_sink_tokens:
            flags.append(f"--window-sink-tokens {model.window_sink_tokens}")
    flags += _experts(model.experts) if model.experts is not None else ()
    if model.mtp_num_layers:
        flags.append(f"--mtp-num-layers {model.mtp_num_layers}")
    if not model.share_embeddings_and_output_weights:
        flags.append("--untie-embeddings-and-output-weights")
    flags.append(f"--vocab-size {model.vocab_size}")
    if model.vocab_size % lcm(_VOCAB_MULTIPLE, tp_size):
        flags.append("--make-vocab-size-divisible-by 1")
    return tuple(flags)


def _experts(experts: Experts) -> tuple[str, ...]:
    flags = [
        f"--num-experts {experts.num_experts}",
        f"--moe-router-topk {experts.topk}",
        f"--moe-ffn-hidden-size {experts.ffn_hidden_size}",
    ]
    if experts.shared_ffn_hidden_size:
        flags.append(f"--moe-shared-expert-intermediate-size {experts.shared_ffn_hidden_size}")
        flags += ["--moe-shared-expert-gate"] * experts.shared_gate
    if experts.layer_freq != 1:
        freq = experts.layer_freq
        text = str(list(freq)).replace(" ", "") if isinstance(freq, tuple) else str(freq)
        flags.append(f"--moe-layer-freq {shlex.quote(text)}")
    return tuple(flags)


def _architecture(model: ModelShape, architecture: Architecture, max_seqlen: int) -> tuple[str, ...]:
    return (
        f"--normalization {architecture.normalization}",
        f"--norm-epsilon {architecture.norm_epsilon}",
        *_positions(architecture, max_seqlen, latent=model.kv_lora_rank > 0),
        *["--disable-bias-linear"] * (not architecture.add_bias_linear),
        *["--add-qkv-bias"] * architecture.add_qkv_bias,
        *["--qk-layernorm"] * architecture.qk_layernorm,
        *[f"--softmax-type {architecture.softmax_type}"] * (architecture.softmax_type != "vanilla"),
        *(_routing(architecture) if model.experts is not None else ()),
        f"--init-method-std {architecture.init_method_std}",
    )


def _positions(architecture: Architecture, max_seqlen: int, *, latent: bool) -> tuple[str, ...]:
    kind = architecture.position_embedding_type
    is_yarn = kind == "yarn"
    flags = [
        # Latent attention has RoPE and YaRN of its own, which follow from the flags of YaRN.
        f"--position-embedding-type {'rope' if is_yarn and latent else kind}",
        # What the weights were made for is no limit of RoPE, so a run may have longer samples.
        f"--max-position-embeddings {max(architecture.max_position_embeddings, max_seqlen)}",
    ]
    if kind in ("rope", "yarn"):
        flags.append(f"--rotary-base {architecture.rotary_base}")
    if kind == "rope" and architecture.rotary_percent != 1:
        flags.append(f"--rotary-percent {architecture.rotary_percent}")
    if architecture.use_rope_scaling:
        flags += ["--use-rope-scaling", f"--rope-scaling-factor {architecture.rope_scaling_factor}"]
    if is_yarn:
        flags += [
            f"--rotary-scaling-factor {architecture.rotary_scaling_factor}",
            f"--yarn-original-max-position-embeddings {architecture.yarn_original_max_position_embeddings}",
            f"--yarn-beta-fast {architecture.yarn_beta_fast}",
            f"--yarn-beta-slow {architecture.yarn_beta_slow}",
            f"--mscale {architecture.mscale}",
            f"--mscale-all-dim {architecture.mscale_all_dim}",
        ]
        flags += ["--no-yarn-correction-range-round-to-int"] * (not architecture.yarn_correction_range_round_to_int)
    return tuple(flags)


def _routing(architecture: Architecture) -> tuple[str, ...]:
    flags = []
    if architecture.router_score_function != "softmax":
        flags.append(f"--moe-router-score-function {architecture.router_score_function}")
    flags += ["--moe-router-pre-softmax"] * architecture.router_pre_softmax
    if architecture.router_num_groups:
        flags += [
            f"--moe-router-num-groups {architecture.router_num_groups}",
            f"--moe-router-group-topk {architecture.router_group_topk}",
        ]
    if architecture.router_scaling_factor != 1:
        flags.append(f"--moe-router-topk-scaling-factor {architecture.router_scaling_factor}")
    flags += ["--moe-router-enable-expert-bias"] * architecture.router_expert_bias
    return tuple(flags)
