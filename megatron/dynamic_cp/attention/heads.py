"""Attention with heads exchanged for sequence (Ulysses, a2a), alone or around a ring (a2a+p2p).

The lanes of an inner group hand each other rows of q, k and v by one all-to-all: afterwards each has all rows of the
group, in the order of the sequences, for its own share of the heads. With a2a the inner group is the whole CP group
and the rows are whole sequences; with a2a+p2p the rows are a proper zigzag shard over the outer lanes (`row_order`),
and the ring of lanes with equal index does the rest with the longer shard and fewer heads. The output goes back by
another all-to-all; backward does the same in reverse, two collectives again.

Every lane gets as many query heads; the KV heads they use go with them (`dynamic_cp.mechanisms.heads` has the rule).
With fewer KV heads than lanes a KV head goes to several lanes and the row's owner adds up what they return for it.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv 2405.07719) for the two together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynamic_cp.mechanisms.heads import kv_heads_of
from megatron.dynamic_cp.attention.exchange import all_to_all_heads
from megatron.dynamic_cp.attention.kernels import Kernel, kernel_for
from megatron.dynamic_cp.attention.merge import RowGradients
from megatron.dynamic_cp.attention.ring import ring_backward, ring_forward
from megatron.dynamic_cp.attention.row_order import from_sequence_order, row_order
from megatron.dynamic_cp.nvtx import attention_backward
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class HeadExchange:
    """The two all-to-alls of a layer; P lanes, T rows on each, R = P * T rows of the inner group."""

    def __init__(self, query_heads: int, kv_heads: int, params: DynamicPackedSeqParams, device: torch.device) -> None:
        assert params.heads_group is not None
        self._params, self._group = params, params.heads_group
        self._num_lanes = self._group.size()
        # Raises before anything is sent, and on all lanes alike.
        self._copies, self._kv_share = kv_heads_of(query_heads, kv_heads, self._num_lanes)
        self._query_share = query_heads // self._num_lanes
        self._order = row_order(params, device)

    def scatter_heads(self, *shards_THD: Tensor) -> Tensor:
        """Return this lane's heads of all rows, [R, heads, dim] in sequence order, of tensors with heads to share."""
        parts = [x.unflatten(1, (self._num_lanes, -1)) for x in shards_THD]
        received_PTHD = all_to_all_heads(torch.cat(parts, dim=2).transpose(0, 1), self._group, self._params)
        return received_PTHD.flatten(0, 1).index_select(0, self._order)

    def gather_heads(self, x_RHD: Tensor) -> Tensor:
        """Return all lanes' heads of this lane's rows, [T, P, heads, dim]: undoes `scatter_heads`."""
        sent_RHD = from_sequence_order(x_RHD, self._order)
        return all_to_all_heads(sent_RHD.unflatten(0, (self._num_lanes, -1)), self._group, self._params).transpose(0, 1)

    def sent_kv(self, x_THD: Tensor) -> Tensor:
        """Return keys or values as they are sent, a head as often as lanes need it."""
        return x_THD if self._copies == 1 else x_THD.repeat_interleave(self._copies, dim=1)

    def _returned_kv(self, grad_TPHD: Tensor) -> Tensor:
        """Return the gradient of keys or values from what the lanes return: those of one head are added in float32."""
        grad_THD = grad_TPHD.flatten(1, 2)
        if self._copies == 1:
            return grad_THD
        dtype = torch.promote_types(grad_THD.dtype, torch.float32)
        return grad_THD.unflatten(1, (-1, self._copies)).sum(dim=2, dtype=dtype).to(grad_THD.dtype)

    def split(self, qkv_RHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the views q_RHD and kv_2RHD of what `scatter_heads` returned for q, k and v."""
        query, key_value = qkv_RHD.split((self._query_share, 2 * self._kv_share), 1)
        return query, key_value.unflatten(1, (2, -1)).movedim(1, 0)

    def split_gradient(self, grad_TPHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of what `gather_heads` returned for those of this lane's heads."""
        query, key, value = grad_TPHD.split((self._query_share, self._kv_share, self._kv_share), 2)
        return query.flatten(1, 2), self._returned_kv(key), self._returned_kv(value)


class HeadExchangeAttention(torch.autograd.Function):
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
        exchange = HeadExchange(q_THD.shape[1], k_THD.shape[1], params, q_THD.device)
        qkv_RHD = exchange.scatter_heads(q_THD, exchange.sent_kv(k_THD), exchange.sent_kv(v_THD))
        q_RHD, kv_2RHD = exchange.split(qkv_RHD)
        sums = ring_forward(q_RHD, kv_2RHD, params, scale, kernel)
        out_RHD = sums.out_THD.to(q_THD.dtype)
        ctx.save_for_backward(qkv_RHD, out_RHD, sums.lse_HT)
        ctx.params, ctx.scale, ctx.exchange, ctx.kernel = params, scale, exchange, kernel
        return exchange.gather_heads(out_RHD).flatten(1, 2)

    @staticmethod
    @attention_backward
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        qkv_RHD, out_RHD, lse_HR = ctx.saved_tensors
        exchange: HeadExchange = ctx.exchange
        q_RHD, kv_2RHD = exchange.split(qkv_RHD)
        rows = RowGradients(exchange.scatter_heads(grad_THD), q_RHD, out_RHD, lse_HR, ctx.kernel, ctx.scale)
        grad_2RHD = ring_backward(rows, kv_2RHD, ctx.params)
        grad_RHD = torch.cat((rows.grad_q_THD.to(qkv_RHD.dtype), grad_2RHD[0], grad_2RHD[1]), dim=1)
        return *exchange.split_gradient(exchange.gather_heads(grad_RHD)), None, None, None
