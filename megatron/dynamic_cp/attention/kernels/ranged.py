"""Any pack in one launch forward and two backward, by Triton programs that skip the tiles that no row sees.

For packs whose rows see ranges of keys, which no kernel of torch computes. Forward and the gradient of the queries go
through the tiles of columns that some row of a tile sees; the gradient of keys and values through the tiles of rows
that see some column of a tile. Full tiles, where every row sees every column, come first: there nothing is compared.
Tiles that touch the most others are launched first, so none is left at the end. The host finds them once per
micro-batch; none crosses the boundary of a sequence.
Shapes: T tokens (rows or columns), H heads, D channels of a head.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.types import CAUSAL, FULL
from megatron.dynamic_cp.attention.packs import Pack, dense_heads, to_device
from megatron.dynamic_cp.packed_seq_params import boundaries

Ints, Int64s = NDArray[np.int32], NDArray[np.int64]
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = 1.4426950408889634


class Touched(NamedTuple):
    """For each tile t, the tiles that it touches, as CSR (int32, on the device): from starts[t] the full ones, from
    full_ends[t] to starts[t + 1] those of which some rows see some columns."""

    starts: Tensor
    full_ends: Tensor
    tiles: Tensor


class Tiles(NamedTuple):
    """Tiles of a pack on the device, int32.

    Attributes:
        ranges: of each row, as in `Pack`; also where the pack is not ranged.
        of_rows, of_columns: [tile, 3], first and last + 1 row (column) of the pack, first column of its rectangle.
        columns_of, rows_of: tiles of columns that each tile of rows touches, and the other way round.
    """

    ranges: Tensor
    of_rows: Tensor
    of_columns: Tensor
    columns_of: Touched
    rows_of: Touched


def tiles_of(pack: Pack, num_rows: int, num_columns: int, device: torch.device) -> Tiles:
    """Return the tiles of `num_rows` x `num_columns` that a pack touches; cached with the pack."""
    name = ("tiles", num_rows, num_columns)
    if name not in pack.kept:
        ranges = _ranges_of(pack)
        of_rows, of_columns, *lists = _touched(ranges, pack.row_seqlens, pack.column_seqlens, num_rows, num_columns)

        def moved(values: NDArray[np.integer]) -> Tensor:
            return to_device(np.ascontiguousarray(values, np.int32), device)

        pack.kept[name] = Tiles(
            pack.key_ranges if pack.key_ranges is not None else to_device(ranges, device),
            moved(of_rows),
            moved(of_columns),
            *(Touched(*map(moved, parts)) for parts in lists),
        )
    found: Tiles = pack.kept[name]
    return found


def _ranges_of(pack: Pack) -> Ints:
    if pack.host_ranges is not None:
        return pack.host_ranges
    if pack.mask == CAUSAL:
        return np.concatenate([CAUSAL.key_ranges(seqlen) for seqlen in pack.row_seqlens])
    assert pack.mask == FULL
    ranges = np.zeros((sum(pack.row_seqlens), 4), np.int32)
    ranges[:, 1] = np.repeat(pack.column_seqlens, pack.row_seqlens)
    return ranges


def _touched(
    ranges: Ints, row_seqlens: tuple[int, ...], column_seqlens: tuple[int, ...], num_rows: int, num_columns: int
) -> tuple[Any, ...]:
    """Return the fields of `Tiles` after `ranges`, each `Touched` as three arrays."""
    of_rows, _ = _cut(row_seqlens, num_rows, column_seqlens)
    of_columns, first_column_tiles = _cut(column_seqlens, num_columns, column_seqlens)
    row_tile = np.repeat(np.arange(len(of_rows)), of_rows[:, 1] - of_rows[:, 0])
    first_column_tile = np.repeat(first_column_tiles, row_seqlens)
    pairs = []
    for begin, end in (ranges.T[:2], ranges.T[2:]):
        seen = begin < end
        spans = np.stack(
            (row_tile, first_column_tile + begin // num_columns, first_column_tile - (-end // num_columns)), axis=1
        )[seen]
        # Neighbouring rows mostly touch the same tiles: repetitions go.
        spans = spans[np.append(True, (np.diff(spans, axis=0) != 0).any(1))[: len(spans)]]
        lengths = spans[:, 2] - spans[:, 1]
        ends = np.cumsum(lengths)
        column_tile = np.arange(lengths.sum()) + np.repeat(spans[:, 1] - (ends - lengths), lengths)
        pairs.append(np.repeat(spans[:, 0], lengths) * len(of_columns) + column_tile)
    rows, columns = np.divmod(np.unique(np.concatenate(pairs)), len(of_columns))
    full = _are_full(ranges, of_rows, of_columns, rows, columns, num_columns)
    row_order, column_order = (_heaviest_first(x, len(of)) for x, of in ((rows, of_rows), (columns, of_columns)))
    rows, columns = np.argsort(row_order)[rows], np.argsort(column_order)[columns]
    return (
        of_rows[row_order],
        of_columns[column_order],
        _lists(rows, columns, full, len(of_rows)),
        _lists(columns, rows, full, len(of_columns)),
    )


def _are_full(
    ranges: Ints, of_rows: Int64s, of_columns: Int64s, rows: Int64s, columns: Int64s, num_columns: int
) -> NDArray[np.bool_]:
    """Return, for each touched pair of tiles, whether all rows see all columns in the same one of their two ranges."""
    first = of_columns[columns, 0] - of_rows[rows, 2]
    last = of_columns[columns, 1] - of_rows[rows, 2]
    whole = last - first == num_columns
    starts = of_rows[:, 0]
    inside = [
        (np.maximum.reduceat(begin, starts)[rows] <= first) & (last <= np.minimum.reduceat(end, starts)[rows])
        for begin, end in (ranges.T[:2], ranges.T[2:])
    ]
    return whole & (inside[0] | inside[1])


def _heaviest_first(tiles: Int64s, number: int) -> Int64s:
    return np.argsort(-np.bincount(tiles, minlength=number), kind="stable")


def _lists(tiles: Int64s, others: Int64s, full: NDArray[np.bool_], number: int) -> tuple[NDArray[np.integer], ...]:
    """Return the arrays of `Touched` for `number` tiles, both parts of each list in ascending order."""
    starts = boundaries(np.bincount(tiles, minlength=number).tolist())
    full_ends = starts[:-1] + np.bincount(tiles[full], minlength=number)
    return starts, full_ends, others[np.lexsort((others, ~full, tiles))]


def _cut(seqlens: tuple[int, ...], size: int, column_seqlens: tuple[int, ...]) -> tuple[Int64s, Int64s]:
    """Return [tile, 3] as in `Tiles`, and the first tile of each sequence."""
    starts, first_columns = boundaries(seqlens)[:-1], boundaries(column_seqlens)[:-1]
    numbers = -(-np.array(seqlens) // size)
    first_tiles = np.cumsum(numbers) - numbers
    sequence = np.repeat(np.arange(len(seqlens)), numbers)
    first = starts[sequence] + (np.arange(numbers.sum()) - first_tiles[sequence]) * size
    last = np.minimum(first + size, starts[sequence] + np.array(seqlens)[sequence])
    return np.stack((first, last, first_columns[sequence]), axis=1), first_tiles


class Cut(NamedTuple):
    """The tile sizes of a program, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


