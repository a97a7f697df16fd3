"""Padded lengths of a bucket, and the tokens of each of its lanes: the one place that knows how much padding costs.

Each sample is padded after planning to a multiple of 2 * cp_size (the two zigzag chunks of every rank) if cp_size > 1.
With sequence parallelism the tokens of a rank are then rounded up to a multiple of tp_size, in FP8 of 16, 32 or 128
times that (`Topology.rank_token_multiple`); the last sample takes that rest. Padding before planning to 2 * DP * CP, as
other schedulers do, costs 1.14 to 2.6 times the tokens at 512 to 4096 ranks (counted for lognormal lengths of mean 4096
and sigma 1.5). Packing compiles some functions (`packing/durations.py`); this file needs no numba.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.types import Bucket, MicroBatch, Plan

Lengths = TypeVar("Lengths", int, Ints)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def sample_multiple(cp_size: int) -> int:
    """Return the number of which a sample's padded length is a multiple."""
    return 2 * cp_size if cp_size > 1 else 1


def padded_seqlen(seqlen: Lengths, multiple: int) -> Lengths:
    """Return `seqlen`, or each of an array, rounded up to `multiple`, a power of two (`sample_multiple`)."""
    return (seqlen + multiple - 1) & -multiple


def rank_multiple(cp_size: int, rank_token_multiple: int) -> int:
    """Return the number of which a rank's tokens are a multiple: `rank_token_multiple`, and 2 if `cp_size` > 1."""
    return 2 * rank_token_multiple if cp_size > 1 and rank_token_multiple % 2 else rank_token_multiple


def missing_tokens(tokens: int, cp_size: int, multiple_of_rank: int) -> int:
    """Return the tokens to add to the last sample of a bucket so that each rank holds a multiple of
    `multiple_of_rank`."""
    return -(tokens // cp_size) % multiple_of_rank * cp_size


def padded_seqlens(seqlens: Iterable[int], cp_size: int, rank_token_multiple: int = 1) -> tuple[int, ...]:
    """Return the padded lengths (tokens, whole CP group) of a bucket with samples of `seqlens` tokens.

    Args:
        seqlens: unpadded lengths (tokens) in packing order; empty for an empty place, which gets
            one sequence of padding.
        cp_size: lanes of the bucket.
        rank_token_multiple: tokens of each rank are a multiple of this (`Topology.rank_token_multiple`).

    Example: lengths (5, 9) at cp_size 2 become (8, 12): 4 + 6 = 10 tokens a rank; with rank_token_multiple 4 the last
    sample takes the rest, (8, 16), 12 tokens a rank.
    """
    multiple = sample_multiple(cp_size)
    padded = [padded_seqlen(seqlen, multiple) for seqlen in seqlens] or [multiple]
    padded[-1] += missing_tokens(sum(padded), cp_size, rank_multiple(cp_size, rank_token_multiple))
    return tuple(padded)


def padded_of(bucket: Bucket, rank_token_multiple: int = 1) -> tuple[int, ...]:
    """Return `padded_seqlens` of a bucket's samples; in placed ones only lanes are padded (`placed_tokens`)."""
    if bucket.placement is not None:
        return tuple(sample.seqlen for sample in bucket.samples)
    return padded_seqlens((sample.seqlen for sample in bucket.samples), bucket.cp_size, rank_token_multiple)


def rank_tokens(bucket: Bucket, rank_token_multiple: int = 1) -> int:
    """Return the padded tokens of a rank of `bucket`, on average; `lane_tokens` knows those of each lane."""
    if bucket.cp_size == rank_token_multiple == 1:  # most buckets: nothing is padded
        return sum([sample.seqlen for sample in bucket.samples]) or 1
    multiple = sample_multiple(bucket.cp_size)
    units = sum([-(-sample.seqlen // multiple) for sample in bucket.samples]) or 1
    return round_up(units * multiple // bucket.cp_size, rank_multiple(bucket.cp_size, rank_token_multiple))


def placed_tokens(bucket: Bucket, rank_token_multiple: int = 1) -> tuple[int, ...]:
    """Return the padded tokens of each lane of a placed bucket."""
    assert bucket.placement is not None
    inner = bucket.inner_cp_size
    return tuple(
        tokens
        for of_group in bucket.placement.home_tokens(bucket.num_inner_groups)
        for tokens in (placed_share(of_group, inner, rank_token_multiple),) * inner
    )


def placed_share(group_tokens: int, inner_cp_size: int, rank_token_multiple: int = 1) -> int:
    """Return the padded tokens of each lane of an inner group that holds `group_tokens`: at least one, a multiple."""
    return round_up(max(-(-group_tokens // inner_cp_size), 1), rank_token_multiple)


def micro_batch_padded_tokens(micro_batch: MicroBatch, rank_token_multiple: int = 1) -> int:
    """Return the padded tokens of all lanes of `micro_batch`."""
    return sum(
        rank_tokens(bucket, rank_token_multiple) * bucket.cp_size
        if bucket.placement is None
        else sum(placed_tokens(bucket, rank_token_multiple))
        for bucket in micro_batch.buckets
    )


def padding_fraction(plan: Plan) -> float:
    """Return the share of padding in all tokens that the plan computes (0 = none)."""
    total = sum(micro_batch_padded_tokens(mb, plan.topology.rank_token_multiple) for mb in plan.micro_batches)
    return 1.0 - plan.num_tokens / total if total else 0.0


def lane_tokens(bucket: Bucket, rank_token_multiple: int = 1) -> tuple[int, ...]:
    """Return the padded tokens of each lane of `bucket`, which every rank of the lane holds."""
    if bucket.placement is not None:
        return placed_tokens(bucket, rank_token_multiple)
    even = rank_tokens(bucket, rank_token_multiple)
    return (even,) if bucket.cp_size == 1 else MECHANISMS[bucket.cp_comm_type].lane_tokens(bucket, even)


def lane_tokens_of(plan: Plan) -> Ints:
    """Return [micro-batch, lane] -> padded tokens of a rank."""
    multiple = plan.topology.rank_token_multiple
    return np.array(
        [
            [tokens for bucket in micro_batch.buckets for tokens in lane_tokens(bucket, multiple)]
            for micro_batch in plan.micro_batches
        ],
        np.int64,
    )
