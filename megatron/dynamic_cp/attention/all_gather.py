"""Causal attention over a pack with one all-gather of keys and values instead of a ring.

Fewer, larger messages, none of them hidden; a rank holds the KV of whole sequences while it computes a layer. Gradients
of KV come back with one reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.dynamic_cp.attention.exchange import all_gather_tokens, reduce_scatter_tokens
from megatron.dynamic_cp.attention.merge import RowAccumulator
from megatron.dynamic_cp.attention.tiles import Tile, tile_backward, tile_forward
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.sharding import packed_shard_positions


def gathered_order(padded_seqlens: tuple[int, ...], cp_size: int) -> np.ndarray:
    """Return, for each token of the pack in sequence order, its row in the gathered shards, int64 [cp * T]."""
    starts = np.repeat(np.cumsum((0, *padded_seqlens[:-1])), np.asarray(padded_seqlens) // cp_size)
    rows_to_tokens = np.concatenate(
        [starts + packed_shard_positions(padded_seqlens, cp_size, cp_rank) for cp_rank in range(cp_size)]
    )
    order = np.empty_like(rows_to_tokens)
    order[rows_to_tokens] = np.arange(len(order))
    return order


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
        order = torch.from_numpy(gathered_order(params.padded_seqlens, cp_size)).to(q_THD.device)
        key, value = (all_gather_tokens(x, params).index_select(0, order) for x in (k_THD, v_THD))
        tiles = gathered_tiles(params.padded_seqlens, cp_size, cp_rank)
        rows_sum = RowAccumulator(q_THD)
        for tile in tiles:
            out, lse = tile_forward(
                q_THD[tile.rows], key[tile.columns], value[tile.columns], causal=tile.causal, scale=scale
            )
            rows_sum.add(tile.rows, out, lse)
        out_THD = rows_sum.out_THD.to(q_THD.dtype)
        # Local shards are kept, not the gathered ones: backward gathers again, memory stays that of a shard.
        ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, rows_sum.lse_TH, order)
        ctx.params, ctx.scale, ctx.tiles = params, scale, tiles
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, out_THD, lse_TH, order = ctx.saved_tensors
        key, value = (all_gather_tokens(x, ctx.params).index_select(0, order) for x in (k_THD, v_THD))
        grad_q = torch.zeros_like(q_THD, dtype=torch.float32)
        grad_key, grad_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        for tile in ctx.tiles:
            rows, columns = tile.rows, tile.columns
            shares = tile_backward(
                grad_THD[rows],
                q_THD[rows],
                key[columns],
                value[columns],
                out_THD[rows],
                lse_TH[rows],
                causal=tile.causal,
                scale=ctx.scale,
            )
            grad_q[rows] += shares[0]
            grad_key[columns] += shares[1]
            grad_value[columns] += shares[2]
        scattered = []
        for grad, local in ((grad_key, k_THD), (grad_value, v_THD)):
            gathered = torch.empty_like(grad, dtype=local.dtype)
            gathered[order] = grad.to(local.dtype)
            scattered.append(reduce_scatter_tokens(gathered, ctx.params))
        return grad_q.to(q_THD.dtype), scattered[0], scattered[1], None, None
