"""What the planner asks of a mechanism: where it is possible, what it costs, sends and keeps.

Most mechanisms have a closed form: seconds of a bucket from its tokens alone, which packers compare by the million. For
one without (`has_closed_form` false) nothing is packed: it is put into a finished plan and priced lane by lane, with
the whole micro-batch in view; `floor` gives lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.mechanisms.stage_attention import Convex, StageAttention
from dynamic_cp.mechanisms.transfers import SentBytes, heads_of_rank, kv_heads_of, lanes_in_one_node, sent_bytes
from dynamic_cp.types import (
    CAUSAL,
    Bucket,
    CpCommType,
    Mask,
    MicroBatch,
    ModelShape,
    PlanOptions,
    Topology,
    is_placed,
)

if TYPE_CHECKING:
    from dynamic_cp.placement.sent import Sent, TokenBytes


MANY_GROUPS = 10
"""CP groups and rings of a rank, above which rings are left out that others nearly replace."""


def powers_of_two(most: int) -> list[int]:
    """Return 2, 4, 8, ... up to `most`."""
    return [1 << k for k in range(1, most.bit_length())]


class Sharing(NamedTuple):
    """What limits the mechanisms that the lanes of a group can use.

    Attributes:
        heads: (query heads, KV heads) of a TP rank, by `heads_of_rank`; None if they are not whole numbers.
        node_lanes: the largest group whose lanes surely share a node (`transfers.lanes_in_one_node`).
        allowed: inner sizes that may be chosen (`PlanOptions.inner_cp_sizes`); None: all.
        ring_sizes: inner sizes of a2a+p2p, each one communicator more per CP size; None: those that `may_be_inner`.
    """

    heads: tuple[int, int] | None
    node_lanes: int
    allowed: tuple[int, ...] | None = None
    has_windows: bool = False
    has_latents: bool = False
    ring_sizes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, model: ModelShape, topology: Topology, options: PlanOptions) -> Sharing:
        """Return the limits of a job. Each ring is a communicator: if a rank would make more than MANY_GROUPS, rings go
        around the largest inner groups alone, unless options name inner sizes or allow nothing else."""
        heads, node_lanes = heads_of_rank(model, topology.tp_size), lanes_in_one_node(topology)
        sharing = cls(heads, node_lanes, options.inner_cp_sizes, model.window is not None, model.has_latents)
        is_alone = sum(not is_placed(name) for name in options.cp_comm_types) == 1
        groups = powers_of_two(options.largest_cp_size(topology))
        inner = [size for size in groups[:-1] if size <= node_lanes and sharing.may_be_inner(size)]
        num_groups = len(groups) + sum(size < group for size in inner for group in groups)
        if is_alone or options.inner_cp_sizes is not None or num_groups <= MANY_GROUPS:
            return sharing
        return sharing._replace(ring_sizes=tuple(inner[-1:]))

    def is_even(self, inner_cp_size: int) -> bool:
        """Return whether this number of lanes can share the query heads evenly."""
        return inner_cp_size == 1 or (self.heads is not None and self.heads[0] % inner_cp_size == 0)

    def may_be_inner(self, size: int) -> bool:
        """Return whether an inner group inside a node may have this size."""
        return size <= self.node_lanes and (self.allowed is None or size in self.allowed) and self.is_even(size)

    @property
    def query_heads(self) -> int | str:
        """Query heads of a TP rank, for messages."""
        return "no whole number of" if self.heads is None else self.heads[0]

    def copies(self, inner_cp_size: int) -> int:
        """Return how often KV heads are repeated for an inner group."""
        return kv_heads_of(*self.heads, inner_cp_size).copies if self.heads and inner_cp_size > 1 else 1

    def describe(self) -> str:
        """Return the rule in words, with its numbers."""
        query_heads, kv_heads = self.heads or ("no whole number", "none")
        windows = "layers have windows, which only all_gather, a2a and blocks serve; " if self.has_windows else ""
        return windows + (
            "a2a needs the query heads of a TP rank to be a multiple of the lanes that share them out (of the CP size, "
            "or with a2a+p2p of an inner size above 1 and below the CP size whose blocks each lie in one node); here "
            f"are {query_heads} query heads, {kv_heads} KV heads, and blocks of at most {self.node_lanes} lanes "
            "lie in one node"
        )

    @property
    def remedy(self) -> str:
        """What to do if no allowed mechanism serves a group, in words."""
        return f"allow {self.serves_always} (--cp-comm-type {self.serves_always} or auto)"

    @property
    def serves_always(self) -> CpCommType:
        """A mechanism that serves groups of all sizes."""
        return serves_any_size(has_windows=self.has_windows)


def serves_any_size(*, has_windows: bool) -> CpCommType:
    """Return a mechanism that serves groups of all sizes."""
    return "all_gather" if has_windows else "p2p"


class LaneSeconds(NamedTuple):
    """Seconds of attention, each [forward or backward, lane of a bucket]: on the GPU, with the exposed part of its
    exchange, and of the host for its exchange."""

    attention: Floats
    host: Floats


class Mechanism:
    """One way for the lanes of a group to compute attention; stateless, so one instance of each kind is enough.

    Attributes:
        has_closed_form: whether `price` gives a bucket's seconds; otherwise `lane_seconds` does.
        serves_masks: whether samples may bring masks of their own (`Sample.mask`).
        sends_narrow_values: whether values travel in their own width if that is below the width of keys.
    """

    name: ClassVar[CpCommType]
    has_closed_form: ClassVar[bool] = True
    serves_masks: ClassVar[bool] = False
    sends_narrow_values: ClassVar[bool] = False

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        """Return the inner sizes with which a group of `cp_size` can use it, the largest first; () if it cannot."""
        raise NotImplementedError

    def size_rule(self, sharing: Sharing) -> str | None:
        """Return in words which CP sizes ("it") it can serve; None: all."""
        return None

    def why_illegal(self, bucket: Bucket, topology: Topology, max_tokens_per_rank: int) -> str | None:
        """Return why the lanes of `bucket` cannot use it, with the remedy; None if they can."""
        return None

    def price(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        """Return (forward, backward) seconds of attention and of its exposed exchange, for a group of > 1 lanes;
        `inner` is one of its `inner_sizes`, `copies` as of `Sharing.copies`, `link` IN_NODE or ACROSS_NODES."""
        raise NotImplementedError

    def floor(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        """Return a lower bound of a bucket's seconds, in the mean of its lanes; arguments as of `price`."""
        raise NotImplementedError

    def lane_seconds(self, stage: StageAttention, bucket: Bucket, micro_batch: MicroBatch) -> LaneSeconds:
        """Return the seconds of attention on each lane of `bucket`, one of the buckets of `micro_batch`."""
        raise NotImplementedError

    def kernel_seconds(self, stage: StageAttention, bucket: Bucket) -> Floats:
        """Return [forward or backward, lane of `bucket`] seconds of attention's kernels, if `price` cannot say it. What
        `lane_seconds` has above it is the exchange, with the time that lanes wait for each other."""
        raise NotImplementedError

    def lane_tokens(self, bucket: Bucket, even: int) -> tuple[int, ...]:
        """Return the padded tokens of each lane of `bucket`, which add up to even shares; `even`: one even share."""
        return (even,) * bucket.cp_size

    def lane_parts(self, bucket: Bucket, topology: Topology) -> Sequence[object] | None:
        """Return, as JSON, what each lane of `bucket` alone must know; None if the bucket says all."""
        return None

    def sent_bytes(
        self, cp_size: int, inner: int, query_bytes: float, kv_bytes: float, copies: int, latent_bytes: float = 0.0
    ) -> SentBytes:
        """Return what a rank sends forward; arguments as of `transfers.sent_bytes`, with the bytes of a token's latents
        for a mechanism that sends them in place of keys and values."""
        return sent_bytes(cp_size, inner, query_bytes, kv_bytes, copies)

    def sent_by_lanes(
        self,
        bucket: Bucket,
        tokens: Sequence[int],
        node_lanes: int,
        of: TokenBytes,
        copies: int,
        mask: Mask = CAUSAL,
    ) -> Sent:
        """Return what the lanes of `bucket` send each other forward and backward.

        Args:
            tokens, of: [lane] padded tokens, and bytes per token.
            node_lanes, copies: the largest group whose lanes surely share a node; how often KV heads are repeated.
            mask: of the layers; most mechanisms send the same under any.
        """
        from dynamic_cp.placement.sent import Sent

        cp_size, inner = bucket.cp_size, bucket.inner_cp_size
        kv = of.narrow_kv if self.sends_narrow_values and of.narrow_kv else of.kv
        one = self.sent_bytes(cp_size, inner, 2 * of.query, kv, copies, of.latent)
        lanes = np.arange(cp_size)
        among, others = pairs_of_inner_groups(cp_size, inner)
        sender = np.concatenate([lanes, among])
        receiver = np.concatenate([(lanes + inner) % cp_size, others])
        ring, heads = np.ones(cp_size), np.full(len(others), one.inner / max(inner - 1, 1))
        per_token = [
            np.concatenate([whole * ring, heads]) for whole in (one.forward - one.inner, one.backward - one.inner)
        ]
        return Sent(sender, receiver, np.array(per_token) * np.asarray(tokens, np.float64)[sender])

    def kept_bytes(
        self, cp_size: int, inner: int, query_bytes: float, kv_bytes: float, copies: int, latent_bytes: float = 0.0
    ) -> float:
        """Return the bytes per token of a rank that the exchange of one layer keeps; arguments as of `price` and
        `sent_bytes`. Inner groups keep queries and outputs in two layouts; the whole ring's keys and values are
        kept."""
        return (query_bytes if inner > 1 else 0.0) + cp_size // inner * copies * kv_bytes

    def num_more_groups(self, cp_size: int, sharing: Sharing) -> int:
        """Return the communicators that a rank needs for groups of `cp_size` besides the one of each CP size."""
        return 0


def pairs_of_inner_groups(cp_size: int, inner: int) -> tuple[Ints, Ints]:
    """Return the senders and receivers of all-to-alls in the inner groups of `cp_size` lanes."""
    lanes = np.arange(cp_size)
    others = (lanes[:, None] // inner * inner + (lanes[:, None] + np.arange(1, inner)) % inner).ravel()
    return np.repeat(lanes, inner - 1), others
