"""One rectangle of attention block by block with matrix products: any device, any dtype, memory linear in the length.

For float32 on CUDA, where torch has no kernel that returns log-sum-exp with a pack of sequences, and for heads that no
kernel takes. Several times slower than a flash kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows and columns of a block: 512 x 512 float32 scores are 1 MiB per head.
BLOCK_TOKENS = 512


def _blocks(num_tokens: int) -> list[slice]:
    return [slice(start, min(start + BLOCK_TOKENS, num_tokens)) for start in range(0, num_tokens, BLOCK_TOKENS)]


def _scores_GRTS(q_THD: Tensor, k_THD: Tensor, rows: slice, columns: slice, *, causal: bool, scale: float) -> Tensor:
    """Return the float32 scores of a block, [kv_heads, heads per kv head, rows, columns], -inf above the diagonal."""
    kv_heads = k_THD.shape[1]
    q = q_THD[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    k = k_THD[columns].float().permute(1, 2, 0)
    scores = torch.matmul(q, k[:, None]) * scale
    if causal and columns.stop > rows.start + 1:
        row = torch.arange(rows.start, rows.stop, device=q.device)
        column = torch.arange(columns.start, columns.stop, device=q.device)
        scores = scores.masked_fill(column[None, :] > row[:, None], float("-inf"))
    return scores


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32) of softmax(scale q k^T) v."""
    kv_heads = k_THD.shape[1]
    out_THD = torch.empty_like(q_THD)
    lse_HT = q_THD.new_empty((q_THD.shape[1], len(q_THD)), dtype=torch.float32)
    for rows in _blocks(len(q_THD)):
        num_rows = rows.stop - rows.start
        shape = (kv_heads, q_THD.shape[1] // kv_heads, num_rows)
        row_max = q_THD.new_full(shape, float("-inf"), dtype=torch.float32)
        row_sum = torch.zeros_like(row_max)
        total = q_THD.new_zeros((*shape, v_THD.shape[2]), dtype=torch.float32)
        for columns in _blocks(len(k_THD)):
            if causal and columns.start >= rows.stop:
                break
            scores = _scores_GRTS(q_THD, k_THD, rows, columns, causal=causal, scale=scale)
            new_max = torch.maximum(row_max, scores.amax(-1))
            weights = torch.exp(scores - new_max[..., None])
            shrink = torch.exp(row_max - new_max)
            row_sum = row_sum * shrink + weights.sum(-1)
            values = v_THD[columns].float().permute(1, 0, 2)[:, None]
            total = total * shrink[..., None] + torch.matmul(weights, values)
            row_max = new_max
        out_THD[rows] = (total / row_sum[..., None]).permute(2, 0, 1, 3).flatten(1, 2).to(out_THD.dtype)
        lse_HT[:, rows] = (row_max + row_sum.log()).flatten(0, 1)
    return out_THD, lse_HT


def backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rectangle's share of (dq_THD, dk_THD, dv_THD), given the rows' final `out_THD` and `lse_HT`."""
    kv_heads = k_THD.shape[1]

    def by_kv_head(x_TH: Tensor) -> Tensor:
        """[T, heads, ...] -> [kv_heads, heads per kv head, T, ...]"""
        split = x_TH.float().unflatten(1, (kv_heads, -1))
        return split.permute(1, 2, 0, *range(3, split.dim()))

    delta_TH = (grad_THD.float() * out_THD.float()).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q_THD, k_THD, v_THD))
    for rows in _blocks(len(q_THD)):
        q, grad = by_kv_head(q_THD[rows]), by_kv_head(grad_THD[rows])
        lse, delta = lse_HT[:, rows].unflatten(0, (kv_heads, -1))[..., None], by_kv_head(delta_TH[rows])[..., None]
        for columns in _blocks(len(k_THD)):
            if causal and columns.start >= rows.stop:
                break
            scores = _scores_GRTS(q_THD, k_THD, rows, columns, causal=causal, scale=scale)
            weights = torch.exp(scores - lse)
            dv[columns] += torch.einsum("grts,grtd->sgd", weights, grad)
            dweights = torch.matmul(grad, v_THD[columns].float().permute(1, 2, 0)[:, None])
            dscores = weights * (dweights - delta) * scale
            dq[rows] += torch.einsum("grts,sgd->tgrd", dscores, k_THD[columns].float()).flatten(1, 2)
            dk[columns] += torch.einsum("grts,grtd->sgd", dscores, q)
    return dq.to(q_THD.dtype), dk.to(k_THD.dtype), dv.to(v_THD.dtype)