CUTS = {
    "forward": {64: Cut(128, 64, 8, 3), 128: Cut(128, 128, 8, 2), 256: Cut(128, 64, 8, 1)},
    "backward_of_rows": {64: Cut(64, 64, 4, 2), 128: Cut(64, 64, 4, 3), 256: Cut(64, 32, 4, 1)},
    "backward_of_columns": {64: Cut(128, 64, 4, 2), 128: Cut(64, 64, 4, 2), 256: Cut(64, 64, 8, 1)},
}
"""By program and padded head width, for dtypes of two bytes and 227 KiB of shared memory: the fastest of those timed on
an H200 with causal packs of 16,384 tokens (docs/LOG.md)."""
SMALL_CUTS = {
    "forward": {64: Cut(128, 64, 8, 3), 128: Cut(128, 64, 8, 2), 256: Cut(64, 64, 8, 1)},
    "backward_of_rows": {64: Cut(64, 64, 4, 2), 128: Cut(64, 64, 4, 3), 256: Cut(32, 32, 8, 1)},
    "backward_of_columns": {64: Cut(128, 64, 8, 1), 128: Cut(64, 64, 8, 1), 256: Cut(32, 32, 8, 1)},
}
"""For 99 KiB of shared memory, which every device has: chosen by what the compiler reports, not timed."""
LARGE_CAPABILITIES = (9, 10)
"""Major compute capabilities with 227 KiB of shared memory: H100, B200. A100 has 163 KiB, others 99."""


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
    """Run a program per head and tile; `tensors` in its order, queries and keys first; it has strides of `strided`."""
    from megatron.dynamic_cp.attention.kernels import triton_programs as programs

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
    """Return the head width as products of tiles need it: a power of two, at least 16."""
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
    """Return a program's constants and compiler options; a launch has `num_heads` programs for each tile."""
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
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether Triton interprets its programs on the CPU, as tests do."""
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
