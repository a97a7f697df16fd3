"""Causal ring attention over a pack (P2P): keys and values travel round the ring's lanes, compute hides the travel.

The ring is the whole CP group (p2p), the outer lanes (a2a+p2p, where `heads` went before) or this lane alone (a2a).

Rank r starts with its own KV (a causal square over its two chunks). The KV of rank j then meets the queries of r:
j < r: all queries see the first of j's two chunks; j > r: the second half of the queries sees both. So each step is
half a square for everybody, as many steps as lanes. Backward turns the ring again; the gradient of a rank's KV starts
at its successor, collects one share per stop and reaches its owner on the last shift.

Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag split as in Megatron-Core and TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.exchange import RingShift
from megatron.dynamic_cp.attention.kernels import Kernel, kernel_for
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import ring_pack
from megatron.dynamic_cp.nvtx import attention_backward, span
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


def _start_shift(tensor: Tensor, params: DynamicPackedSeqParams, into: Tensor | None) -> RingShift:
    assert params.ring_group is not None
    return RingShift(tensor, params.ring_group, params, into)


def ring_forward(
    q_THD: Tensor, kv_2THD: Tensor, params: DynamicPackedSeqParams, scale: float, kernel: Kernel
) -> RowSums:
    """Return the sums over all keys of the ring; q and kv lie zigzag on its lanes."""
    size, rank = params.ring_size, params.ring_rank
    sums = RowSums(q_THD, kernel, scale)
    spare: Tensor | None = None
    for step in range(size):
        with span("ring step %d of %d", step + 1, size):
            shift = _start_shift(kv_2THD, params, spare) if step < size - 1 else None
            sums.attend(ring_pack(params, (rank - step) % size, q_THD.device), kv_2THD)
            if shift is not None:
                spare = kv_2THD if step else None  # not the lane's own: backward needs it
                kv_2THD = shift.wait()
    return sums


def ring_backward(rows: RowGradients, kv_2THD: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    """Return the gradient of this rank's kv_2THD and add to `rows.grad_q_THD`.

    The lanes' shares of it are added up in the model's dtype, as in TransformerEngine's ring.
    """
    size, rank = params.ring_size, params.ring_rank
    own_grad: Tensor | None = None
    collected: RingShift | None = None
    spare: Tensor | None = None
    spare_grad: Tensor | None = None
    for step in range(size):
        with span("ring step %d of %d, backward", step + 1, size):
            shift = _start_shift(kv_2THD, params, spare) if step < size - 1 else None
            grad_kv = rows.attend(ring_pack(params, (rank - step) % size, kv_2THD.device), kv_2THD)
            if own_grad is None:
                own_grad = grad_kv
            else:
                if collected is not None:
                    spare_grad = collected.wait()
                    grad_kv += spare_grad
                collected = _start_shift(grad_kv, params, spare_grad)
            if shift is not None:
                spare = kv_2THD if step else None
                kv_2THD = shift.wait()
    assert own_grad is not None
    if collected is not None:
        own_grad += collected.wait()
    return own_grad


class RingAttention(torch.autograd.Function):
    """out_THD = causal attention of each sequence over the whole CP group; q, k, v are local zigzag shards."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        params: DynamicPackedSeqParams,
        scale: float,
        kernel: Kernel | None = None,
    ) -> Tensor:
        kernel = kernel or kernel_for(q_THD)
        kv_2THD = torch.stack((k_THD, v_THD))
        sums = ring_forward(q_THD, kv_2THD, params, scale, kernel)
        out_THD = sums.out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, kv_2THD, out_THD, sums.lse_HT)
        ctx.params, ctx.scale, ctx.kernel = params, scale, kernel
        return out_THD

    @staticmethod
    @attention_backward
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, kv_2THD, out_THD, lse_HT = ctx.saved_tensors
        rows = RowGradients(grad_THD, q_THD, out_THD, lse_HT, ctx.kernel, ctx.scale)
        grad_2THD = ring_backward(rows, kv_2THD, ctx.params)
        return rows.grad_q_THD.to(q_THD.dtype), grad_2THD[0], grad_2THD[1], None, None, None
