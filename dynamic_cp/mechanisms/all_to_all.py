"""a2a (Ulysses): a lane gets whole sequences of its share of the heads, and gives the outputs back."""

from __future__ import annotations

from dynamic_cp.convex import Convex
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.stage_attention import StageAttention


class AllToAll(Mechanism):
    """Queries, keys, values and outputs change hands, (cp - 1) / cp of them; hidden behind nothing.

    A lane sees whole sequences, so any mask is as much work on each.
    """

    name = "a2a"
    serves_masks = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (cp_size,) if sharing.is_even(cp_size) else ()

    def size_rule(self, sharing: Sharing) -> str | None:
        return f"it must divide the {sharing.query_heads} query heads of a tensor-parallel rank"

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        shard = stage.kv_shard(cp_size, copies, link)
        return stage.in_ring(1, cp_size, shard, stage.exchanged_heads(cp_size, cp_size, copies, link))
