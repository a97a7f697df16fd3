"""What the planner says that a rank sends for one bucket: for tests that count it."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.disaggregated.sent import bytes_of_tasks
from dynamic_cp.mechanisms.placed_seconds import token_bytes
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.mechanisms.transfers import SentBytes, heads_of_rank, kv_heads_of, lanes_in_one_node
from dynamic_cp.models import catalog
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.plans.padding import lane_tokens
from dynamic_cp.pool.legal import servers_of
from dynamic_cp.pool.tasks import ticks_of
from dynamic_cp.types import Bucket, ModelShape, Plan, PlanOptions, Problem, Topology


def sent_by(bucket: Bucket, rank_tokens: int, model: ModelShape, tp_size: int, element_bytes: int) -> SentBytes:
    """Return what a rank of `bucket` with `rank_tokens` padded tokens sends in the forward pass of a layer."""
    heads = heads_of_rank(model, tp_size)
    assert heads is not None
    queries, keys = (2 * number * model.kv_channels * element_bytes * rank_tokens for number in heads)
    copies = kv_heads_of(*heads, bucket.inner_cp_size).copies
    mechanism = MECHANISMS[bucket.cp_comm_type]
    if mechanism.sends_narrow_values and model.has_latents:
        keys = heads[1] * (model.kv_channels + model.v_head_dim) * element_bytes * rank_tokens
    latents = model.layer.latent_size * element_bytes * rank_tokens
    return mechanism.sent_bytes(bucket.cp_size, bucket.inner_cp_size, queries, keys, copies, latents)


def placed_bytes(bucket: Bucket, model: ModelShape, topology: Topology, element_bytes: int) -> NDArray[np.float64]:
    """Return [forward or backward, lane] what a rank of each lane of a placed bucket sends in the first stage."""
    heads = heads_of_rank(model, topology.tp_size)
    assert heads is not None
    options = PlanOptions(max_tokens_per_rank=1, bytes_per_element=element_bytes, cp_comm_types=("p2p",))
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


def pool_bytes(plan: Plan, model: ModelShape, repeats: bool) -> NDArray[np.float64]:
    """Return [server] what a rank of each sends for attention; `repeats`: backward computes it a second time."""
    options = PlanOptions(max_tokens_per_rank=1, bytes_per_element=4, cp_comm_types=("p2p",))
    hardware = catalog.load_hardware("h100")
    problem = Problem(topology=plan.topology, model=model, hardware=hardware, options=options)
    assert plan.extension is not None
    servers = servers_of(plan.topology, plan.extension.relay_servers)
    chunk = StageAttention(model.stages(plan.topology.pp_size * plan.topology.vp_size)[0], problem, servers.of_node)
    (kind,) = chunk.kinds
    total = np.zeros(plan.num_servers)
    for tick, tasks in ticks_of(plan):
        directions = [0] if tick.kind == KINDS[0] else [0, 1] if repeats else [1]
        is_kept = repeats and plan.extension.num_nano_batches == 2  # backward uses what was fetched again just before
        sent = bytes_of_tasks(tasks, directions, servers, token_bytes(kind), is_kept=is_kept)
        total += sent[:, :, 0].sum(axis=(0, 1))
    return total
