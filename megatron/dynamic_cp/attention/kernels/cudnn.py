"""A whole pack in one launch of cuDNN's fused attention, through torch (Hopper; what TransformerEngine uses there).

torch before 2.14 is refused: its backward for packs confuses the head width with the longest length and writes outside
its buffers (pytorch/pytorch#186142), and older versions build a new cuDNN plan on every call. Plans are cached by the
shape of a call, so longest lengths are rounded up to powers of two. Values that flash kernels leave undefined are
treated as undefined here, too.

Shapes: T tokens (rows or columns), H heads, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels import flash as kernels_flash
from megatron.dynamic_cp.attention.packs import Pack

MAX_HEAD_DIM = 128
MIN_CAPABILITY = (9, 0)
MIN_TORCH = (2, 14)
_SMALLEST_LENGTH = 128


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32)."""
    assert pack.key_ranges is None, "this kernel knows no ranges of keys"
    out_THD, lse_HT, *_ = torch.ops.aten._cudnn_attention_forward(
        q_THD.contiguous(),
        k_THD.contiguous(),
        v_THD.contiguous(),
        None,
        pack.cu_rows,
        pack.cu_columns,
        rounded_up(pack.max_rows),
        rounded_up(pack.max_columns),
        True,
        0.0,
        pack.causal,
        False,
        scale=scale,
    )
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
    no_dropout = torch.zeros((), dtype=torch.int64, device=q_THD.device)
    return torch.ops.aten._cudnn_attention_backward(
        grad_THD.contiguous(),
        q_THD.contiguous(),
        k_THD.contiguous(),
        v_THD.contiguous(),
        out_THD.contiguous(),
        lse_HT.contiguous(),
        no_dropout,
        no_dropout,
        None,
        pack.cu_rows,
        pack.cu_columns,
        rounded_up(pack.max_rows),
        rounded_up(pack.max_columns),
        0.0,
        pack.causal,
        scale=scale,
    )


def rounded_up(length: int) -> int:
    """Return `length` rounded up to a power of two, at least 128, so that few cuDNN plans serve all packs."""
    return max(_SMALLEST_LENGTH, 1 << (length - 1).bit_length())


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why these kernels cannot be used, None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {device.type}"
    if dtype not in kernels_flash.DTYPES:
        return f"needs bfloat16 or float16, the tensors are {dtype}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"needs a head width of at most {MAX_HEAD_DIM} that is a multiple of 8, it is {head_dim}"
    if torch_version() < MIN_TORCH:
        return f"needs torch 2.14, this is {torch.__version__}: before, its gradients of packs are wrong"
    if not torch.backends.cudnn.is_available():
        return f"torch {torch.__version__} has no cuDNN"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY}, the device has {capability}"
    return None


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
