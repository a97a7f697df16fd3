"""One rectangle of attention on the CPU, by torch's flash kernel, forward and backward.

The kernel knows causal squares and additive masks. Rows that see ranges of keys are computed in blocks: one call for
the keys that all rows of a block see, and calls with a mask for those that only some see.

Shapes: T tokens (rows or columns), H heads, D channels of a head, B batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.merging import for_weights, merged
from megatron.dynamic_cp.attention.packs import RowBlock, SeenKeys, dense_heads

BLOCK_ROWS = 256
"""Rows computed together where each sees keys of its own."""
MASKED_COLUMNS = 4096
"""Keys of the largest mask: with `BLOCK_ROWS` 4 MiB in float32."""


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, causal: bool, scale: float, seen: SeenKeys | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32) of softmax(scale q k^T) v; `seen` None: all keys, or causal."""
    if seen is None:
        return _forward(q_THD, k_THD, v_THD, None, causal=causal, scale=scale)
    out_THD = torch.zeros_like(q_THD)
    lse_HT = q_THD.new_full((q_THD.shape[1], len(q_THD)), -torch.inf, dtype=torch.float32)
    for block in seen.blocks:
        parts = [
            _forward_seen(q_THD[block.rows], _taken(k_THD, columns), _taken(v_THD, columns), sees, scale)
            for columns, sees in _calls(seen, block)
        ]
        if parts:
            out, lse_HT[:, block.rows] = reduce(lambda one, other: merged(*one, *other), parts)
            out_THD[block.rows] = out.to(out_THD.dtype)
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
    if seen is None:
        return _backward(grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, None, causal=causal, scale=scale)
    lse_HT = for_weights(lse_HT)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q_THD, k_THD, v_THD))
    for block in seen.blocks:
        rows = block.rows
        for columns, sees in _calls(seen, block):
            dq_part, *dkv_parts = _backward(
                grad_THD[rows],
                q_THD[rows],
                _taken(k_THD, columns),
                _taken(v_THD, columns),
                out_THD[rows],
                lse_HT[:, rows],
                _added(sees, q_THD.dtype),
                scale=scale,
            )
            dq[rows] += dq_part
            for total, part in zip((dk, dv), dkv_parts, strict=True):
                for run, share in zip(columns, part.split([run.stop - run.start for run in columns]), strict=True):
                    total[run] += share
    return dq.to(q_THD.dtype), dk.to(k_THD.dtype), dv.to(v_THD.dtype)


def _forward_seen(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, sees: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q_THD, k_THD, v_THD, _added(sees, q_THD.dtype), scale=scale)
    if sees is None:
        return out, lse
    sees_none = ~sees.any(1)  # torch's kernel returns a log-sum-exp of 0 for these
    return out.masked_fill(sees_none[:, None, None], 0.0), lse.masked_fill(sees_none, -torch.inf)


def _calls(seen: SeenKeys, block: RowBlock) -> Iterator[tuple[tuple[slice, ...], Tensor | None]]:
    """Yield the columns that a block of rows meets in one call, and which of them each row sees, None: all."""
    if block.seen_by_all:
        yield block.seen_by_all, None
    for columns in _at_most(MASKED_COLUMNS, block.seen_by_some):
        numbers = torch.cat([torch.arange(run.start, run.stop, dtype=torch.int32) for run in columns])
        yield columns, seen.sees(block.rows, numbers)


def _added(sees: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask that torch adds to the scores: 0 where a key is seen, else -inf."""
    return None if sees is None else torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)


def _at_most(most: int, columns: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
    portion: list[slice] = []
    room = most
    for run in columns:
        start = run.start
        while start < run.stop:
            stop = min(run.stop, start + room)
            portion.append(slice(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield tuple(portion)
                portion, room = [], most
    if portion:
        yield tuple(portion)


def _taken(x_THD: Tensor, columns: tuple[slice, ...]) -> Tensor:
    return x_THD[columns[0]] if len(columns) == 1 else torch.cat([x_THD[one] for one in columns])


def _forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: Tensor | None, *, causal: bool = False, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _as_BHTD(q_THD), _as_BHTD(k_THD), _as_BHTD(v_THD), 0.0, causal, attn_mask=mask, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].to(torch.float32)


def _backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    mask: Tensor | None,
    *,
    causal: bool = False,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _as_BHTD(grad_THD),
        _as_BHTD(q_THD),
        _as_BHTD(k_THD),
        _as_BHTD(v_THD),
        _as_BHTD(out_THD),
        lse_HT.to(torch.promote_types(q_THD.dtype, torch.float32))[None],
        0.0,
        causal,
        attn_mask=mask,
        scale=scale,
    )
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _as_BHTD(x_THD: Tensor) -> Tensor:
    """Return the tensor with dense heads, which torch's kernel assumes without checking."""
    return dense_heads(x_THD).transpose(0, 1)[None]
