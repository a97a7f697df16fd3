"""One rectangle of attention block by block with matrix products: any device and dtype, memory linear in the length.

For float32 on CUDA, where no kernel of torch returns the log-sum-exp of packs, and for heads that no kernel takes.
Several times slower than a flash kernel.

Shapes: T tokens (rows or columns), H heads, D channels of a head; G KV heads that serve R heads each, S columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.merging import for_weights
from megatron.dynamic_cp.attention.packs import SeenKeys

# Rows and columns of a block: 512 x 512 float32 scores are 1 MiB per head.
BLOCK_ROWS = BLOCK_TOKENS = 512


def _blocks(of: slice) -> Iterator[slice]:
    for start in range(of.start, of.stop, BLOCK_TOKENS):
        yield slice(start, min(start + BLOCK_TOKENS, of.stop))


def _blocks_of_rows(
    num_rows: int, num_columns: int, causal: bool, seen: SeenKeys | None
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows, each with the blocks of columns that it meets."""
    if seen is None:
        for rows in _blocks(slice(0, num_rows)):
            yield rows, list(_blocks(slice(0, min(num_columns, rows.stop) if causal else num_columns)))
    else:
        for block in seen.blocks:
            yield block.rows, [one for run in (*block.seen_by_all, *block.seen_by_some) for one in _blocks(run)]


def _scores_GRTS(
    q_THD: Tensor, k_THD: Tensor, rows: slice, columns: slice, *, causal: bool, scale: float, seen: SeenKeys | None
) -> Tensor:
    """Return the float32 scores of a block, [kv_heads, heads per kv head, rows, columns], -inf where not seen."""
    kv_heads = k_THD.shape[1]
    q = q_THD[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    k = k_THD[columns].float().permute(1, 2, 0)
    scores = torch.matmul(q, k[:, None]) * scale
    if seen is None and not (causal and columns.stop > rows.start + 1):
        return scores
    column = torch.arange(columns.start, columns.stop, device=q.device)
    if seen is not None:
        return scores.masked_fill(~seen.sees(rows, column), -torch.inf)
    row = torch.arange(rows.start, rows.stop, device=q.device)
    return scores.masked_fill(column[None, :] > row[:, None], -torch.inf)


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, causal: bool, scale: float, seen: SeenKeys | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32) of softmax(scale q k^T) v; `seen` None: all keys, or causal."""
    kv_heads = k_THD.shape[1]
    out_THD = torch.empty_like(q_THD)
    lse_HT = q_THD.new_empty((q_THD.shape[1], len(q_THD)), dtype=torch.float32)
    for rows, blocks in _blocks_of_rows(len(q_THD), len(k_THD), causal, seen):
        num_rows = rows.stop - rows.start
        shape = (kv_heads, q_THD.shape[1] // kv_heads, num_rows)
        # Not -inf: in rows that see nothing, -inf - -inf would be NaN.
        row_max = q_THD.new_full(shape, torch.finfo(torch.float32).min, dtype=torch.float32)
        row_sum = torch.zeros_like(row_max)
        total = q_THD.new_zeros((*shape, v_THD.shape[2]), dtype=torch.float32)
        for columns in blocks:
            scores = _scores_GRTS(q_THD, k_THD, rows, columns, causal=causal, scale=scale, seen=seen)
            new_max = torch.maximum(row_max, scores.amax(-1))
            weights = torch.exp(scores - new_max[..., None])
            shrink = torch.exp(row_max - new_max)
            row_sum = row_sum * shrink + weights.sum(-1)
            values = v_THD[columns].float().permute(1, 0, 2)[:, None]
            total = total * shrink[..., None] + torch.matmul(weights, values)
            row_max = new_max
        row_weight = row_sum.clamp_min(torch.finfo(torch.float32).tiny)  # at least 1 where a row sees something
        out_THD[rows] = (total / row_weight[..., None]).permute(2, 0, 1, 3).flatten(1, 2).to(out_THD.dtype)
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
    seen: SeenKeys | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rectangle's share of (dq_THD, dk_THD, dv_THD), given the rows' final `out_THD` and `lse_HT`."""
    kv_heads = k_THD.shape[1]

    def by_kv_head(x_TH: Tensor) -> Tensor:
        """[T, heads, ...] -> [kv_heads, heads per kv head, T, ...]"""
        split = x_TH.float().unflatten(1, (kv_heads, -1))
        return split.permute(1, 2, 0, *range(3, split.dim()))

    delta_TH = (grad_THD.float() * out_THD.float()).sum(-1)
    lse_HT = lse_HT if seen is None else for_weights(lse_HT)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q_THD, k_THD, v_THD))
    for rows, blocks in _blocks_of_rows(len(q_THD), len(k_THD), causal, seen):
        q, grad = by_kv_head(q_THD[rows]), by_kv_head(grad_THD[rows])
        lse, delta = lse_HT[:, rows].unflatten(0, (kv_heads, -1))[..., None], by_kv_head(delta_TH[rows])[..., None]
        for columns in blocks:
            scores = _scores_GRTS(q_THD, k_THD, rows, columns, causal=causal, scale=scale, seen=seen)
            weights = torch.exp(scores - lse)
            dv[columns] += torch.einsum("grts,grtd->sgd", weights, grad)
            dweights = torch.matmul(grad, v_THD[columns].float().permute(1, 2, 0)[:, None])
            dscores = weights * (dweights - delta) * scale
            dq[rows] += torch.einsum("grts,sgd->tgrd", dscores, k_THD[columns].float()).flatten(1, 2)
            dk[columns] += torch.einsum("grts,grtd->sgd", dscores, q)
    return dq.to(q_THD.dtype), dk.to(k_THD.dtype), dv.to(v_THD.dtype)
