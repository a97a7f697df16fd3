"""all_gather: keys and values of all lanes at once, then one attention; nothing hides."""

from __future__ import annotations

from dynamic_cp.convex import Convex
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.stage_attention import StageAttention


class AllGather(Mechanism):
    """The bytes of the ring, exposed.

    Every token has all keys of its sample at hand; with a window, each of a lane's two chunks is as much work.

    Limits: its tiles are priced as those of the ring, its shards as if each crossed every NIC in turn. To the host it
    is one more step and one message.
    """

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
