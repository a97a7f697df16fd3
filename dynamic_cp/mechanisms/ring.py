"""p2p: keys and values walk round the group; each step hides behind the attention of the step before."""

from __future__ import annotations

from dynamic_cp.convex import Convex
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.stage_attention import StageAttention


class Ring(Mechanism):
    """(cp - 1) steps; exposed = max(0, exchange - step 0) + (cp - 2) * max(0, exchange - step 1)."""

    name = "p2p"
    sends_narrow_values = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (1,)

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        return stage.in_ring(cp_size, 1, stage.narrow_kv_shard(cp_size, link))
