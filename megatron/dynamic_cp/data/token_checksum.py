"""A checksum of tokens that shows whether each arrived exactly once, in any order and any split over ranks.

Every token counts with a 50-bit hash of (sample, position, column, value). A lost, doubled, swapped or changed token
goes unnoticed with probability 2^-50. Sums of 8191 ranks fit into an int64; `combine` takes what they wrap.

    before = token_checksum(7, np.arange(5), tokens)          # where the sample was read
    after = token_checksum(7, shard_positions, shard)         # on each rank that holds a part of it, without padding
    combine(sum of all before) == combine(sum of all after)   # one all-reduce of int64
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHECKSUM_BITS = 50
_MASK = (1 << CHECKSUM_BITS) - 1


def token_checksum(
    sample_ids: ArrayLike, positions: NDArray[np.int64], values: NDArray[np.generic], *, column: int = 0
) -> int:
    """Return the sum of the tokens' hashes, 0 <= sum < 2^50; 0 for no tokens.

    Args:
        sample_ids: whose token it is, int [T] or one for all.
        positions: position of each token within its sample, int [T].
        values: the tokens, labels (integers) or loss mask (float32, compared bit by bit), [T]; no padding.
        column: tells tokens, labels and mask of the same position apart.
    """
    ids = np.asarray(sample_ids, dtype=np.int64).astype(np.uint64)
    bits = values.view(np.int32) if values.dtype == np.float32 else values
    hashed = _mix(ids + np.uint64(column) * np.uint64(0x9E3779B97F4A7C15))
    hashed = _mix(hashed ^ positions.astype(np.uint64))
    hashed = _mix(hashed ^ bits.astype(np.int64).astype(np.uint64))
    return combine(int(hashed.sum(dtype=np.uint64)) if len(positions) else 0)


def combine(total: int) -> int:
    """Return a sum of checksums as the checksum of all their tokens; int64 wrap-around does no harm."""
    return total & _MASK


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of 64-bit integers.

    Source: finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    x = np.atleast_1d(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
