"""What the planner says that a rank sends for one bucket: for tests that count it."""

from __future__ import annotations

from dynamic_cp.mechanisms.heads import heads_of_rank, kv_heads_of
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.sent_bytes import SentBytes
from dynamic_cp.types import Bucket, ModelShape


def sent_by(bucket: Bucket, rank_tokens: int, model: ModelShape, tp_size: int, element_bytes: int) -> SentBytes:
    """Return what a rank of `bucket` with `rank_tokens` padded tokens sends in the forward pass of a layer."""
    heads = heads_of_rank(model, tp_size)
    assert heads is not None
    queries, keys = (2 * number * model.kv_channels * element_bytes * rank_tokens for number in heads)
    copies = kv_heads_of(*heads, bucket.inner_cp_size).copies
    mechanism = MECHANISMS[bucket.cp_comm_type]
    return mechanism.sent_bytes(bucket.cp_size, bucket.inner_cp_size, queries, keys, copies)
