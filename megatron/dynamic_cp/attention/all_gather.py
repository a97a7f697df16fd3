"""Causal attention over a pack with one all-gather of keys and values instead of a ring.

Fewer, larger messages, none of them hidden; a rank holds the KV of whole sequences while it computes a layer. Gradients
of KV come back with one reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.exchange import all_gather_tokens, reduce_scatter_tokens
from megatron.dynamic_cp.attention.kernels import Kernel, kernel_for
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import gathered_packs
from megatron.dynamic_cp.attention.row_order import from_sequence_order, row_order
from megatron.dynamic_cp.nvtx import attention_backward
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class AllGatherAttention(torch.autograd.Function):
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
        kv_T2HD = torch.stack((k_THD, v_THD), dim=1)
        sums = RowSums(q_THD, kernel, scale)
        gathered_2SHD = _in_sequence_order(kv_T2HD, params)
        for pack in gathered_packs(params, q_THD.device):
            sums.attend(pack, gathered_2SHD)
        out_THD = sums.out_THD.to(q_THD.dtype)
        # Local shards are kept, not the gathered ones: backward gathers again, memory stays that of a shard.
        ctx.save_for_backward(q_THD, kv_T2HD, out_THD, sums.lse_HT)
        ctx.params, ctx.scale, ctx.kernel = params, scale, kernel
        return out_THD

    @staticmethod
    @attention_backward
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, kv_T2HD, out_THD, lse_HT = ctx.saved_tensors
        rows = RowGradients(grad_THD, q_THD, out_THD, lse_HT, ctx.kernel, ctx.scale)
        gathered_2SHD = _in_sequence_order(kv_T2HD, ctx.params)
        grad_2SHD = None
        for pack in gathered_packs(ctx.params, q_THD.device):
            grad_2SHD = rows.attend(pack, gathered_2SHD, grad_2SHD)
        assert grad_2SHD is not None
        gathered_S2HD = from_sequence_order(grad_2SHD.transpose(0, 1), row_order(ctx.params, q_THD.device))
        grad_T2HD = reduce_scatter_tokens(gathered_S2HD, ctx.params)
        return rows.grad_q_THD.to(q_THD.dtype), grad_T2HD[:, 0], grad_T2HD[:, 1], None, None, None


def _in_sequence_order(kv_T2HD: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    """Return the keys and values of all lanes as kv_2SHD, sequence by sequence."""
    return all_gather_tokens(kv_T2HD, params).index_select(0, row_order(params, kv_T2HD.device)).transpose(0, 1)
