"""Attention of a packed micro-batch by the mechanism that its plan chose; torch alone, without megatron-core.

Shapes: T local tokens, H heads, D channels of a head, C channels of a latent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import serving_windows
from dynamic_cp.types import BY_PLACEMENT, CpCommType, Lambda, is_placed
from megatron.dynamic_cp.attention.kernels.choice import Kernel, kernel_for
from megatron.dynamic_cp.attention.mechanisms.collectives import AllGather, HeadsAroundRing
from megatron.dynamic_cp.attention.mechanisms.executor import Executor
from megatron.dynamic_cp.attention.mechanisms.ring import LatentRing, LatentWidths, Ring, UpProjection
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.measuring import attention_backward
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

EXECUTORS: dict[CpCommType, type[Executor] | None] = {
    "p2p": Ring,
    "all_gather": AllGather,
    "a2a": HeadsAroundRing,
    "a2a+p2p": HeadsAroundRing,
    "latent": LatentRing,
    BY_PLACEMENT: None,
}
"""None: loaded only by ranks whose plans have it, see `executor_class`."""


def attention_thd(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    params: DynamicPackedSeqParams,
    softmax_scale: float,
    backend: str = "auto",
    softmax_offset_H: Tensor | None = None,
) -> Tensor:
    """Return attention inside each packed sequence, [T, heads, dim], over the CP group of the micro-batch.

    The mask of its sample, or else `params.mask` (causal, full or a window), says which keys a token sees; nobody sees
    padding. One lane is a ring of one with any exchange.

    Args:
        q_THD: local shard [T, heads, dim]; k_THD, v_THD: [T, kv_heads, dim], kv_heads divides heads. Values may be
            narrower: a ring or a gathering sends them so; kernels get them, and return the output, padded.
        backend: one of `kernels.choice.BACKENDS`.
        softmax_offset_H: [heads], a score of each head that every token also sees, with a value of 0 (a learned sink).

    Raises UnsupportedFeatureError: no kernel for these tensors, or see `executor_of`."""
    kernel = kernel_for(q_THD, backend)
    out: Tensor = Attention.apply(q_THD, k_THD, v_THD, params, softmax_scale, kernel, softmax_offset_H)
    return out


def attention_from_latents(
    q_THD: Tensor,
    latent_TC: Tensor,
    rotated_TC: Tensor,
    weight: Tensor,
    widths: LatentWidths,
    params: DynamicPackedSeqParams,
    softmax_scale: float,
    backend: str = "auto",
) -> Tensor:
    """Return `attention_thd`, [T, heads, value width], where latents travel instead of keys and values.

    Args:
        q_THD: local shard [T, heads, key width].
        latent_TC, rotated_TC: local shards of normalized latents [T, latent], and of the key that heads share [T,
            rotated].
        weight: projects latents up to keys without rotation and values, [heads * (content + value), latent].

    Raises UnsupportedFeatureError: no kernel for these tensors."""
    kernel = kernel_for(q_THD, backend)
    out: Tensor = _FromLatents.apply(q_THD, latent_TC, rotated_TC, weight, widths, params, softmax_scale, kernel)
    return out[..., : widths.value]


def executor_of(params: DynamicPackedSeqParams, query_heads: int, kv_heads: int, device: torch.device) -> Executor:
    """Return the executor for a micro-batch's CP group; heads are those of a tensor-parallel rank. Raises
    UnsupportedFeatureError: the exchange is not built here, does not serve windows, or cannot share out these heads."""
    assert params.cp_group is not None
    make = Ring if params.cp_group.size() == 1 else executor_class(params)
    if make is None:
        raise UnsupportedFeatureError(
            f"the plan asks for {params.cp_comm_type} at {params.label}, the torch attention "
            f"has {', '.join(EXECUTORS)}: plan with one of those (--cp-comm-type)"
        )
    if isinstance(params.mask, Lambda) and params.cp_group.size() > 1 and not serving_windows([params.cp_comm_type]):
        raise UnsupportedFeatureError(
            f"the plan asks for {params.cp_comm_type} at {params.label}, which does not serve layers with a window: "
            f"plan with {' or '.join(serving_windows())} (--cp-comm-type)"
        )
    return make(params, query_heads, kv_heads, device)


def executor_class(params: DynamicPackedSeqParams) -> type[Executor] | None:
    """Return the executor for the exchange of a micro-batch; None: there is none here."""
    if is_placed(params.cp_comm_type):
        from megatron.dynamic_cp.attention.mechanisms.blocks import Blocks, HeadsAroundBlocks

        return Blocks if params.heads_group is None else HeadsAroundBlocks
    return EXECUTORS.get(params.cp_comm_type)


class Attention(torch.autograd.Function):
    """The forward and backward pass that all executors share; see `attention_thd`."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        params: DynamicPackedSeqParams,
        scale: float,
        kernel: Kernel,
        offset_H: Tensor | None = None,
    ) -> Tensor:
        executor = executor_of(params, q_THD.shape[1], k_THD.shape[1], q_THD.device)
        missing = k_THD.shape[-1] - v_THD.shape[-1]
        if missing and not executor.takes_narrow_values:
            v_THD = torch.nn.functional.pad(v_THD, (0, missing))
        ctx.value_width = k_THD.shape[-1] - missing
        query, kv = executor.enter(q_THD, k_THD, v_THD)
        sums = RowSums(query, kernel, scale)
        executor.attend(sums, kv)
        if offset_H is not None:
            sums.add_offset(offset_H[executor.heads])
        out = sums.out_THD.to(query.dtype)
        ctx.save_for_backward(query, kv, out, sums.lse_HT, offset_H)
        ctx.executor, ctx.params, ctx.scale, ctx.kernel = executor, params, scale, kernel
        return executor.leave(out)

    @staticmethod
    @attention_backward
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query, kv, out, lse_HT, offset_H = ctx.saved_tensors
        executor: Executor = ctx.executor
        rows = RowGradients(executor.enter_gradient(grad_THD), query, out, lse_HT, ctx.kernel, ctx.scale)
        grad_kv = executor.attend_backward(rows, kv)
        grad_offset_H = None
        if offset_H is not None:
            grad_offset_H = torch.zeros_like(offset_H)
            grad_offset_H[executor.heads] = rows.offset_gradient(offset_H[executor.heads]).to(offset_H.dtype)
        grad_q, grad_k, grad_v = executor.leave_gradients(rows.grad_q_THD.to(query.dtype), grad_kv)
        return grad_q, grad_k, grad_v[..., : ctx.value_width], None, None, None, grad_offset_H


