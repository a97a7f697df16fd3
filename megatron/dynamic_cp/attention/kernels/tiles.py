"""Which tiles of queries against keys a pack touches: what a launch for the whole pack goes through.

    rows of a tile -> the tiles of columns that some of them see      forward, gradient of the queries
    columns of a tile -> the tiles of rows of which some see them     gradient of keys and values

First come the full ones, of which every row sees every column: there a program compares nothing. Tiles that touch the
most come first, so that none of them is left at the end of a launch.

Made on the host, once per micro-batch; no tile crosses the boundary of a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.types import CAUSAL, FULL
from megatron.dynamic_cp.attention.packs import Pack, to_device
from megatron.dynamic_cp.layout.packed_seq_params import boundaries

Ints, Int64s = NDArray[np.int32], NDArray[np.int64]


class Touched(NamedTuple):
    """Tiles that are touched by each of some others, as CSR, int32 on the device: those of tile t lie at starts[t].

    Attributes:
        full_ends: where the full ones of each tile end and those begin of which some rows see some columns.
    """

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
    """Return the tiles of `num_rows` x `num_columns` that a pack touches; kept with the pack."""
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
    """Return what `Tiles` has behind the ranges, `Touched` as three arrays."""
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
    """Return of which touched tiles all rows see all columns in the same one of their two ranges."""
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
    """Return the tiles by how many others they touch."""
    return np.argsort(-np.bincount(tiles, minlength=number), kind="stable")


def _lists(tiles: Int64s, others: Int64s, full: NDArray[np.bool_], number: int) -> tuple[NDArray[np.integer], ...]:
    """Return `Touched` of each of the `number` tiles: the full ones first, each part in ascending order."""
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
