"""blocks: every home and tile of a bucket has a lane of its own choice (`Bucket.placement`). Where lanes of a node
exchange heads (`Bucket.inner_cp_size`), inner groups take the place of lanes: each of their lanes computes all tiles
for some heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.mechanisms.mechanism import LaneSeconds, Mechanism, Sharing, pairs_of_inner_groups
from dynamic_cp.mechanisms.stage_attention import Convex, Linear, StageAttention
from dynamic_cp.mechanisms.transfers import lanes_in_one_node, sent_bytes, why_inner_groups_are_split
from dynamic_cp.types import CAUSAL, FULL, Bucket, Causal, Lambda, Mask, MicroBatch, Placement, Topology

if TYPE_CHECKING:
    from dynamic_cp.placement.sent import Sent, TokenBytes
    from dynamic_cp.types.placement import Lanes

# `dynamic_cp.placement` is compiled. It is imported late, so that no command waits for the compiler in vain.

MOST_FETCHED = (3, 8)
"""(Rows, columns) that a lane may fetch at a time, over the limit of tokens per rank."""

FETCHED_QUERIES, FETCHED_KEYS = 2.5, 3.0
"""Buffers per row, in units of its queries and outputs, and per column, in units of its keys and values: these, two
gradients of outputs and queries, and the float32 sums of gradients of keys and values."""
AGAIN_QUERIES, AGAIN_KEYS = 1.5, 1.0
"""The same in a forward pass: queries, outputs summed in float32, keys and values."""
COLLECTED_KEYS = 2.0
"""The same for the gradients of keys and values that a relay's neighbours return, which are summed apart."""


