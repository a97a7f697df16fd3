"""Which keys a block of rows touches, found on the host from the ranges of keys that each row sees.

Kernels compute what is touched and nothing else: keys that all rows of a block see without a mask, keys that some see
with one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class RowBlock(NamedTuple):
    """Neighbouring rows, and the keys that they see.

    Attributes:
        rows: of the rectangle.
        seen_by_all, seen_by_some: columns of the rectangle, ascending, none twice.
    """

    rows: slice
    seen_by_all: tuple[slice, ...]
    seen_by_some: tuple[slice, ...]


class SeenKeys(NamedTuple):
    """What the rows of one rectangle see of its columns.

    Attributes:
        ranges: two half-open ranges of columns for each row, on the device, int32 [rows, 4].
        blocks: the same on the host, block by block.
    """

    ranges: Tensor
    blocks: tuple[RowBlock, ...]

    def sees(self, rows: slice, columns: Tensor) -> Tensor:
        """Return which of `columns` each of `rows` sees, [rows, columns]."""
        begin, end, second, last = self.ranges[rows, :, None].unbind(1)
        return ((columns >= begin) & (columns < end)) | ((columns >= second) & (columns < last))


def row_blocks(ranges: NDArray[np.int32], block_rows: int) -> tuple[RowBlock, ...]:
    """Return what each block of `block_rows` rows sees, of ranges [rows, 4] none of whose rows names a key twice."""
    return tuple(
        _row_block(slice(start, min(start + block_rows, len(ranges))), ranges[start : start + block_rows])
        for start in range(0, len(ranges), block_rows)
    )


def _row_block(rows: slice, ranges: NDArray[np.int32]) -> RowBlock:
    begins, ends = ranges[:, 0::2].reshape(-1), ranges[:, 1::2].reshape(-1)
    kept = begins < ends
    points, where = np.unique(np.concatenate((begins[kept], ends[kept])), return_inverse=True)
    begun, ended = np.split(where, 2)
    steps = np.bincount(begun, minlength=len(points)) - np.bincount(ended, minlength=len(points))
    number = np.cumsum(steps)  # of rows that see the columns from each point to the next
    return RowBlock(rows, _runs(points, number == len(ranges)), _runs(points, (number > 0) & (number < len(ranges))))


def _runs(points: NDArray[np.int32], chosen: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Return the chosen intervals between neighbouring points, those that touch as one."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))  # the last point begins nothing
    return tuple(slice(*run) for run in points[edges].reshape(-1, 2).tolist())
