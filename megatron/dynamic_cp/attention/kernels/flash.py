"""A whole pack in one launch of the FlashAttention-2 kernels that torch ships (A100, H100 and newer).

`torch.nn.attention.varlen.varlen_attn` calls the same operators but hides the log-sum-exp from its backward, where a
ring needs it. What the kernels leave undefined (torch's flash_api.cpp, 2.7 to 2.13) is avoided: gradients of keys that
no sequence covers are uninitialised, so a pack covers its whole tensors; a longest query of 1 with grouped heads
changes the layout of the log-sum-exp, so at least 2 is given, as an upper bound is enough; torch before 2.7, which pads
the log-sum-exp to [num_sequences, heads, longest], is refused.
Shapes: T tokens (rows or columns), H heads, D channels of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # the doctor asks this module before it knows whether megatron-core can be imported
    from megatron.dynamic_cp.attention.packs import Pack

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16)


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32)."""
    assert pack.key_ranges is None, "this kernel knows no ranges of keys"
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_THD,
        v_THD,
        pack.cu_rows,
        pack.cu_columns,
        max(2, pack.max_rows),
        pack.max_columns,
        0.0,
        pack.causal,
        False,
        scale=scale,
    )
    assert lse_HT.shape == (q_THD.shape[1], len(q_THD)), "as `why_not` and `check_kernel` make sure"
    return out_THD, lse_HT


def backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    pack: Pack,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pack's share of (dq_THD, dk_THD, dv_THD), given the rows' final `out_THD` and `lse_HT`."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
    return torch.ops.aten._flash_attention_backward(
        grad_THD,
        q_THD,
        k_THD,
        v_THD,
        out_THD,
        lse_HT.contiguous(),
        pack.cu_rows,
        pack.cu_columns,
        max(2, pack.max_rows),
        pack.max_columns,
        0.0,
        pack.causal,
        no_dropout,
        no_dropout[0],
        scale=scale,
    )


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why these kernels cannot be used, None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {device.type}"
    if dtype not in DTYPES:
        return f"needs bfloat16 or float16, the tensors are {dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"needs a head width of at most {MAX_HEAD_DIM} that is a multiple of 8, it is {head_dim}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without it"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY}, the device has {capability}"
    # The update that removed the padding of the log-sum-exp also renamed this result.
    if torch.ops.aten._flash_attention_forward.default._schema.returns[2].name != "rng_state":
        return f"needs torch 2.7, this is {torch.__version__}, which pads the log-sum-exp of packs"
    return None
