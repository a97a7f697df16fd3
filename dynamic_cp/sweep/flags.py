"""Flags of pretrain_gpt.py for a setting."""

from __future__ import annotations

import shlex

from dynamic_cp.sweep.space import Setting
from dynamic_cp.types import ModelShape


def launch_flags(
    setting: Setting,
    *,
    model: ModelShape,
    hardware_name: str,
    max_seqlen: int,
    global_batch_size: int,
    policy: str = "dynamic",
    search: str = "fast",
    distributed_optimizer: bool = True,
) -> tuple[tuple[str, ...], ...]:
    """Return the flags, each with its value if it has one, in groups of one line: parallelism, dynamic CP, model.

    What is not here is the user's: data, tokenizer, learning rate, length of the run, and what of a model has no cost
    (--rotary-base, --qk-layernorm, --add-qkv-bias). A gated model is taken as Llama-like: RMSNorm, RoPE and no biases.
    """
    return (
        _parallelism(setting, distributed_optimizer),
        _dynamic_cp(setting, hardware_name, policy, search),
        _lengths(max_seqlen, global_batch_size),
        _recompute(setting),
        _shape(model),
    )


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
    if topology.vp_size > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {topology.vp_size}")
    if topology.sequence_parallel:
        flags.append("--sequence-parallel")
    return (*flags, "--use-distributed-optimizer") if distributed_optimizer else tuple(flags)


def _dynamic_cp(setting: Setting, hardware_name: str, policy: str, search: str) -> tuple[str, ...]:
    flags = ["--dynamic-cp"] if policy == "dynamic" else ["--static-cp-policy balanced"] if policy == "balanced" else []
    if setting.static_cp_size is not None:
        flags.append(f"--context-parallel-size {setting.static_cp_size}")
    flags += [
        f"--max-seqlen-per-dp-cp-rank {setting.max_tokens_per_rank}",
        f"--cp-comm-type {'auto' if len(setting.cp_comm_types) > 1 else setting.cp_comm_types[0]}",
        f"--dynamic-cp-hardware {shlex.quote(hardware_name)}",
    ]
    return (*flags, f"--dynamic-cp-search {search}") if search != "fast" else tuple(flags)


def _lengths(max_seqlen: int, global_batch_size: int) -> tuple[str, ...]:
    return f"--seq-length {max_seqlen}", f"--global-batch-size {global_batch_size}", "--bf16"


def _recompute(setting: Setting) -> tuple[str, ...]:
    if setting.recompute == "full":
        return "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"
    return ("--recompute-granularity selective",) if setting.recompute == "selective" else ()


def _shape(model: ModelShape) -> tuple[str, ...]:
    flags = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.num_attention_heads}",
    ]
    if model.num_query_groups != model.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.num_query_groups}"]
    flags.append(f"--kv-channels {model.kv_channels}")
    if model.gated_linear_unit:
        flags += ["--swiglu", "--normalization RMSNorm", "--disable-bias-linear", "--position-embedding-type rope"]
    if not model.share_embeddings_and_output_weights:
        flags.append("--untie-embeddings-and-output-weights")
    return tuple(flags)
