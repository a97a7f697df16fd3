"""One rectangle of one sequence, by the kernel that a run on this device would use: for measuring and for tests.

Layout: q_THD [T, heads, dim], k_THD and v_THD [S, kv_heads, dim] with kv_heads dividing heads, lse_HT float32
[heads, T]. `causal` means square and aligned (row i sees keys 0..i). Training calls kernels with whole packs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dynamic_cp.types import CAUSAL, FULL
from megatron.dynamic_cp.attention.kernels.choice import Kernel, kernel_for
from megatron.dynamic_cp.attention.packs import Pack


def tile_forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, causal: bool, scale: float, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32) of softmax(scale q k^T) v."""
    pack = _pack(len(q_THD), len(k_THD), causal, q_THD.device)
    return (kernel or kernel_for(q_THD)).forward(q_THD, k_THD, v_THD, pack, scale)


def tile_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    *,
    causal: bool,
    scale: float,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rectangle's share of (dq_THD, dk_THD, dv_THD), given the rows' final `out_THD` and `lse_HT`."""
    pack = _pack(len(q_THD), len(k_THD), causal, q_THD.device)
    return (kernel or kernel_for(q_THD)).backward(grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, pack, scale)


@lru_cache(maxsize=64)
def _pack(num_rows: int, num_columns: int, causal: bool, device: torch.device) -> Pack:
    return Pack.build((num_rows,), (num_columns,), mask=CAUSAL if causal else FULL, device=device)
