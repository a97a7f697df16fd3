"""One rectangle of attention on the CPU: torch's own flash kernel, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32) of softmax(scale q k^T) v."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _as_BHTD(q_THD), _as_BHTD(k_THD), _as_BHTD(v_THD), 0.0, causal, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].to(torch.float32)


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
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _as_BHTD(grad_THD),
        _as_BHTD(q_THD),
        _as_BHTD(k_THD),
        _as_BHTD(v_THD),
        _as_BHTD(out_THD),
        lse_HT.to(torch.promote_types(q_THD.dtype, torch.float32))[None],
        0.0,
        causal,
        scale=scale,
    )
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _as_BHTD(x_THD: Tensor) -> Tensor:
    return x_THD.transpose(0, 1)[None]
