"""The five exchanges of keys, values and heads, and all mechanisms by name.

p2p         keys and values walk round the group; each step hides behind the attention of the step before
all_gather  keys and values of all lanes at once, then one attention; nothing hides
a2a         a lane gets whole sequences of its share of the heads, and gives the outputs back (Ulysses)
a2a+p2p     a2a among the lanes of a node, then a ring over the lanes with equal place in their nodes
latent      the ring of p2p, in which latents go round, and each lane projects keys and values up from them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamic_cp.mechanisms.blocks import Blocks
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.stage_attention import Convex, Linear, StageAttention
from dynamic_cp.mechanisms.transfers import SentBytes, sent_bytes, why_inner_groups_are_split
from dynamic_cp.types import IN_NODE, TRAITS, Attention, Bucket, CpCommType, Topology


class Ring(Mechanism):
    """(cp - 1) steps; exposed = max(0, exchange - step 0) + (cp - 2) * max(0, exchange - step 1)."""

    name = "p2p"
    sends_narrow_values = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (1,)

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        return stage.in_ring(cp_size, 1, stage.narrow_kv_shard(cp_size, link))


class AllGather(Mechanism):
    """The bytes of the ring, exposed. Windows are served: each lane has all keys, and its two chunks are as much work.
    Limits: its tiles are priced as those of the ring, its shards as if each crossed every NIC in turn; the host sees
    one step and one message."""

    name = "all_gather"
    sends_narrow_values = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (1,)

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        shard = stage.narrow_kv_shard(cp_size, link)
        forward, backward = (
            Convex(side.tiles(cp_size).plus(side.transfer(shard), cp_size - 1), host_s=stage.host_s(1, 1))
            for side in stage.sides
        )
        return forward, backward


class AllToAll(Mechanism):
    """(cp - 1) / cp of queries, keys, values and outputs change hands, exposed; under any mask lanes have equal
    work."""

    name = "a2a"
    serves_masks = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (cp_size,) if sharing.is_even(cp_size) else ()

    def size_rule(self, sharing: Sharing) -> str | None:
        return f"it must divide the {sharing.query_heads} query heads of a tensor-parallel rank"

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        shard = stage.kv_shard(cp_size, copies, link)
        return stage.in_ring(1, cp_size, shard, stage.exchanged_heads(cp_size, cp_size, copies, link))


class TwoLevels(Mechanism):
    """a2a in inner groups of u lanes inside a node, then the ring over the n = cp / u inner groups. In every step each
    rank sees L = S / n tokens with 1 / u of the heads."""

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


class LatentRing(Mechanism):
    """(cp - 1) steps of T / cp latents; each hides behind the projection and the attention of the step before. A lane
    projects up one lane's tokens after the other, so that only two lanes' keys and values exist at a time. The layer's
    matrices already pay for projecting its own tokens once. Limit: recomputed attention lacks that one projection."""

    name = "latent"

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (1,) if sharing.has_latents else ()

    def size_rule(self, sharing: Sharing) -> str | None:
        return None if sharing.has_latents else "only multi-latent attention has latents to exchange"

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        backward_over_forward = stage.hardware.linear_backward_over_forward
        constant, per_token, _ = stage.projecting_up
        once = Linear(constant, per_token / cp_size)
        besides = once, Linear().plus(once, 1.0 + backward_over_forward)
        forward, backward = stage.in_ring(cp_size, 1, stage.latent_shard(cp_size, link), besides=besides)
        return (
            forward._replace(linear=forward.linear.plus(once, -1.0)),
            backward._replace(linear=backward.linear.plus(once, -backward_over_forward)),
        )

    def sent_bytes(
        self, cp_size: int, inner: int, query_bytes: float, kv_bytes: float, copies: int, latent_bytes: float = 0.0
    ) -> SentBytes:
        return sent_bytes(cp_size, inner, query_bytes, latent_bytes, 1)

    def kept_bytes(
        self, cp_size: int, inner: int, query_bytes: float, kv_bytes: float, copies: int, latent_bytes: float = 0.0
    ) -> float:
        """Keys and values of one lane and latents of two lanes, each with their gradients."""
        return 2 * kv_bytes + 4 * latent_bytes


MECHANISMS: Mapping[CpCommType, Mechanism] = {
    one.name: one for one in (Ring(), AllGather(), AllToAll(), TwoLevels(), Blocks(), LatentRing())
}
"""Name -> mechanism, for every name that a bucket may have."""


def serving_masks(names: Iterable[CpCommType] = tuple(MECHANISMS)) -> tuple[CpCommType, ...]:
    """Return those of `names` that serve samples with masks of their own on several lanes."""
    return tuple(name for name in names if MECHANISMS[name].serves_masks)


def masks_are_served_by() -> str:
    """Return, in words, the mechanisms that serve samples with masks of their own."""
    return " or ".join(serving_masks())


def serving_windows(names: Iterable[CpCommType] = tuple(MECHANISMS)) -> tuple[CpCommType, ...]:
    """Return those of `names` that serve layers with windows on several lanes."""
    return tuple(name for name in names if TRAITS[name].serves_windows)


def attentions_of(names: Iterable[CpCommType], cp_size: int, sharing: Sharing) -> list[Attention]:
    """Return the ways in which a group of `cp_size` lanes can compute attention by the mechanisms of these names."""
    if sharing.has_windows and cp_size > 1:
        names = serving_windows(names)
    return [Attention(name, inner) for name in names for inner in MECHANISMS[name].inner_sizes(cp_size, sharing)]


def chosen_inner_sizes(names: Iterable[CpCommType], largest: int, sharing: Sharing) -> tuple[int, ...]:
    """Return the inner sizes that plans may choose in groups of up to `largest` lanes, ascending; () if none."""
    ways = attentions_of(names, largest, sharing)
    return tuple(sorted({way.inner_cp_size for way in ways if way.chooses_inner_size}))
