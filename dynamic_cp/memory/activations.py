"""Bytes of activations per token: what a layer keeps for backward, and what one micro-batch needs while it runs.

Counting of one layer, b bytes an element, flash attention, no dropout (Korthikanti et al. 2022, arXiv 2205.05198,
section 4, whose 34 * hidden_size bytes hold 2 for dropout masks and 4 for two norm inputs; grouped KV heads and gated
MLPs counted by their true widths):

    the inputs of both norms (the residual, which may be in fp32), of the
    QKV and of the first MLP matrix                                         4 * hidden_size * b, not split by TP alone
    queries, keys, values; the attention's output                           (2 * query + 2 * kv) / TP * b
    inputs and output of the activation function (2 or 3 inner widths)      2 or 3 * ffn / TP * b
    the attention's log-sum-exp in fp32                                     4 * heads / TP
    where attention has a gate: its sigmoid in fp32, and the product        gate / TP * (4 + b)
    where it has experts: shared ones in the place of the MLP, and of each
    copy of a token that the rank's experts compute, it and their MLP's     (hidden + 2 or 3 * ffn of one expert) * b
    latent attention: latents before and after their norms, the rotated key (2 * (q + kv) + rope) * b, not split by TP
        alone; queries, keys, values and output all of the width of keys, to which kernels pad the values
    linear attention in the place of attention: what is convolved before and after that, the
        gate z, what heads find and that normed; and what kernels get besides: of a gated
        delta net matrices of chunks of 64 tokens, of Mamba-2   (2 * convolved + 3 * value) / TP * b
        values times steps, and keys and queries of each head   (64, or value + 2 * key width) * heads / TP * b
    a module of multi-token prediction: embedding, norms, projected         6 * hidden_size * b, not split by TP alone

Linear attention whose lanes pass on states keeps for each sample the states before and behind a lane's two chunks, and
the matrices that compose them, in float32.

In FP8 a layer keeps what its products take at a byte: the inputs of the QKV and of the MLP's matrices. Of the
attention's output it keeps a copy besides.

A rank computes topk / TP copies of each token of a lane, on average over its EP block, times their imbalance.

Sequence parallelism also splits the first line. Full recomputation keeps only the input of each layer, or of each unit
of layers, and needs such a unit in full while it runs backward. Where it leaves out layers of a chunk, these keep all,
and are done with when the first layer is computed again. Selective recomputation of the attention drops the
log-sum-exp, or of linear attention what was convolved, what kernels get besides and the states, of the MLP of dense
layers the inputs and output of its activation function, of experts what they keep or that output alone, of the norms
what these have put out (half of the first line), of latents the queries, keys and values projected up from them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.types import Layer, LinearAttention, ModelShape, PlanOptions, Topology
from dynamic_cp.types.linear_attention import CHUNK_TOKENS, CHUNKS_PER_LANE, GATE_BYTES

_FP32_BYTES = 4
_COPIES_OF_GATES = 4
"""Of a gate, its SiLU, their product with what heads find, and the norm's input."""


class ActivationBytes(NamedTuple):
    """Bytes per token of a rank, except `ring_per_bucket_token`.

    Attributes:
        per_layer: kept from forward to backward by every layer of a chunk, on average.
        working: held by the layer that runs: gradients of its MLP, or what a gate is computed of again; with full
            recomputation all of its activations.
        head: final norm, logits, their fp32 softmax and gradient, of each head; where losses are computed over chunks
            of tokens, the norm alone (`chunk_bytes` has the rest).
        hops: activations and gradients that are sent and received, with pipelining.
        ring_per_bucket_token: keys and values of the whole bucket, which the ring and all-gather keep for one layer,
            per token of the bucket.
        a2a_queries: queries and outputs in their other layout, per token of a rank; keys and values come on top.
        latents: what keys and values of a token are projected up from; 0 without latent attention.
        linear_heads: what is convolved and what heads find in their other layout, per token of a rank; 0 without linear
            attention.
        states_per_layer, states_working: per sample of a rank whose buckets pass on states: kept by every layer of a
            chunk with linear attention, and held by the layer that runs.
        routed_per_layer, routed_working: kept by experts, and held while they run (copies sent and received, with
            recomputation all that they keep): per token of the mean lane of the EP block.
    """

    per_layer: float
    working: float
    head: float
    hops: float
    ring_per_bucket_token: float
    a2a_queries: float
    routed_per_layer: float = 0.0
    routed_working: float = 0.0
    latents: float = 0.0
    linear_heads: float = 0.0
    states_per_layer: float = 0.0
    states_working: float = 0.0


class _LinearBytes(NamedTuple):
    """Bytes of linear attention: per token what it keeps, what `core_attn` and `gdn_norm_out` drop of it, what travels
    by heads and what backward holds while it computes the gate and the norm again in float32; and per sample states.
    """

    kept: float = 0.0
    dropped: float = 0.0
    normed: float = 0.0
    heads: float = 0.0
    states: float = 0.0
    again: float = 0.0


def _linear_bytes(linear: LinearAttention | None, element: int, tp_size: int) -> _LinearBytes:
    if linear is None:
        return _LinearBytes()
    convolved, value = linear.convolved_channels * element, linear.value_channels * element
    gates = GATE_BYTES * linear.gate_channels
    of_head = CHUNK_TOKENS if linear.has_delta_rule else linear.value_size + 2 * linear.key_size
    dropped = (convolved if linear.has_delta_rule else value) + of_head * linear.num_heads * element
    states = CHUNKS_PER_LANE * (linear.state_bytes + linear.summary_bytes)
    again = _COPIES_OF_GATES * _FP32_BYTES * linear.value_channels
    each = convolved + 3 * value + gates + dropped, dropped, value, convolved + gates + value, states, again
    return _LinearBytes(*(one / tp_size for one in each))


