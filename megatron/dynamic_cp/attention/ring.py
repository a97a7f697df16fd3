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
from megatron.dynamic_cp.attention.merge import RowAccumulator
from megatron.dynamic_cp.attention.tiles import Tile, tile_backward, tile_forward
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
        rows_sum = RowAccumulator(q_THD)
        key_value = (k_THD, v_THD)
        for step in range(cp_size):
            shift = RingShift(key_value, params) if step < cp_size - 1 else None
            for tile in ring_tiles(local_seqlens, cp_rank, (cp_rank - step) % cp_size):
                key, value = (x[tile.columns] for x in key_value)
                out, lse = tile_forward(q_THD[tile.rows], key, value, causal=tile.causal, scale=scale)
                rows_sum.add(tile.rows, out, lse)
            if shift is not None:
                key_value = tuple(shift.wait())
        out_THD = rows_sum.out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, rows_sum.lse_TH)
        ctx.params, ctx.scale, ctx.local_seqlens = params, scale, local_seqlens
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD, lse_TH = ctx.saved_tensors
        params: DynamicPackedSeqParams = ctx.params
        cp_size, cp_rank = params.cp_group.size(), params.cp_group.rank()
        grad_q = torch.zeros_like(q_THD, dtype=torch.float32)
        own_grads: tuple[Tensor, Tensor] | None = None
        key_value = (k_THD, v_THD)
        grads_shift: RingShift | None = None
        for step in range(cp_size):
            shift = RingShift(key_value, params) if step < cp_size - 1 else None
            grad_k, grad_v = (torch.zeros_like(x) for x in key_value)
            for tile in ring_tiles(ctx.local_seqlens, cp_rank, (cp_rank - step) % cp_size):
                rows, columns = tile.rows, tile.columns
                shares = tile_backward(
                    grad_THD[rows],
                    q_THD[rows],
                    key_value[0][columns],
                    key_value[1][columns],
                    out_THD[rows],
                    lse_TH[rows],
                    causal=tile.causal,
                    scale=ctx.scale,
                )
                grad_q[rows] += shares[0]
                grad_k[columns] += shares[1]
                grad_v[columns] += shares[2]
            if step == 0:
                own_grads = (grad_k, grad_v)
            else:
                if grads_shift is not None:
                    collected_k, collected_v = grads_shift.wait()
                    grad_k, grad_v = grad_k + collected_k, grad_v + collected_v
                grads_shift = RingShift((grad_k, grad_v), params)
            if shift is not None:
                key_value = tuple(shift.wait())
        assert own_grads is not None
        grad_k, grad_v = own_grads
        if grads_shift is not None:
            collected_k, collected_v = grads_shift.wait()
            grad_k, grad_v = grad_k + collected_k, grad_v + collected_v
        return grad_q.to(q_THD.dtype), grad_k, grad_v, None, None
