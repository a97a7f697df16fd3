"""a2a+p2p: all-to-all among the lanes of a node, then a ring over the lanes with equal place in their nodes."""

from __future__ import annotations

from dynamic_cp.convex import Convex
from dynamic_cp.mechanisms.links import why_inner_groups_are_split
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.types import IN_NODE, Bucket, Topology


class TwoLevels(Mechanism):
    """a2a in inner groups of u lanes inside a node, then the ring over the n = cp / u inner groups.

    Each rank sees L = S / n tokens with 1 / u of the heads in every step.
    """

    name = "a2a+p2p"

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        sizes = (1 << k for k in range(cp_size.bit_length() - 2, 0, -1))
        rings = sharing.ring_sizes
        return tuple(size for size in sizes if sharing.may_be_inner(size) and (rings is None or size in rings))

    def size_rule(self, sharing: Sharing) -> str | None:
        return (
            f"an inner size must lie above 1 and below it and divide both the {sharing.query_heads} query heads of a "
            f"tensor-parallel rank and the blocks of {sharing.node_lanes} lanes that lie in one node"
        )

    def why_illegal(self, bucket: Bucket, topology: Topology, max_tokens_per_rank: int) -> str | None:
        return why_inner_groups_are_split(bucket, topology)

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        shard = stage.kv_shard(cp_size, copies, link)
        return stage.in_ring(cp_size // inner, inner, shard, stage.exchanged_heads(cp_size, inner, copies, IN_NODE))

    def num_more_groups(self, cp_size: int, sharing: Sharing) -> int:
        return len(self.inner_sizes(cp_size, sharing))  # an inner group is the CP group of its size; rings are new
