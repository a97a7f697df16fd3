"""Bytes that a plan's exchanges send by kind of link: attention, and linear attention by heads or by states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.mechanisms.mechanism import Sharing, pairs_of_inner_groups
from dynamic_cp.mechanisms.placed_seconds import token_bytes
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.mechanisms.transfers import heads_of_rank, lanes_in_one_node
from dynamic_cp.placement.sent import Sent, TokenBytes, added
from dynamic_cp.plans.padding import lane_tokens, padded_of, rank_tokens
from dynamic_cp.plans.stretches import Stretches
from dynamic_cp.pricing.cost_model import is_priced_lane_by_lane
from dynamic_cp.pricing.linear_prices import sent_states
from dynamic_cp.types import Bucket, Mask, Plan, Problem, Topology


class SentBytes(NamedTuple):
    """Bytes that all ranks send for attention in one iteration, inside nodes and to other nodes."""

    in_node: float
    across_nodes: float


_OfMasks = Mapping[Mask, TokenBytes]
"""Mask -> bytes of a token in all layers with that mask."""


def sent_by_plan(plan: Plan, problem: Problem) -> SentBytes:
    """Return what the exchanges of all buckets send: forward, backward, and forward again where it is recomputed."""
    topology = problem.topology
    total = np.zeros(2)
    for stage in topology.stages_that_differ:
        # Stages whose lanes lie on nodes in the same way are counted at once.
        alike = range(topology.pp_size) if len(topology.stages_that_differ) == 1 else range(stage, stage + 1)
        total += _sent_on_stage(plan, problem, alike, nodes_of(topology, stage))
    return SentBytes(*(topology.tp_size * total).tolist())


def sent_by_bucket(bucket: Bucket, problem: Problem) -> Sent:
    """Return what the lanes of a bucket send in all layers of the model, for one TP rank of each lane."""
    tokens, stages = lane_tokens(bucket, problem.topology.rank_token_multiple), range(problem.topology.pp_size)
    sent = _sent(bucket, tokens, problem, _of_stages(problem, stages))
    layers = _linear_layers(problem, stages)
    return added([sent, _sent_by_linear_attention(bucket, problem, layers)]) if layers else sent


def nodes_of(topology: Topology, stage: int = 0) -> Ints:
    """Return [lane] -> the node of its first rank on a pipeline stage."""
    ranks = (stage * topology.num_lanes + np.arange(topology.num_lanes)) * topology.tp_size
    return ranks // topology.ranks_per_node


def _of_stages(problem: Problem, stages: range) -> _OfMasks:
    """Return what a token takes in all layers of some stages, mask by mask."""
    node_lanes = lanes_in_one_node(problem.topology)
    layers = problem.model.stages(problem.topology.pp_size)[stages.start : stages.stop]
    by_mask: dict[Mask, list[TokenBytes]] = {}
    for of_stage in layers:
        for kind in StageAttention(of_stage, problem, node_lanes).kinds:
            by_mask.setdefault(kind.mask, []).append(token_bytes(kind))
    return {mask: TokenBytes(*(sum(values) for values in zip(*each, strict=True))) for mask, each in by_mask.items()}


def _linear_layers(problem: Problem, stages: range) -> float:
    of_stages = problem.model.stages(problem.topology.pp_size)[stages.start : stages.stop]
    return sum(stage.linear_attention.num_layers for stage in of_stages)


def _sent_by_linear_attention(bucket: Bucket, problem: Problem, layers: float) -> Sent:
    """Return what the lanes of a bucket send in `layers` layers with linear attention, for one TP rank of each lane.
    Limit: heads that lanes share unevenly are counted as spread evenly."""
    linear, cp_size = problem.model.linear_attention, bucket.cp_size
    assert linear is not None, "the model has such layers"
    sizes, element = linear.of_rank(problem.topology.tp_size), problem.options.element_bytes.exchanged
    multiple = problem.topology.rank_token_multiple
    if bucket.exchanges_states:
        sent = sent_states(Stretches.of_bucket(bucket, multiple), sizes, element)
        return sent._replace(num_bytes=layers * sent.num_bytes)
    of_lane = sum(padded_of(bucket, multiple)) / cp_size * sizes.heads_bytes(cp_size, element)
    sender, receiver = pairs_of_inner_groups(cp_size, cp_size)
    return Sent(sender, receiver, np.full((2, len(sender)), layers * of_lane / (cp_size - 1)))


def _sent_on_stage(plan: Plan, problem: Problem, stages: range, nodes: Ints) -> Floats:
    """Return [link] -> bytes that one TP rank of every lane sends, in all layers of some stages."""
    of_token, layers = _of_stages(problem, stages), _linear_layers(problem, stages)
    multiple, total = problem.topology.rank_token_multiple, np.zeros(2)
    again = problem.recomputed_share(stages) if "core_attn" in problem.options.repeated else 0.0
    times = np.array([1.0 + again, 1.0])
    # If all lanes of a bucket hold equally many tokens, its bytes are proportional to them.
    of_one_token: dict[Bucket, Floats] = {}
    for bucket in plan.buckets:
        if bucket.cp_size == 1:
            continue
        own_nodes = nodes[bucket.first_lane : bucket.lanes.stop]
        if layers:
            total += times @ _sent_by_linear_attention(bucket, problem, layers).of_lanes(own_nodes).sum(axis=2)
        if is_priced_lane_by_lane(bucket):
            sent = _sent(bucket, lane_tokens(bucket, multiple), problem, of_token)
            total += times @ sent.of_lanes(own_nodes).sum(axis=2)
            continue
        kind = Bucket(
            first_lane=bucket.first_lane,
            cp_size=bucket.cp_size,
            cp_comm_type=bucket.cp_comm_type,
            inner_cp_size=bucket.inner_cp_size,
        )
        if kind not in of_one_token:
            sent = _sent(kind, [1] * kind.cp_size, problem, of_token)
            of_one_token[kind] = times @ sent.of_lanes(own_nodes).sum(axis=2)
        total += rank_tokens(bucket, multiple) * of_one_token[kind]
    return total


def _sent(bucket: Bucket, tokens: Sequence[int], problem: Problem, of_token: _OfMasks) -> Sent:
    node_lanes = lanes_in_one_node(problem.topology)
    sharing = Sharing(heads_of_rank(problem.model, problem.topology.tp_size), node_lanes)
    copies = sharing.copies(bucket.inner_cp_size)
    mechanism = MECHANISMS[bucket.cp_comm_type]
    return added(
        [mechanism.sent_by_lanes(bucket, tokens, node_lanes, of, copies, mask) for mask, of in of_token.items()]
    )