class _FromLatents(torch.autograd.Function):
    """The forward and backward pass of `attention_from_latents`, with values padded to the width of keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        latent_TC: Tensor,
        rotated_TC: Tensor,
        weight: Tensor,
        widths: LatentWidths,
        params: DynamicPackedSeqParams,
        scale: float,
        kernel: Kernel,
    ) -> Tensor:
        latents_TC = torch.cat((latent_TC, rotated_TC), dim=-1)
        sums = RowSums(q_THD, kernel, scale)
        _latent_ring(params, q_THD, weight, widths).attend(sums, latents_TC)
        out = sums.out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, latents_TC, weight, out, sums.lse_HT)
        ctx.widths, ctx.params, ctx.scale, ctx.kernel = widths, params, scale, kernel
        return out

    @staticmethod
    @attention_backward
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query, latents_TC, weight, out, lse_HT = ctx.saved_tensors
        ring = _latent_ring(ctx.params, query, weight, ctx.widths)
        rows = RowGradients(grad_THD, query, out, lse_HT, ctx.kernel, ctx.scale)
        grad_TC = ring.attend_backward(rows, latents_TC)
        # Contiguous, because megatron-core sums a gradient over TP ranks in place, and loses the sum of one with gaps.
        grad_latent, grad_rotated = (one.contiguous() for one in grad_TC.split(ctx.widths.sent(weight), dim=-1))
        if hasattr(weight, "grad_added_to_main_grad"):
            # A micro-batch on one lane may have added its gradient to main_grad and set this for good; this one has
            # not.
            weight.grad_added_to_main_grad = False
        assert ring.up.grad_weight is not None
        grad_weight = ring.up.grad_weight.to(weight.dtype)
        return rows.grad_q_THD.to(query.dtype), grad_latent, grad_rotated, grad_weight, None, None, None, None


def _latent_ring(params: DynamicPackedSeqParams, query: Tensor, weight: Tensor, widths: LatentWidths) -> LatentRing:
    ring = LatentRing(params, query.shape[1], query.shape[1], query.device)
    ring.up = UpProjection(weight, widths)
    return ring
