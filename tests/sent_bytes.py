"""What the planner says that a rank sends for one bucket: for tests that count it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.mechanisms.heads import heads_of_rank, kv_heads_of
from dynamic_cp.mechanisms.links import lanes_in_one_node
from dynamic_cp.mechanisms.placed_seconds import token_bytes
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.sent_bytes import SentBytes
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.models import catalog
from dynamic_cp.plans.lane_tokens import lane_tokens
from dynamic_cp.types import Bucket, ModelShape, PlanOptions, Problem, Topology


def sent_by(bucket: Bucket, rank_tokens: int, model: ModelShape, tp_size: int, element_bytes: int) -> SentBytes:
    """Return what a rank of `bucket` with `rank_tokens` padded tokens sends in the forward pass of a layer."""
    heads = heads_of_rank(model, tp_size)
    assert heads is not None
    queries, keys = (2 * number * model.kv_channels * element_bytes * rank_tokens for number in heads)
    copies = kv_heads_of(*heads, bucket.inner_cp_size).copies
    mechanism = MECHANISMS[bucket.cp_comm_type]
    latents = model.layer.latent_size * element_bytes * rank_tokens
    return mechanism.sent_bytes(bucket.cp_size, bucket.inner_cp_size, queries, keys, copies, latents)


def placed_bytes(bucket: Bucket, model: ModelShape, topology: Topology, element_bytes: int) -> NDArray[np.float64]:
    """Return [forward or backward, lane] what a rank of each lane of a placed bucket sends in the first stage."""
    heads = heads_of_rank(model, topology.tp_size)
    assert heads is not None
    options = PlanOptions(max_tokens_per_rank=1, bytes_per_element=element_bytes)
    problem = Problem(topology=topology, model=model, hardware=catalog.load_hardware("h100"), options=options)
    stage = StageAttention(model.stages(topology.pp_size)[0], problem, lanes_in_one_node(topology))
    tokens, copies = lane_tokens(bucket, topology.rank_token_multiple), kv_heads_of(*heads, bucket.inner_cp_size).copies
    mechanism = MECHANISMS[bucket.cp_comm_type]
    total = np.zeros((2, bucket.cp_size))
    for kind in stage.kinds:
        of_token = token_bytes(kind)
        sent = mechanism.sent_by_lanes(bucket, tokens, stage.node_lanes, of_token, copies, kind.mask)
        total += sent.of_lanes(np.arange(bucket.cp_size)).sum(axis=1)
    return total
