"""Which tokens of a packed bucket each CP rank holds: zigzag chunks, so that causal work is equal on all ranks.

Each padded sequence is cut into 2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r, in this order, sequence after
sequence. At cp = 2 a sequence of 8 tokens lies as 0 1 | 6 7 on rank 0 and 2 3 | 4 5 on rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def shard_positions(padded_seqlen: int, cp_size: int, cp_rank: int) -> NDArray[np.int64]:
    """Return the positions in its own sequence of each token that `cp_rank` holds, int64 [padded_seqlen / cp_size].
    `padded_seqlen` counts tokens over the whole group, a multiple of 2 * cp_size if cp_size > 1.
    """
    if cp_size == 1:
        return np.arange(padded_seqlen)
    chunk = padded_seqlen // (2 * cp_size)
    first = np.arange(cp_rank * chunk, (cp_rank + 1) * chunk)
    mirrored = 2 * cp_size - 1 - cp_rank
    second = np.arange(mirrored * chunk, (mirrored + 1) * chunk)
    return np.concatenate([first, second])


def packed_shard_positions(padded_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> NDArray[np.int64]:
    """Return `shard_positions` of every sequence of a pack, one after the other, shape [rank tokens]."""
    return np.concatenate([shard_positions(seqlen, cp_size, cp_rank) for seqlen in padded_seqlens])


def count_held(seqlen: int, padded_seqlen: int, cp_size: int, cp_rank: int) -> int:
    """Return how many of the first `seqlen` tokens, which are not padding, `cp_rank` holds. They come first in its
    shard: its late chunk has some of them only where its early one is full of them.
    """
    if cp_size == 1:
        return seqlen
    chunk = padded_seqlen // (2 * cp_size)
    return sum(min(max(seqlen - place * chunk, 0), chunk) for place in (cp_rank, 2 * cp_size - 1 - cp_rank))


def take_shard(values: NDArray[np.generic], positions: NDArray[np.int64]) -> NDArray[np.generic]:
    """Return values[positions] where a position lies inside `values` [seqlen], 0 where it is padding."""
    shard = np.zeros(len(positions), dtype=values.dtype)
    inside = positions < len(values)
    shard[inside] = values[positions[inside]]
    return shard
