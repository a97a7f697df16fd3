"""The rules of `dynamic_cp/plans/padding.py`, compiled for the inner loops of packing."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.plans import padding

padded_seqlen = inlined(padding.padded_seqlen)
_rank_multiple = inlined(padding.rank_multiple)
_missing_tokens = inlined(padding.missing_tokens)


@compiled
def sums_of_buckets(
    seqlens: Ints, bucket_of_sample: Ints, log2_cp_sizes: Ints, multiples: Ints, rank_token_multiple: int
) -> tuple[Floats, Floats]:
    """Return [bucket] -> (sum, sum of squares) of padded lengths, with what the last sample takes for the rank.

    Args:
        seqlens, bucket_of_sample: [sample] tokens, bucket.
        log2_cp_sizes: [bucket].
        multiples, rank_token_multiple: of the price table.
    """
    num_buckets = len(log2_cp_sizes)
    tokens, squares = np.zeros(num_buckets), np.zeros(num_buckets)
    last = np.zeros(num_buckets)
    for sample in range(len(seqlens)):
        bucket = bucket_of_sample[sample]
        padded = float(padded_seqlen(seqlens[sample], multiples[log2_cp_sizes[bucket]]))
        tokens[bucket] += padded
        squares[bucket] += padded * padded
        last[bucket] = padded
    for bucket in range(num_buckets):
        cp_size = 1 << log2_cp_sizes[bucket]
        unit = _rank_multiple(cp_size, rank_token_multiple)
        missing = float(_missing_tokens(int(tokens[bucket]), cp_size, unit))
        tokens[bucket] += missing
        squares[bucket] += (last[bucket] + missing) ** 2 - last[bucket] ** 2
    return tokens, squares
