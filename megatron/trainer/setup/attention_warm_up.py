"""What attention does for the first time is done at start-up: kernels are planned and memory is taken before step 1.

cuDNN plans a kernel for every bucket of local tokens (up to 1024, powers of two, then multiples of 32768), for each
of the shapes that a ring needs (the diagonal and both halves), forward and backward, 0.1 to 1 s each. A lane meets the
most shapes in its largest group, so packs of each bucket are attended to there, with every exchange of the run.

cuDNN also plans anew for each bucket of the number of sequences: up to 32, then powers of two. Packs of the first two
buckets are attended to; larger ones are planned when such a pack comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from dynamic_cp.types import RING_ALONE, Attention, CpCommType, is_placed, needs_latents
from megatron.dynamic_cp.attention.thd import EXECUTORS
from megatron.dynamic_cp.data.micro_batches import PackedBucket, groups_of
from megatron.dynamic_cp.groups.first_exchange import possible_attentions
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

SMALLEST_BUCKET_TOKENS = 1024
LARGEST_DOUBLED_TOKENS = 32768
PACKED_SEQUENCES = (32, 64)
"""Most sequences of a pack in cuDNN's first buckets of their number; a short sequence costs little to attend to."""


def token_buckets(max_tokens_per_rank: int) -> tuple[int, ...]:
    """Return the largest number of local tokens of each bucket up to the limit, which is the last one's."""
    buckets, bucket = [], SMALLEST_BUCKET_TOKENS
    while bucket < max_tokens_per_rank:
        buckets.append(bucket)
        bucket += min(bucket, LARGEST_DOUBLED_TOKENS)
    return (*buckets, max_tokens_per_rank)


def pack_of(rank_tokens: int, cp_size: int, most_sequences: int) -> tuple[int, ...]:
    """Return padded lengths of at most so many sequences with `rank_tokens` on each lane, rounded to even."""
    unit = 2 * cp_size  # of a sequence: two tokens on each lane
    units = max(1, rank_tokens // 2)
    number = min(most_sequences, units)
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
        two_levels: (first lane, size, inner size) of its groups for exchanges of two levels.
        exchanges: that plans of the run may have.
        query_heads: of a tensor-parallel rank.
    """
    inner_sizes = {inner for _, _, inner in two_levels}
    # What a lane does of a placement is the plan's; its kernels are those of the others.
    exchanges = [name for name in exchanges if not is_placed(name)]
    # Of latents as well: kernels see what a ring of keys and values has.
    exchanges = list(dict.fromkeys(RING_ALONE[0] if needs_latents(name) else name for name in exchanges))
    places: dict[tuple[Attention, int], tuple[int, int]] = {}
    for first, size in sorted(blocks, key=lambda block: block[1]):
        for attention in (
            possible_attentions(exchanges, size, query_heads, sorted(inner_sizes)) if size > 1 else [Attention()]
        ):
            # Where shapes do not grow with the group, the largest one has them all.
            executor = EXECUTORS[attention.cp_comm_type]
            assert executor is not None, "placements were left out"
            each_size = size == 1 or executor.grows_with_group
            places[attention, size if each_size else 0] = first, size
    return [
        PackedBucket(
            first_lane=first,
            cp_size=size,
            cp_comm_type=attention.cp_comm_type,
            inner_cp_size=attention.inner_cp_size,
            padded_seqlens=padded_seqlens,
        )
        for (attention, _), (first, size) in places.items()
        for tokens in token_buckets(max_tokens_per_rank)
        for padded_seqlens in dict.fromkeys(pack_of(tokens, size, most) for most in PACKED_SEQUENCES)
    ]


def warm_up_attention(
    attentions: Sequence[torch.nn.Module],
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
        attentions: core attentions as megatron-core builds them, whose kernels differ.
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
        for attention in attentions:
            out = attention(query, key, value, None, packed_seq_params=params)
            torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    return stats.bytes_sent
