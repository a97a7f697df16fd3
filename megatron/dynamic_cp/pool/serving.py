"""Attention of other ranks' tokens, by a rank that brings none of its own: a stage without a micro-batch in a tick.

Shapes: T local tokens, of which there are none, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.dynamic_cp.attention.kernels.choice import kernel_for
from megatron.dynamic_cp.attention.mechanisms.blocks import Fetched, ForwardPass
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.thd import executor_of
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.pool.layer_pass import LayerPass
from megatron.dynamic_cp.pool.nano_batches import NanoBatches


@torch.no_grad()
def serve(layer: TorchTHDAttention, params: DynamicPackedSeqParams, *, backward: bool) -> None:
    """Compute the tiles that the programme of `params` gives this rank in one direction of one layer. The members of
    the group that bring tokens run the same meanwhile."""
    config = layer.config
    tp_size = config.tensor_model_parallel_size
    query_heads, kv_heads = config.num_attention_heads // tp_size, max(1, config.num_query_groups // tp_size)
    query, key = (
        torch.empty(0, heads, config.kv_channels, dtype=config.params_dtype, device=params.positions.device)
        for heads in (query_heads, kv_heads)
    )
    kernel = kernel_for(query, layer.backend)
    executor = executor_of(params, query_heads, kv_heads, query.device)
    query, kv = executor.enter(query, key, key)
    if backward:
        lse_HT = torch.empty(query_heads, 0, device=query.device)
        executor.attend_backward(RowGradients(query, query, query, lse_HT, kernel, layer.softmax_scale), kv)
    else:
        executor.attend(RowSums(query, kernel, layer.softmax_scale), kv)


@torch.no_grad()
def serve_nano_batches(layers: Sequence[TorchTHDAttention], nano_batches: NanoBatches) -> None:
    """Take all steps of a tick whose layers run in two nano-batches, as the members that bring tokens do meanwhile.
    `layers` are the attention of each layer of the stage; `nano_batches` has no tokens."""
    running: dict[tuple[int, bool], LayerPass] = {}
    has_gradients = any(step.is_backward for step in nano_batches.step_order.steps)
    kept: dict[int, Fetched] = {}
    for step in nano_batches.step_order.steps:
        key = step.layer, step.is_backward
        if key not in running:
            running[key] = nano_batches.direction(
                layers[step.layer], step.layer, is_backward=step.is_backward, kept=kept.pop(step.layer, None)
            )
        running[key].run(step.what, step.slot)
        if step.what == "wait" and step.slot == 1:
            done = running.pop(key).one
            if has_gradients and isinstance(done, ForwardPass):  # computed again: its gradient comes in this tick
                kept[step.layer] = done.kept
    nano_batches.step_order.finish()
