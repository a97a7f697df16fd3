"""Any pack in one launch forward and two backward, by Triton programs that skip the tiles that no row sees.

For packs whose rows see ranges of keys, which no kernel of torch computes. Triton comes with torch's CUDA wheels.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels.tiles import tiles_of
from megatron.dynamic_cp.attention.packs import Pack, dense_heads

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = 1.4426950408889634


class Cut(NamedTuple):
    """How a program cuts tensors into tiles, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


CUTS = {
    "forward": {64: Cut(128, 64, 8, 3), 128: Cut(128, 128, 8, 2), 256: Cut(128, 64, 8, 1)},
    "backward_of_rows": {64: Cut(64, 64, 4, 2), 128: Cut(64, 64, 4, 3), 256: Cut(64, 32, 4, 1)},
    "backward_of_columns": {64: Cut(128, 64, 4, 2), 128: Cut(64, 64, 4, 2), 256: Cut(64, 64, 8, 1)},
}
"""Of types of two bytes, by program and padded head width, where a program has 227 KiB of shared memory: the fastest of
some that were timed on an H200 on causal data of 16,384 tokens (docs/LOG.md)."""
SMALL_CUTS = {
    "forward": {64: Cut(128, 64, 8, 3), 128: Cut(128, 64, 8, 2), 256: Cut(64, 64, 8, 1)},
    "backward_of_rows": {64: Cut(64, 64, 4, 2), 128: Cut(64, 64, 4, 3), 256: Cut(32, 32, 8, 1)},
    "backward_of_columns": {64: Cut(128, 64, 8, 1), 128: Cut(64, 64, 8, 1), 256: Cut(32, 32, 8, 1)},
}
"""For 99 KiB, which every device has: chosen by what the compiler says, not timed."""
LARGE_CAPABILITIES = (9, 10)
"""Major compute capabilities whose programs have 227 KiB: H100, B200. A100 has 163, others 99."""


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out_THD in q's dtype, lse_HT float32)."""
    q_THD, k_THD, v_THD = (dense_heads(x) for x in (q_THD, k_THD, v_THD))
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = q_THD.new_empty((q_THD.shape[1], len(q_THD)), dtype=torch.float32)
    strided = q_THD, k_THD, v_THD, out_THD
    _launch("forward", pack, (*strided, lse_HT), scale * _LOG2_E, strided)
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
    q_THD, k_THD, v_THD, grad_THD, out_THD = (dense_heads(x) for x in (q_THD, k_THD, v_THD, grad_THD, out_THD))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_THD, v_THD))
    lse_HT = lse_HT.contiguous()
    delta_HT = torch.empty_like(lse_HT)  # the first program makes it, the second one reads it
    inputs, of_rows = (q_THD, k_THD, v_THD, grad_THD), (lse_HT, delta_HT)
    strided = *inputs, out_THD, dq
    _launch("backward_of_rows", pack, (*strided, *of_rows), scale, strided)
    _launch("backward_of_columns", pack, (*inputs, dk, dv, *of_rows), scale, (*inputs, dk))
    return dq, dk, dv


def _launch(program: str, pack: Pack, tensors: Sequence[Tensor], scale: float, strided: Sequence[Tensor]) -> None:
    """Run a program for each head of each tile of rows, or of columns.

    Args:
        tensors: of the program, in its order; the first two are queries and keys.
        strided: those whose strides it takes.
    """
    from megatron.dynamic_cp.attention.kernels import ranged_programs as programs

    q_THD, k_THD, *_ = tensors
    cut = cut_of(program, q_THD)
    tiles = tiles_of(pack, cut.rows, cut.columns, q_THD.device)
    if program == "backward_of_columns":
        num_tiles, touched, num_heads = len(tiles.of_columns), tiles.rows_of, k_THD.shape[1]
    else:
        num_tiles, touched, num_heads = len(tiles.of_rows), tiles.columns_of, q_THD.shape[1]
    getattr(programs, program)[(num_tiles * num_heads,)](
        *tensors,
        *tiles[:3],
        *touched,
        len(q_THD),
        scale,
        *(stride for x_THD in strided for stride in x_THD.stride()[:2]),
        **constants_of(cut, q_THD, k_THD, num_heads),
    )


def padded_dim(head_dim: int) -> int:
    """Return the width of a head as products of tiles need it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def cut_of(program: str, q_THD: Tensor, capability: tuple[int, int] | None = None) -> Cut:
    """Return how `program` cuts tensors like these on their device, or on one of this compute capability."""
    padded = padded_dim(q_THD.shape[-1])
    if q_THD.element_size() != 2:  # float32: for tests
        side = max(16, min(64, 8192 // padded // q_THD.element_size()))
        return Cut(side, side, 4, 1)
    capability = capability or torch.cuda.get_device_capability(q_THD.device)
    cuts = CUTS if capability[0] in LARGE_CAPABILITIES else SMALL_CUTS
    return cuts[program][max(64, padded)]


def constants_of(cut: Cut, q_THD: Tensor, k_THD: Tensor, num_heads: int) -> dict[str, int]:
    """Return the constants of a program and how it is compiled; a launch has `num_heads` programs for each tile."""
    return {
        "HEADS": num_heads,
        "GROUP": q_THD.shape[1] // k_THD.shape[1],
        "DIM": q_THD.shape[-1],
        "PADDED_DIM": padded_dim(q_THD.shape[-1]),
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }


@lru_cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether Triton runs programs in Python, on the CPU: a way to test them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why these programs cannot be used to train, None if they can."""
    if device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {device.type}"
    if not has_triton():
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
