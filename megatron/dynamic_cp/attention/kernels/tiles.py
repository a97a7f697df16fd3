"""Which tiles of queries against keys a pack touches: what a launch for the whole pack goes through.

    rows of a tile -> the tiles of columns that some of them see      forward, gradient of the queries
    columns of a tile -> the tiles of rows of which some see them     gradient of keys and values

Made on the host, once per micro-batch; no tile crosses the boundary of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.types import CAUSAL, FULL
from megatron.dynamic_cp.attention.packs import Pack, to_device
from megatron.dynamic_cp.layout.packed_seq_params import boundaries

Ints = NDArray[np.int32]


class Tiles(NamedTuple):
    """Touched tiles on the device, int32.

    Attributes:
        ranges: of each row, as in `Pack`; also where the pack is not ranged.
        of_rows, of_columns: [tile, 3], first and last + 1 row (column) of the pack, first column of its rectangle.
        row_starts, columns_of: CSR: tiles of columns of each tile of rows, ascending.
        column_starts, rows_of: CSR: tiles of rows of each tile of columns, ascending.
    """

    ranges: Tensor
    of_rows: Tensor
    of_columns: Tensor
    row_starts: Tensor
    columns_of: Tensor
    column_starts: Tensor
    rows_of: Tensor


def tiles_of(pack: Pack, num_rows: int, num_columns: int, device: torch.device) -> Tiles:
    """Return the tiles of `num_rows` x `num_columns` that a pack touches; kept with the pack."""
    name = ("tiles", num_rows, num_columns)
    if name not in pack.kept:
        ranges = _ranges_of(pack)
        on_host = _touched(ranges, pack.row_seqlens, pack.column_seqlens, num_rows, num_columns)
        on_device = pack.key_ranges if pack.key_ranges is not None else to_device(ranges, device)
        pack.kept[name] = Tiles(on_device, *(to_device(np.ascontiguousarray(x, np.int32), device) for x in on_host))
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
) -> tuple[NDArray[np.integer], ...]:
    """Return what `Tiles` has behind the ranges."""
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
        # Neighbouring rows mostly touch the same tiles.
        spans = spans[np.append(True, (np.diff(spans, axis=0) != 0).any(1))[: len(spans)]]
        lengths = spans[:, 2] - spans[:, 1]
        ends = np.cumsum(lengths)
        column_tile = np.arange(lengths.sum()) + np.repeat(spans[:, 1] - (ends - lengths), lengths)
        pairs.append(np.repeat(spans[:, 0], lengths) * len(of_columns) + column_tile)
    rows, columns = np.divmod(np.unique(np.concatenate(pairs)), len(of_columns))
    by_column = np.argsort(columns, kind="stable")
    return (
        of_rows,
        of_columns,
        boundaries(np.bincount(rows, minlength=len(of_rows)).tolist()),
        columns,
        boundaries(np.bincount(columns, minlength=len(of_columns)).tolist()),
        rows[by_column],
    )


def _cut(
    seqlens: tuple[int, ...], size: int, column_seqlens: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [tile, 3] as in `Tiles`, and the first tile of each sequence."""
    starts, first_columns = boundaries(seqlens)[:-1], boundaries(column_seqlens)[:-1]
    numbers = -(-np.array(seqlens) // size)
    first_tiles = np.cumsum(numbers) - numbers
    sequence = np.repeat(np.arange(len(seqlens)), numbers)
    first = starts[sequence] + (np.arange(numbers.sum()) - first_tiles[sequence]) * size
    last = np.minimum(first + size, starts[sequence] + np.array(seqlens)[sequence])
    return np.stack((first, last, first_columns[sequence]), axis=1), first_tiles
