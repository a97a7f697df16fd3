"""Zigzag shards: each token on one rank, the same as a slow literal re-statement."""

from __future__ import annotations

import numpy as np
import pytest

from dynamic_cp.plans.padding import padded_seqlens
from megatron.dynamic_cp.layout.sharding import packed_shard_positions, shard_positions, take_shard

CP_SIZES = (1, 2, 4, 8, 16, 32)


def literal_owner(position: int, padded_seqlen: int, cp_size: int) -> int:
    """Return the rank of a token: chunks are dealt to ranks 0, 1, ... and, from the middle on, back again."""
    chunk = position * 2 * cp_size // padded_seqlen
    return chunk if chunk < cp_size else 2 * cp_size - 1 - chunk


@pytest.mark.parametrize("cp_size", CP_SIZES[1:])
@pytest.mark.parametrize("chunk", [1, 2, 3, 17])
def test_shards_are_the_literal_ones(cp_size: int, chunk: int) -> None:
    seqlen = 2 * cp_size * chunk
    for rank in range(cp_size):
        expected = [p for p in range(seqlen) if literal_owner(p, seqlen, cp_size) == rank]
        assert len(expected) == 2 * chunk
        assert shard_positions(seqlen, cp_size, rank).tolist() == expected


@pytest.mark.parametrize("seqlen", [1, 2, 7])
def test_one_lane_holds_everything_in_order(seqlen: int) -> None:
    assert shard_positions(seqlen, 1, 0).tolist() == list(range(seqlen))


@pytest.mark.parametrize("rank_token_multiple", [1, 2, 4])
@pytest.mark.parametrize("cp_size", CP_SIZES[:4])
def test_pack_partitions_every_sequence(cp_size: int, rank_token_multiple: int) -> None:
    seqlens = padded_seqlens((5, 1, 64, 33), cp_size, rank_token_multiple)
    held: list[list[int]] = [[] for _ in seqlens]
    for rank in range(cp_size):
        positions = packed_shard_positions(seqlens, cp_size, rank)
        assert positions.dtype == np.int64
        assert len(positions) * cp_size == sum(seqlens)
        assert len(positions) % rank_token_multiple == 0
        starts = np.cumsum([0, *seqlens]) // cp_size
        for index, sequence in enumerate(held):
            sequence += positions[starts[index] : starts[index + 1]].tolist()
    assert [sorted(sequence) for sequence in held] == [list(range(seqlen)) for seqlen in seqlens]


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_take_shard_leaves_padding_zero(dtype: type) -> None:
    values = np.array([11, 12, 13, 14, 15], dtype=dtype)
    shard = take_shard(values, shard_positions(8, 2, 0))
    assert shard.dtype == dtype
    assert shard.tolist() == [11, 12, 0, 0]
    assert take_shard(values, shard_positions(8, 2, 1)).tolist() == [13, 14, 15, 0]


def test_take_shard_may_hold_padding_only() -> None:
    for values in (np.array([7], dtype=np.int64), np.array([], dtype=np.int64)):
        assert take_shard(values, shard_positions(4, 2, 1)).tolist() == [0, 0]
