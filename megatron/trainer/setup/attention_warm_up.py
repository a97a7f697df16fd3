"""What attention does for the first time is done at start-up: kernels are planned and memory is taken before step 1.

cuDNN plans a kernel for every bucket of local tokens (up to 1024, powers of two, then multiples of 32768), for each
of the shapes that a ring needs (the diagonal and both halves), forward and backward, 0.1 to 1 s each. A lane meets the
most shapes in its largest group, so packs of each bucket are attended to there, with every exchange of the run.

Packs of more than 32 sequences are another bucket of cuDNN's, which is planned when it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

import torch

from dynamic_cp.types import CpCommType
from megatron.dynamic_cp.data.micro_batches import PackedBucket, groups_of
from megatron.dynamic_cp.groups.first_exchange import flat_exchanges
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

SMALLEST_BUCKET_TOKENS = 1024
LARGEST_DOUBLED_TOKENS = 32768
PACKED_SEQUENCES = 32
"""Sequences of a pack in cuDNN's first bucket of their number; a short sequence costs little to attend to."""


def token_buckets(max_tokens_per_rank: int) -> tuple[int, ...]:
    """Return the largest number of local tokens of each bucket up to the limit, which is the last one's."""
    buckets, bucket = [], SMALLEST_BUCKET_TOKENS
    while bucket < max_tokens_per_rank:
        buckets.append(bucket)
        bucket += min(bucket, LARGEST_DOUBLED_TOKENS)
    return (*buckets, max_tokens_per_rank)


def pack_of(rank_tokens: int, cp_size: int) -> tuple[int, ...]:
    """Return padded lengths of at most PACKED_SEQUENCES sequences with `rank_tokens` on each lane, rounded to even."""
    unit = 2 * cp_size  # of a sequence: two tokens on each lane
    units = max(1, rank_tokens // 2)
    number = min(PACKED_SEQUENCES, units)
    return tuple(unit * (units // number + (index < units % number)) for index in range(number))


def warm_up_packs(
    blocks: Collection[tuple[int, int]],
    two_levels: Iterable[tuple[int, int, int]],
    exchanges: Sequence[CpCommType],
    *,
    max_tokens_per_rank: int,
    query_heads: int,
) -> list[PackedBucket]:
    """Return what a lane attends to, in an order that all lanes of a block share.

    Args:
        blocks: (first lane, size) of the lane's groups.
        two_levels: (first lane, size, inner size) of its groups for a2a+p2p.
        exchanges: that plans of the run may have.
        query_heads: of a tensor-parallel rank.
    """
    _, largest = max(blocks, key=lambda block: block[1])
    places: list[tuple[int, int, CpCommType, int]] = []
    for first, size in sorted(blocks, key=lambda block: block[1]):
        if size == 1:
            places.append((first, 1, "p2p", 1))
            continue
        for one in flat_exchanges(exchanges, size, query_heads):
            # The ring's shapes do not depend on its length; those of the others grow with the group.
            if one != "p2p" or size == largest:
                places.append((first, size, one, size if one == "a2a" else 1))  # type: ignore[arg-type]
    if "a2a+p2p" in exchanges:
        by_inner = sorted(two_levels, key=lambda place: (place[2], place[1]))
        for _, same_inner in groupby(by_inner, key=lambda place: place[2]):
            first, size, inner = list(same_inner)[-1]
            places.append((first, size, "a2a+p2p", inner))
    return [
        PackedBucket(
            first_lane=first,
            cp_size=size,
            cp_comm_type=exchange,
            inner_cp_size=inner,
            padded_seqlens=pack_of(tokens, size),
        )
        for first, size, exchange, inner in places
        for tokens in token_buckets(max_tokens_per_rank)
    ]


def warm_up_attention(
    attention: torch.nn.Module,
    packs: Sequence[PackedBucket],
    groups: DynamicCPGroups,
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Attend to each pack, forward and backward; return the bytes that were sent. Collective in each group.

    Args:
        attention: a core attention as megatron-core builds it.
        query_heads, kv_heads: of a tensor-parallel rank.
    """
    stats = ExchangeStats()
    for pack in packs:
        group, levels = groups_of(pack, groups)
        params = DynamicPackedSeqParams.build(
            pack.padded_seqlens,
            torch.zeros(pack.rank_tokens, dtype=torch.int64, device=device),
            group,
            cp_comm_type=pack.cp_comm_type,
            levels=levels,
            label=f"start-up (warm-up of attention, {pack.cp_comm_type} over {pack.cp_size} lanes)",
            stats=stats,
        )
        query, key, value = (
            torch.zeros(pack.rank_tokens, heads, head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (query_heads, kv_heads, kv_heads)
        )
        out = attention(query, key, value, None, packed_seq_params=params)
        torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    return stats.bytes_sent
