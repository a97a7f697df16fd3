"""Any pack in one launch forward and two backward, by Triton programs that skip the tiles that no row sees.

For packs whose rows see ranges of keys, which no kernel of torch computes. Triton comes with torch's CUDA wheels.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.tiles import tiles_of
from megatron.dynamic_cp.attention.packs import Pack

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_ROWS, TILE_COLUMNS = 128, 64
FORWARD_TILE_BYTES, BACKWARD_TILE_BYTES = 32768, 16384
"""Of a tile of one tensor, at most. Compiled for A100 and H100, tiles fit the shared memory and sums the registers."""
_LOG2_E = 1.4426950408889634


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32)."""
    from megatron.dynamic_cp.attention.kernels import ranged_programs as programs

    q_THD, k_THD, v_THD = (_with_dense_heads(x) for x in (q_THD, k_THD, v_THD))
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = q_THD.new_empty((q_THD.shape[1], len(q_THD)), dtype=torch.float32)
    sizes = sizes_of(q_THD, k_THD, FORWARD_TILE_BYTES)
    tiles = tiles_of(pack, sizes["ROWS"], sizes["COLUMNS"], q_THD.device)
    programs.forward[(len(tiles.of_rows), q_THD.shape[1])](
        q_THD,
        k_THD,
        v_THD,
        out_THD,
        lse_HT,
        tiles.ranges,
        tiles.of_rows,
        tiles.of_columns,
        tiles.row_starts,
        tiles.columns_of,
        len(q_THD),
        scale * _LOG2_E,
        *_strides(q_THD, k_THD, v_THD, out_THD),
        **sizes,
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
    from megatron.dynamic_cp.attention.kernels import ranged_programs as programs

    q_THD, k_THD, v_THD, grad_THD = (_with_dense_heads(x) for x in (q_THD, k_THD, v_THD, grad_THD))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_THD, v_THD))
    delta_HT = (grad_THD.float() * out_THD.float()).sum(-1).t().contiguous()
    lse_HT = lse_HT.contiguous()
    sizes = sizes_of(q_THD, k_THD, BACKWARD_TILE_BYTES)
    tiles = tiles_of(pack, sizes["ROWS"], sizes["COLUMNS"], q_THD.device)
    tensors = q_THD, k_THD, v_THD, grad_THD
    of_rows = lse_HT, delta_HT, tiles.ranges, tiles.of_rows, tiles.of_columns
    programs.backward_of_rows[(len(tiles.of_rows), q_THD.shape[1])](
        *tensors,
        dq,
        *of_rows,
        tiles.row_starts,
        tiles.columns_of,
        len(q_THD),
        scale,
        *_strides(*tensors, dq),
        **sizes,
    )
    programs.backward_of_columns[(len(tiles.of_columns), k_THD.shape[1])](
        *tensors,
        dk,
        dv,
        *of_rows,
        tiles.column_starts,
        tiles.rows_of,
        len(q_THD),
        scale,
        *_strides(*tensors, dk),
        **sizes,
    )
    return dq, dk, dv


def _with_dense_heads(x_THD: Tensor) -> Tensor:
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x_THD in tensors for stride in x_THD.stride()[:2]]


def sizes_of(q_THD: Tensor, k_THD: Tensor, tile_bytes: int) -> dict[str, int]:
    """Return the constants of a program and how it is compiled."""
    head_dim = q_THD.shape[-1]
    padded = max(16, 1 << (head_dim - 1).bit_length())  # as products of tiles need it
    most = tile_bytes // (padded * q_THD.element_size())
    is_forward = tile_bytes == FORWARD_TILE_BYTES
    return {
        "GROUP": q_THD.shape[1] // k_THD.shape[1],
        "DIM": head_dim,
        "PADDED_DIM": padded,
        "ROWS": min(TILE_ROWS, most),
        "COLUMNS": min(TILE_COLUMNS, most),
        "num_warps": 4 if is_forward and padded <= 64 else 8,
        "num_stages": 2 if is_forward and most >= TILE_ROWS else 1,
    }


def is_interpreted() -> bool:
    """Return whether Triton runs programs in Python, on the CPU: a way to test them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why these programs cannot be used to train, None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "is not installed"
    if is_interpreted():
        return "is interpreted, as TRITON_INTERPRET says"
    if dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, the tensors are {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"needs a head width of at most {MAX_HEAD_DIM}, it is {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"needs compute capability {MIN_CAPABILITY}, the device has {capability}"
    return None
