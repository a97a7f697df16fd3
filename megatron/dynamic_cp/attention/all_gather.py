"""Causal attention over a pack with one all-gather of keys and values instead of a ring.

Fewer, larger messages, none of them hidden; a rank holds the KV of whole sequences while it computes a layer. Gradients
of KV come back with one reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.exchange import all_gather_tokens, reduce_scatter_tokens
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums, attend
from megatron.dynamic_cp.attention.row_order import from_sequence_order, row_order
from megatron.dynamic_cp.attention.tiles import Tile
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


def gathered_tiles(padded_seqlens: tuple[int, ...], cp_size: int, cp_rank: int) -> list[Tile]:
    """Return rank `cp_rank`'s rectangles over KV in sequence order: per chunk the past, then the diagonal square."""
    tiles = []
    start = local_start = 0
    for seqlen in padded_seqlens:
        size = seqlen // (2 * cp_size)
        for half, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            rows = slice(local_start + half * size, local_start + (half + 1) * size)
            diagonal = start + chunk * size
            if chunk:
                tiles.append(Tile(rows, slice(start, diagonal), False))
            tiles.append(Tile(rows, slice(diagonal, diagonal + size), True))
        start += seqlen
        local_start += seqlen // cp_size
    return tiles


class AllGatherAttention(torch.autograd.Function):
    """out_THD = causal attention of each sequence over the whole CP group; q, k, v are local zigzag shards."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, params: DynamicPackedSeqParams, scale: float
    ) -> Tensor:
        cp_size, cp_rank = params.cp_group.size(), params.cp_group.rank()
        tiles = gathered_tiles(params.padded_seqlens, cp_size, cp_rank)
        kv_T2HD = torch.stack((k_THD, v_THD), dim=1)
        sums = RowSums(q_THD)
        attend(tiles, sums, q_THD, _in_sequence_order(kv_T2HD, params), scale)
        out_THD = sums.out_THD.to(q_THD.dtype)
        # Local shards are kept, not the gathered ones: backward gathers again, memory stays that of a shard.
        ctx.save_for_backward(q_THD, kv_T2HD, out_THD, sums.lse_TH)
        ctx.params, ctx.scale, ctx.tiles = params, scale, tiles
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, kv_T2HD, out_THD, lse_TH = ctx.saved_tensors
        rows = RowGradients(grad_THD, q_THD, out_THD, lse_TH, ctx.scale)
        grad_2SHD = rows.attend(ctx.tiles, _in_sequence_order(kv_T2HD, ctx.params))
        gathered_S2HD = from_sequence_order(grad_2SHD.transpose(0, 1), row_order(ctx.params, q_THD.device))
        grad_T2HD = reduce_scatter_tokens(gathered_S2HD, ctx.params)
        return rows.grad_q_THD.to(q_THD.dtype), grad_T2HD[:, 0], grad_T2HD[:, 1], None, None


def _in_sequence_order(kv_T2HD: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    """Return the keys and values of all lanes as kv_2SHD, sequence by sequence."""
    return all_gather_tokens(kv_T2HD, params).index_select(0, row_order(params, kv_T2HD.device)).transpose(0, 1)
