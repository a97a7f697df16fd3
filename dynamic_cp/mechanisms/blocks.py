"""blocks: every home and tile of a bucket has a lane of its own choice (`Bucket.placement`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamic_cp.arrays import Floats
from dynamic_cp.convex import Convex, Linear
from dynamic_cp.mechanisms.links import lanes_in_one_node
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.types import FULL, Bucket, MicroBatch, Topology

if TYPE_CHECKING:
    from dynamic_cp.placement.sent import Sent, TokenBytes

# `dynamic_cp.placement` is compiled: it is imported by what is called, as no command should wait for the compiler in
# vain.

MOST_FETCHED = (3, 8)
"""(Rows, columns) that a lane may have room for besides its own, over the limit of tokens per rank."""


class Blocks(Mechanism):
    """Tiles where their data are, or where time is; rows and columns travel to them, and sums back."""

    name = "blocks"
    has_closed_form = False
    serves_masks = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (1,)

    def why_illegal(self, bucket: Bucket, topology: Topology, max_tokens_per_rank: int) -> str | None:
        from dynamic_cp.placement.legal import why_misplaced
        from dynamic_cp.placement.programme import buffer_tokens_of

        placement = bucket.placement
        if placement is None:
            return (
                f"its attention is placed on {bucket.cp_size} lanes, but it has no placement: plan these samples again"
            )
        reason = why_misplaced(placement, bucket.samples, bucket.cp_size)
        # A plan does not say which mask its layers have; where they have a full one, samples bring none.
        if reason is not None and not any(sample.mask for sample in bucket.samples):
            full = why_misplaced(placement, bucket.samples, bucket.cp_size, FULL)
            reason = reason if full is not None else None
        if reason is not None:
            return reason
        buffers = buffer_tokens_of(placement, bucket.cp_size, bucket.first_lane, lanes_in_one_node(topology))
        return why_too_much_fetched(buffers, max_tokens_per_rank)

    def lane_seconds(self, stage: StageAttention, bucket: Bucket, micro_batch: MicroBatch) -> Floats:
        from dynamic_cp.mechanisms.placed_seconds import placed_seconds

        assert bucket.placement is not None
        return placed_seconds(stage, bucket.placement, bucket.samples, bucket.cp_size, bucket.first_lane)

    def kernel_seconds(self, stage: StageAttention, bucket: Bucket) -> Floats:
        from dynamic_cp.mechanisms.placed_seconds import kernel_seconds

        assert bucket.placement is not None
        seconds: Floats = kernel_seconds(stage, bucket.placement, bucket.samples, bucket.cp_size).sum(axis=1)
        return seconds

    def floor(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        """Return even shares of the tiles at the better rate of the two kernels, with nothing exchanged."""
        forward, backward = (
            Convex(Linear(0.0, 0.0, min(side.first.per_token2, side.later.per_token2) / cp_size))
            for side in stage.sides
        )
        return forward, backward

    def kept_bytes(self, cp_size: int, inner: int, query_bytes: float, kv_bytes: float, copies: int) -> float:
        """Return what backward keeps: queries, outputs and two gradients of rows, columns and their gradients.

        Gradients are summed up in float32.
        """
        rows, columns = MOST_FETCHED
        return (1 + rows) * 2.5 * query_bytes + (1 + columns) * 3.0 * kv_bytes

    def sent_by_lanes(
        self, bucket: Bucket, tokens: Sequence[int], node_lanes: int, of: TokenBytes, copies: int
    ) -> Sent:
        from dynamic_cp.placement.sent import sent_by_lanes

        assert bucket.placement is not None
        return sent_by_lanes(bucket.placement, bucket.first_lane, node_lanes, of)

    def lane_parts(self, bucket: Bucket, topology: Topology) -> Sequence[object] | None:
        from dynamic_cp.placement.programme import programmes_of

        assert bucket.placement is not None
        node_lanes = lanes_in_one_node(topology)
        programmes = programmes_of(bucket.placement, bucket.cp_size, bucket.first_lane, node_lanes)
        return [programme.as_json() for programme in programmes]


def why_too_much_fetched(buffers: Sequence[tuple[int, int]], max_tokens_per_rank: int) -> str | None:
    """Return why a lane has no room for what it fetches, with the numbers; None where all have.

    Args:
        buffers: [lane] -> tokens of its buffers of (rows, columns), of `buffer_tokens_of`.
        max_tokens_per_rank: the limit for the tokens that a lane holds.
    """
    for what, times, tokens in zip(("queries", "keys"), MOST_FETCHED, zip(*buffers, strict=True), strict=True):
        if max(tokens) > times * max_tokens_per_rank:
            return (
                f"lane {tokens.index(max(tokens))} of its placement fetches {max(tokens)} tokens' {what} at a time, "
                f"the limit is {times} times {max_tokens_per_rank}: raise max_tokens_per_rank "
                "(--max-seqlen-per-dp-cp-rank), or plan these samples again"
            )
    return None
