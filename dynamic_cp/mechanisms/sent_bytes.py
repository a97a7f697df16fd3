"""Bytes that a rank sends in the exchange of one layer's attention: what prices are made of and the runtime counts.

With cp lanes in inner groups of u (p2p, all_gather: u = 1; a2a: u = cp), n = cp / u members of the outer ring, T tokens
of the bucket, so T / cp of a rank, and KV heads repeated `copies` times (`heads.py`):

    inner all-to-alls   4 (Q, K, V before, O after), together (u - 1) / u of T / cp * (Q + O + copies * (K + V)) bytes
    outer ring          n - 1 steps of T / cp * copies * (K + V) bytes; all_gather sends the same at once

Backward, the ring carries keys and values once more and their gradients (twice the bytes); the all-to-alls carry the
gradients of O, Q, K, V: as many bytes as forward.

Example: 32 lanes, 8 a node. p2p sends 31 KV shards, each node boundary in the ring by one NIC; a2a+p2p/8 sends 3 by
the NIC, and 7/8 of a rank's Q, K, V and O inside the node.
"""

from __future__ import annotations

from typing import NamedTuple

COLLECTIVES_OF_A2A = 4
"""Queries, keys and values before, outputs after: as TransformerEngine does; our attention joins the first three."""
RING_BACKWARD_OVER_FORWARD = 2


class SentBytes(NamedTuple):
    """What a rank sends forward, in bytes per token of the rank (or bytes, if multiplied by its tokens).

    Attributes:
        ring_step: in one step of the outer ring, or of the gathering of all_gather.
        ring_steps: number of steps.
        inner: in all-to-alls among the lanes of the inner group.
        inner_steps: number of all-to-alls.
    """

    ring_step: float
    ring_steps: int
    inner: float
    inner_steps: int

    @property
    def forward(self) -> float:
        """Bytes of the forward pass."""
        return self.ring_steps * self.ring_step + self.inner

    @property
    def backward(self) -> float:
        """Bytes of the backward pass, without what recomputation repeats."""
        return RING_BACKWARD_OVER_FORWARD * self.ring_steps * self.ring_step + self.inner


def sent_bytes(cp_size: int, inner_cp_size: int, query_bytes: float, kv_bytes: float, copies: int) -> SentBytes:
    """Return what a rank sends forward, per token.

    Args:
        cp_size, inner_cp_size: as in `Bucket`.
        query_bytes: of the queries and outputs of a token.
        kv_bytes: of the keys and values of a token, before they are repeated.
        copies: how often KV heads are repeated.
    """
    inner = (copies * kv_bytes + query_bytes) * (inner_cp_size - 1) / inner_cp_size
    num_inner = COLLECTIVES_OF_A2A if inner_cp_size > 1 else 0
    return SentBytes(copies * kv_bytes, cp_size // inner_cp_size - 1, inner, num_inner)
