"""How many padded tokens each lane of a bucket holds: even shares, unless its mechanism places them otherwise."""

from __future__ import annotations

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.plans.padding import placed_tokens, rank_tokens
from dynamic_cp.types import Bucket, Plan


def lane_tokens(bucket: Bucket, rank_token_multiple: int = 1) -> tuple[int, ...]:
    """Return the padded tokens of each lane of `bucket`: those of every rank of the lane."""
    if bucket.placement is not None:
        return placed_tokens(bucket, rank_token_multiple)
    even = rank_tokens(bucket, rank_token_multiple)
    return (even,) if bucket.cp_size == 1 else MECHANISMS[bucket.cp_comm_type].lane_tokens(bucket, even)


def lane_tokens_of(plan: Plan) -> Ints:
    """Return [micro-batch, lane] -> padded tokens of a rank."""
    multiple = plan.topology.rank_token_multiple
    return np.array(
        [
            [tokens for bucket in micro_batch.buckets for tokens in lane_tokens(bucket, multiple)]
            for micro_batch in plan.micro_batches
        ],
        np.int64,
    )
