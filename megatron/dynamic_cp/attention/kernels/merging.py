"""Adds the result of one part of the keys to the sums of other parts; on a GPU, one Triton program does it in one pass.

All that two parts need of each other is the log-sum-exp; that of no key is -inf. Shapes: T rows, H heads, D channels.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.ranged import MIN_CAPABILITY, has_triton, is_interpreted, padded_dim
from megatron.dynamic_cp.attention.packs import dense_heads

SUM_DTYPE = torch.float32
"""Dtype of sums over parts."""
logger = logging.getLogger(__name__)
_PROGRAM_ELEMENTS = 4096
"""Output elements that one program merges."""


def merged(out_THD: Tensor, lse_HT: Tensor, other_THD: Tensor, other_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of both, in SUM_DTYPE; overwrites outputs that have this dtype
    already. Rows that see no key keep output 0 and log-sum-exp -inf."""
    lse_HT, other_HT = lse_HT.to(SUM_DTYPE), other_HT.to(SUM_DTYPE)
    both_HT = torch.logaddexp(lse_HT, other_HT)
    finite_HT = both_HT.clamp_min(torch.finfo(SUM_DTYPE).min)  # -inf - -inf is no number
    share, other_share = (torch.exp(x - finite_HT).t().unsqueeze(-1) for x in (lse_HT, other_HT))
    out_THD, other_THD = out_THD.to(SUM_DTYPE), other_THD.to(SUM_DTYPE)
    return out_THD.mul_(share).add_(other_THD.mul_(other_share)), both_HT


def for_weights(lse_HT: Tensor) -> Tensor:
    """Return `lse_HT` with +inf for -inf: exp(score - lse) is then 0, not NaN, for rows without a key."""
    return lse_HT.masked_fill(lse_HT == -torch.inf, torch.inf)


def merge_into(out_THD: Tensor, lse_HT: Tensor, rows: Tensor | None, other_THD: Tensor, other_HT: Tensor) -> None:
    """Add another part's result for `rows` (None: all) to sums in SUM_DTYPE, in place; by Triton if it is there."""
    if _has_program(out_THD.device):
        _merge_by_program(out_THD, lse_HT, rows, other_THD, other_HT)
        return
    if rows is None:
        _, both_HT = merged(out_THD, lse_HT, other_THD, other_HT)  # overwrites the output
        lse_HT.copy_(both_HT)
        return
    parts = out_THD.index_select(0, rows), lse_HT.index_select(1, rows)
    new_THD, new_HT = merged(*parts, other_THD, other_HT)
    out_THD.index_copy_(0, rows, new_THD)
    lse_HT.index_copy_(1, rows, new_HT)


@lru_cache
def _has_program(device: torch.device) -> bool:
    if has_triton() and is_interpreted():
        return True
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    if able and not has_triton():
        logger.warning("Triton is not installed: steps of a ring are merged in several passes; pip install triton")
    return able and has_triton()


def _merge_by_program(
    out_THD: Tensor, lse_HT: Tensor, rows: Tensor | None, other_THD: Tensor, other_HT: Tensor
) -> None:
    from megatron.dynamic_cp.attention.kernels.triton_programs import merge

    num_others, num_heads, head_dim = other_THD.shape
    assert lse_HT.is_contiguous()
    assert out_THD.stride(-1) == 1
    other_THD = dense_heads(other_THD)
    padded = padded_dim(head_dim)
    size = max(1, _PROGRAM_ELEMENTS // padded)
    merge[(-(-num_others // size), num_heads)](
        out_THD,
        lse_HT,
        other_THD,
        other_HT.to(SUM_DTYPE).contiguous(),
        rows if rows is not None else lse_HT,
        len(out_THD),
        num_others,
        *out_THD.stride()[:2],
        *other_THD.stride()[:2],
        HAS_NUMBERS=rows is not None,
        DIM=head_dim,
        PADDED_DIM=padded,
        ROWS=size,
        num_warps=4,
    )
