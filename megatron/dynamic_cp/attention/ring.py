"""Causal ring attention over a pack (P2P): keys and values travel round the CP group, compute hides the travel.

Rank r starts with its own KV (a causal square over its two chunks). The KV of rank j then meets the queries of r:
j < r: all queries see the first of j's two chunks; j > r: the second half of the queries sees both. So each step is
half a square for everybody, cp steps in all. Backward turns the ring again; the gradient of a rank's KV starts at
its successor, collects one share per stop and reaches its owner on the last shift.

Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag split as in Megatron-Core and TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.exchange import RingShift
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums, attend
from megatron.dynamic_cp.attention.tiles import Tile
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


def ring_tiles(local_seqlens: tuple[int, ...], cp_rank: int, kv_rank: int) -> list[Tile]:
    """Return the rectangles that rank `cp_rank` computes when it holds the KV of rank `kv_rank`.

    Args:
        local_seqlens: local tokens of each sequence of the pack (even when the group has more than one lane).
    """
    tiles = []
    start = 0
    for seqlen in local_seqlens:
        stop, middle = start + seqlen, start + seqlen // 2
        if kv_rank == cp_rank:
            tiles.append(Tile(slice(start, stop), slice(start, stop), True))
        elif kv_rank < cp_rank:
            tiles.append(Tile(slice(start, stop), slice(start, middle), False))
        else:
            tiles.append(Tile(slice(middle, stop), slice(start, stop), False))
        start = stop
    return tiles


class RingAttention(torch.autograd.Function):
    """out_THD = causal attention of each sequence over the whole CP group; q, k, v are local zigzag shards."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, params: DynamicPackedSeqParams, scale: float
    ) -> Tensor:
        cp_size, cp_rank = params.cp_group.size(), params.cp_group.rank()
        local_seqlens = tuple(seqlen // cp_size for seqlen in params.padded_seqlens)
        own_kv = kv_2THD = torch.stack((k_THD, v_THD))
        sums = RowSums(q_THD)
        for step in range(cp_size):
            shift = RingShift(kv_2THD, params) if step < cp_size - 1 else None
            attend(ring_tiles(local_seqlens, cp_rank, (cp_rank - step) % cp_size), sums, q_THD, kv_2THD, scale)
            if shift is not None:
                kv_2THD = shift.wait()
        out_THD = sums.out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, own_kv, out_THD, sums.lse_TH)
        ctx.params, ctx.scale, ctx.local_seqlens = params, scale, local_seqlens
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, kv_2THD, out_THD, lse_TH = ctx.saved_tensors
        params: DynamicPackedSeqParams = ctx.params
        cp_size, cp_rank = params.cp_group.size(), params.cp_group.rank()
        rows = RowGradients(grad_THD, q_THD, out_THD, lse_TH, ctx.scale)
        own_grad: Tensor | None = None
        collected: RingShift | None = None
        for step in range(cp_size):
            shift = RingShift(kv_2THD, params) if step < cp_size - 1 else None
            grad_kv = rows.attend(ring_tiles(ctx.local_seqlens, cp_rank, (cp_rank - step) % cp_size), kv_2THD)
            if own_grad is None:
                own_grad = grad_kv
            else:
                if collected is not None:
                    grad_kv += collected.wait()
                collected = RingShift(grad_kv, params)
            if shift is not None:
                kv_2THD = shift.wait()
        assert own_grad is not None
        if collected is not None:
            own_grad += collected.wait()
        return rows.grad_q_THD.to(q_THD.dtype), own_grad[0], own_grad[1], None, None
