"""The rules of `dynamic_cp/plans/padding.py`, compiled for the inner loops of packing."""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled, inlined
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.plans import padding
from dynamic_cp.pricing.lengths import Lengths, density_of

padded_seqlen = inlined(padding.padded_seqlen)
_rank_multiple = inlined(padding.rank_multiple)
_missing_tokens = inlined(padding.missing_tokens)


@compiled
def sums_of_buckets(
    lengths: Lengths, bucket_of_sample: Ints, log2_cp_sizes: Ints, multiples: Ints, rank_token_multiple: int
) -> tuple[Floats, Floats]:
    """Return [bucket] -> (sum, sum of squares) of padded lengths, with what the last sample takes for the rank.

    Args:
        lengths: the samples; a square counts by its density.
        bucket_of_sample: [sample].
        log2_cp_sizes: [bucket].
        multiples, rank_token_multiple: of the price table.
    """
    seqlens, densities = lengths
    num_buckets = len(log2_cp_sizes)
    tokens, squares = np.zeros(num_buckets), np.zeros(num_buckets)
    last, last_density = np.zeros(num_buckets), np.zeros(num_buckets)
    for sample in range(len(seqlens)):
        bucket = bucket_of_sample[sample]
        padded = float(padded_seqlen(seqlens[sample], multiples[log2_cp_sizes[bucket]]))
        tokens[bucket] += padded
        squares[bucket] += last_density[bucket] * last[bucket] * last[bucket]
        last[bucket], last_density[bucket] = padded, density_of(densities, sample)
    for bucket in range(num_buckets):
        cp_size = 1 << log2_cp_sizes[bucket]
        unit = _rank_multiple(cp_size, rank_token_multiple)
        missing = float(_missing_tokens(int(tokens[bucket]), cp_size, unit))
        tokens[bucket] += missing
        squares[bucket] += last_density[bucket] * (last[bucket] + missing) * (last[bucket] + missing)
    return tokens, squares
