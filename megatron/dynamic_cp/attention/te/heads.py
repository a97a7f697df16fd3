"""The all-to-alls of `heads.HeadExchange` as steps of their own, so that any attention can stand between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.mechanisms.heads import HeadExchange


class ScatterHeads(torch.autograd.Function):
    """(q_THD, k_THD, v_THD) -> this lane's heads of all rows of the inner group, (q_RHD, k_RHD, v_RHD)."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, exchange: HeadExchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        qkv_RHD = exchange.scatter_heads(q_THD, exchange.sent_kv(k_THD), exchange.sent_kv(v_THD))
        q_RHD, kv_2RHD = exchange.split(qkv_RHD)
        return q_RHD.contiguous(), kv_2RHD[0].contiguous(), kv_2RHD[1].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads_RHD: Tensor) -> tuple[Tensor | None, ...]:
        grad_TPHD = ctx.exchange.gather_heads(torch.cat(grads_RHD, dim=1))
        return *ctx.exchange.split_gradient(grad_TPHD), None


class GatherHeads(torch.autograd.Function):
    """Output of this lane's heads, out_RHD -> output of all heads of this lane's rows, out_THD."""

    @staticmethod
    def forward(ctx: Any, out_RHD: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather_heads(out_RHD).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.scatter_heads(grad_THD), None