def activation_bytes(
    model: ModelShape,
    topology: Topology,
    options: PlanOptions,
    layer: Layer | None = None,
    recomputed_share: float = 1.0,
) -> ActivationBytes:
    """Return the bytes per token of `model`, in a layer of one kind (None: of the one that it has).

    Args:
        recomputed_share: of the layers of a chunk, which full recomputation computes again.

    Limits: a TransformerEngine that keeps the partial outputs of all ring steps needs more; cross-attention of a DiT is
    not counted.
    """
    layer = layer or model.layer
    element, tp_size = options.element_bytes.activation, topology.tp_size
    product = 1 if options.fp8 else element  # bytes of what a product takes
    hidden = model.hidden_size * product / topology.sequence_shares  # TP splits it only with sequence parallelism
    residual = model.hidden_size * options.element_bytes.residual / topology.sequence_shares
    query = layer.query_size * element / tp_size
    # With fewer KV heads than TP ranks every rank keeps a whole head.
    keys_and_values = 2 * max(layer.kv_size / tp_size, layer.kv_channels) * element
    widths = 3 if model.gated_linear_unit else 2  # of which one is what a product takes
    inner = element - (element - product) / widths
    mlp = layer.mlp_kept_channels * inner / tp_size
    routed = model.imbalance(topology.ep_size) * element / tp_size
    log_sum_exp = _FP32_BYTES * layer.num_attention_heads / tp_size
    linear = _linear_bytes(layer.linear_attention, element, tp_size)
    split = (layer.gate_size * (_FP32_BYTES + element) + layer.query_size * options.fp8) / tp_size
    split += 2 * query + keys_and_values + log_sum_exp + mlp + linear.kept
    whole = split + layer.halves * (residual + hidden) + layer.more_kept_channels * element / topology.sequence_shares
    dropped = {
        "core_attn": log_sum_exp + linear.dropped,
        "layernorm": layer.halves * hidden,
        "gdn_norm_out": linear.normed,
        "mla_up_proj": (query + keys_and_values) * (layer.latent_size > 0),
        "moe" if layer.num_experts else "mlp": mlp,
    }
    is_full, repeated = options.recompute == "full", options.repeated
    of_experts = layer.routed_kept_channels - layer.routed_channels
    inner -= product / widths * (not is_full and "moe_act" in repeated)
    routed_kept = routed / element * (product * layer.routed_channels + inner * of_experts)
    unit = options.recompute_layers.num_layers if options.recomputes_all else 1
    logits = (2 * element + _FP32_BYTES) * model.vocab_size / tp_size
    others = 1.0 - recomputed_share  # keep all that they compute
    inputs = recomputed_share * residual / unit
    kept = others * whole + inputs if is_full else whole - sum(dropped.get(name, 0.0) for name in sorted(repeated))
    # The layer that runs has what it computes again; a log-sum-exp is lost in the rounding of all this.
    small = frozenset() if linear.kept else {"core_attn"}
    again = unit * whole if is_full else sum(dropped.get(name, 0.0) for name in sorted(repeated - small))
    routed_again = unit * routed_kept if "moe" in repeated else 0.0
    routed_kept *= others if "moe" in repeated else 1.0
    if others:  # by then at least one whole layer is done with
        again = routed_again = 0.0
    keeps_states = others if is_full else float("core_attn" not in repeated)
    return ActivationBytes(
        per_layer=kept,
        working=max(mlp, linear.again) + 2 * residual + again,
        head=model.num_heads * (residual + hidden + (0.0 if options.loss_chunk_tokens else logits)),
        hops=4 * residual if topology.pp_size > 1 else 0.0,
        ring_per_bucket_token=keys_and_values,
        a2a_queries=2 * query,
        routed_per_layer=routed_kept,
        # Copies before and after the exchange, there and back.
        routed_working=2 * routed * layer.routed_channels + routed_again,
        latents=layer.latent_size * element,
        linear_heads=linear.heads,
        states_per_layer=keeps_states * linear.states,
        states_working=0.0 if keeps_states else linear.states,
    )


@lru_cache(maxsize=64)
def tokens_of_states(model: ModelShape, topology: Topology, options: PlanOptions) -> float:
    """Return the number of tokens of a rank that take as much memory as the states which a sample passes on.

    0 without linear attention. All stages have as many layers of each kind, so one number holds for all.
    """
    (stage,) = model.stages(1)
    kinds = {layer: activation_bytes(model, topology, options, layer) for _, layer in stage.layers}
    kept = stage.sum(lambda layer: kinds[layer].per_layer)
    states = stage.sum(lambda layer: kinds[layer].states_per_layer)
    running = (one.states_working / one.working for one in kinds.values() if one.states_working)
    return max(states / kept, *running, 0.0)


def chunk_bytes(model: ModelShape, topology: Topology, options: PlanOptions, tokens: Floats) -> Floats:
    """Return the bytes of the logits of a chunk where lanes hold so many tokens, 0 where losses are not in chunks.

    First logits, their fp32 softmax and gradient; then that gradient beside the one of the head's weights.
    """
    element, shares = options.element_bytes.activation, model.vocab_size / topology.tp_size
    chunk = np.minimum(tokens, options.loss_chunk_tokens)
    found = np.maximum((2 * element + _FP32_BYTES) * chunk, element * (chunk + model.hidden_size)) * shares
    return np.where(chunk > 0, found, 0.0)