class Blocks(Mechanism):
    """Tiles run where their data are, or where time is; rows and columns travel to them, and sums travel back."""

    name = "blocks"
    has_closed_form = False
    serves_masks = True

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        sizes = (1 << k for k in range((cp_size // 2).bit_length() - 1, -1, -1))
        return tuple(size for size in sizes if size == 1 or (cp_size % size == 0 and sharing.may_be_inner(size)))

    def why_illegal(self, bucket: Bucket, topology: Topology, max_tokens_per_rank: int) -> str | None:
        from dynamic_cp.placement.programme import buffer_tokens_of

        placement = bucket.placement
        if placement is None:
            return (
                f"its attention is placed on {bucket.cp_size} lanes, but it has no placement: plan these samples again"
            )
        if bucket.inner_cp_size > 1:
            if bucket.first_lane % bucket.inner_cp_size:
                return (
                    f"first_lane {bucket.first_lane} is not a multiple of inner_cp_size {bucket.inner_cp_size}: use "
                    "aligned inner groups only, others are never created"
                )
            reason = why_inner_groups_are_split(bucket, topology)
            if reason is not None:
                return reason
        groups = _groups_of(bucket, lanes_in_one_node(topology))
        reason = _why_misplaced(placement, bucket, groups)
        if reason is not None:
            return reason
        return why_too_much_fetched(bucket, buffer_tokens_of(placement, bucket.samples, groups), max_tokens_per_rank)

    def lane_seconds(self, stage: StageAttention, bucket: Bucket, micro_batch: MicroBatch) -> LaneSeconds:
        from dynamic_cp.mechanisms.placed_seconds import placed_seconds

        assert bucket.placement is not None
        inner = bucket.inner_cp_size
        groups = _groups_of(bucket, stage.node_lanes)
        one = stage.of_inner_group(inner)
        seconds = placed_seconds(one, bucket.placement, bucket.samples, groups)
        if inner == 1:
            return seconds
        heads = stage.heads_of_group(inner)
        heads_s = heads.constant + heads.per_token * np.array(bucket.placement.home_tokens(groups.number))
        both = seconds.attention + heads_s, seconds.host + stage.host_s(0, 1)
        return LaneSeconds(*(np.repeat(one, inner, axis=1) for one in both))

    def kernel_seconds(self, stage: StageAttention, bucket: Bucket) -> Floats:
        from dynamic_cp.mechanisms.placed_seconds import kernel_seconds

        assert bucket.placement is not None
        one = stage.of_inner_group(bucket.inner_cp_size)
        seconds = kernel_seconds(one, bucket.placement, bucket.samples, _groups_of(bucket, stage.node_lanes))
        return np.repeat(seconds, bucket.inner_cp_size, axis=1)

    def floor(self, stage: StageAttention, cp_size: int, inner: int, copies: int, link: int) -> tuple[Convex, Convex]:
        """Even shares of the tiles at the better rate of the two kernels, with nothing exchanged."""
        forward, backward = (
            Convex(Linear(0.0, 0.0, min(side.first.per_token2, side.later.per_token2) / cp_size))
            for side in stage.sides
        )
        return forward, backward

    def kept_bytes(
        self, cp_size: int, inner: int, query_bytes: float, kv_bytes: float, copies: int, latent_bytes: float = 0.0
    ) -> float:
        """Queries, outputs and two gradients of rows; columns and their gradients, summed in float32. Where heads are
        exchanged, queries and outputs are kept in both layouts; repeated KV heads count as fetched."""
        rows, columns = MOST_FETCHED
        exchanged = query_bytes if inner > 1 else 0.0
        return exchanged + (1 + rows) * FETCHED_QUERIES * query_bytes + (1 + columns) * FETCHED_KEYS * kv_bytes

    def sent_by_lanes(
        self, bucket: Bucket, tokens: Sequence[int], node_lanes: int, of: TokenBytes, copies: int, mask: Mask = CAUSAL
    ) -> Sent:
        from dynamic_cp.placement.cuts import placement_under
        from dynamic_cp.placement.sent import Sent, TokenBytes, sent_by_lanes

        assert bucket.placement is not None
        inner, groups = bucket.inner_cp_size, _groups_of(bucket, node_lanes)
        placement = placement_under(bucket.placement, bucket.samples, mask, groups)
        of_lane = TokenBytes(of.query / inner, copies * of.kv / inner, of.lse / inner)
        sent = sent_by_lanes(placement, groups, of_lane)
        if inner == 1:
            return sent
        members = np.arange(inner)
        across = ((lanes[:, None] * inner + members).ravel() for lanes in (sent.sender, sent.receiver))
        among = pairs_of_inner_groups(bucket.cp_size, inner)
        per_token = sent_bytes(inner, inner, 2 * of.query, of.kv, copies).inner / (inner - 1)
        heads = np.broadcast_to(per_token * np.asarray(tokens, np.float64)[among[0]], (2, len(among[0])))
        sender, receiver = (np.concatenate(both) for both in zip(across, among, strict=True))
        return Sent(sender, receiver, np.concatenate([np.repeat(sent.num_bytes, inner, axis=1), heads], axis=1))

    def lane_parts(self, bucket: Bucket, topology: Topology) -> Sequence[object] | None:
        from dynamic_cp.placement.programme import programmes_of

        assert bucket.placement is not None
        lanes = _groups_of(bucket, lanes_in_one_node(topology))
        programmes = programmes_of(bucket.placement, bucket.samples, lanes)
        return [part for one in programmes for part in [one.as_json()] * bucket.inner_cp_size]


def _groups_of(bucket: Bucket, node_lanes: int) -> Lanes:
    """Return the inner groups of a bucket; its lanes if they exchange no heads."""
    from dynamic_cp.types.placement import Lanes

    inner = bucket.inner_cp_size
    return Lanes(bucket.num_inner_groups, bucket.first_lane // inner, node_lanes // inner)


def _why_misplaced(placement: Placement, bucket: Bucket, lanes: Lanes) -> str | None:
    """Return why a placement does not compute what the masks of its layers and samples allow; None if it does."""
    from dynamic_cp.placement.cuts import placement_under
    from dynamic_cp.placement.legal import why_misplaced

    samples = bucket.samples
    masked = next((sample for sample in samples if sample.mask is not None), None)
    if not placement.layer_masks:
        reason = why_misplaced(placement, samples, lanes.number)
        # Layers with a full mask have samples without masks.
        if reason is None or masked is not None:
            return reason
        return None if why_misplaced(placement, samples, lanes.number, FULL) is None else reason
    first, *others = placement.layer_masks
    shown = ", ".join(map(str, placement.layer_masks))
    if [type(mask) for mask in placement.layer_masks] not in ([Lambda], [Causal, Lambda]):
        return (
            f"its placement is for layers with the masks {shown}, one window is possible, with or without causal "
            "layers before it: plan these samples again"
        )
    reason = why_misplaced(placement, samples, lanes.number, first)
    if reason is not None or not others:
        return reason
    narrower = placement_under(placement, samples, others[0], lanes)
    return why_misplaced(narrower, samples, lanes.number, others[0])


def why_too_much_fetched(
    bucket: Bucket, buffers: Sequence[tuple[int, int]], max_tokens_per_rank: int, copies: int = 1
) -> str | None:
    """Return why a lane of a placed bucket has no room for what it fetches, with the numbers; None if all have room.
    `buffers`: [lane of the placement] -> `buffer_tokens_of`; every copy of KV heads but the first counts as fetched."""
    inner = bucket.inner_cp_size
    assert bucket.placement is not None
    repeated = (copies - 1) * max(bucket.placement.home_tokens(bucket.num_inner_groups))
    shared = [(-(-rows // inner), -(-(copies * columns + repeated) // inner)) for rows, columns in buffers]
    for what, times, tokens in zip(("queries", "keys"), MOST_FETCHED, zip(*shared, strict=True), strict=True):
        if max(tokens) > times * max_tokens_per_rank:
            return (
                f"lane {tokens.index(max(tokens))} of its placement fetches {max(tokens)} tokens' {what} at a time, "
                f"the limit is {times} times {max_tokens_per_rank}: raise max_tokens_per_rank "
                "(--max-seqlen-per-dp-cp-rank), or plan these samples again"
            )
    return None
