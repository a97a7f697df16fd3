"""latent: the ring of p2p, in which latents go round, and each lane projects keys and values up from them.

For multi-latent attention (DeepSeek-V2) only. Of DeepSeek-V3 a token and layer is 1152 bytes of latents, not 81920 of
keys and values (bf16, TP 1). The price is 33.6 MFLOPs for each token that arrives, forward, and three times that
backward, which projects up again before it has gradients of latents and of weights.
"""

from __future__ import annotations

from dynamic_cp.convex import Convex, Linear
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.sent_bytes import SentBytes, sent_bytes
from dynamic_cp.mechanisms.stage_attention import StageAttention


class LatentRing(Mechanism):
    """(cp - 1) steps of T / cp latents; each hides behind the projection and the attention of the step before.

    A lane projects up the tokens of all lanes, one lane after the other, so that only two lanes' keys and values are
    there at a time. Its own once a layer are in the price of the layer's matrices, as those of lanes by themselves.

    Limits: where attention is recomputed, those of its own are missing once in what is repeated.
    """

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
        """Return what the exchange of one layer keeps: keys and values of one lane with their gradients, and latents of
        two lanes with theirs.
        """
        return 2 * kv_bytes + 4 * latent_bytes
