"""One layer's attention on nodes of lanes: what all ways to share out a micro-batch are priced for, and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.mechanisms.transfers import heads_of_rank, lanes_in_one_node
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import CP_COMM_TYPES, ModelShape, PlanOptions, Problem, Sample, Topology
from dynamic_cp.types.placement import PlacementProblem

LAYER = ModelShape(
    num_layers=1, hidden_size=1, ffn_hidden_size=1, num_attention_heads=8, num_query_groups=2, kv_channels=128,
    vocab_size=1,
)  # fmt: skip
"""Attention of a TP rank of an 8B model at TP 4, as in DCP's experiments; its linear layers weigh nothing."""
_NUM_DRAWN = 20000
_FREE_BYTES_PER_S = 1e30


@dataclass(frozen=True)
class Setting:
    """Nodes, and how many tokens a micro-batch has.

    Attributes:
        num_nodes, node_lanes: of the cluster.
        num_tokens: of a batch, which is kept if it is three quarters full.
        hardware: name of its profile, which has one NIC for each lane.
        node_bytes_per_s: what the NICs of a node carry together, if its lanes share them; 0: they do not.
        flow_bytes_per_s: then, what one lane may have of it.
    """

    num_nodes: int = 8
    node_lanes: int = 8
    num_tokens: int = 131072
    hardware: str = "h100"
    node_bytes_per_s: float = 0.0
    flow_bytes_per_s: float = 0.0

    @property
    def num_lanes(self) -> int:
        return self.num_nodes * self.node_lanes

    def across_bytes_per_s(self, num_sending: int) -> float:
        """Return the bandwidth of each of so many lanes of a node that send to other nodes at the same time."""
        if not self.node_bytes_per_s:
            return load_hardware(self.hardware).bandwidth_across_nodes_bytes_per_s
        return min(self.flow_bytes_per_s, self.node_bytes_per_s / num_sending)

    @cached_property
    def problem(self) -> Problem:
        hardware = replace(
            load_hardware(self.hardware),
            bandwidth_across_nodes_bytes_per_s=self.across_bytes_per_s(self.node_lanes),
            forward_overhead_s_per_layer=0.0,
            backward_overhead_s_per_layer=0.0,
            overhead_s_per_bucket_stage=0.0,
            host_forward_s_per_layer=0.0,
            host_backward_s_per_layer=0.0,
            host_ring_step_s_per_layer=0.0,
            host_message_s_per_layer=0.0,
        )
        topology = Topology(num_lanes=self.num_lanes, ranks_per_node=self.node_lanes)
        options = PlanOptions(max_tokens_per_rank=self.num_tokens, cp_comm_types=CP_COMM_TYPES)
        return Problem(topology=topology, model=LAYER, hardware=hardware, options=options)

    @cached_property
    def cost_model(self) -> CostModel:
        problem = self.problem
        return CostModel(problem)

    @cached_property
    def stage(self) -> StageAttention:
        return _stage_of(self.problem)

    @cached_property
    def stage_with_free_links(self) -> StageAttention:
        free = replace(
            self.problem.hardware,
            exchange_latency_s_per_layer=0.0,
            bandwidth_in_node_bytes_per_s=_FREE_BYTES_PER_S,
            bandwidth_across_nodes_bytes_per_s=_FREE_BYTES_PER_S,
        )
        return _stage_of(replace(self.problem, hardware=free))

    @cached_property
    def sharing(self) -> Sharing:
        return Sharing(heads_of_rank(LAYER, 1), self.node_lanes)

    @property
    def placement_problem(self) -> PlacementProblem:
        attention = self.cost_model.stage.attention
        query_bytes, kv_bytes = attention.query_bytes, attention.kv_bytes
        return PlacementProblem(
            num_lanes=self.num_lanes,
            node_lanes=self.node_lanes,
            row_bytes=round(query_bytes),
            column_bytes=round(kv_bytes),
        )

    def batches(self, workload: str, count: int, scale: float = 1.0, seed: int = 0) -> Iterator[list[int]]:
        """Yield the lengths of `count` batches: documents as they come, each `scale` times as long."""
        batch: list[int] = []
        for drawn in draw_lengths(workload, _NUM_DRAWN, seed, self.num_tokens, min_seqlen=1).tolist():
            size = min(max(1, round(scale * drawn)), self.num_tokens)
            if sum(batch) + size > self.num_tokens:
                if sum(batch) >= 0.75 * self.num_tokens:
                    yield batch
                    count -= 1
                    if not count:
                        return
                batch = []
            batch.append(size)


H100_NODES = Setting()
PAPER_NODES = Setting(num_nodes=4, hardware="a100-80gb", node_bytes_per_s=0.8 * 50e9, flow_bytes_per_s=0.8 * 12.5e9)
"""The cluster of DCP's experiments: 4 nodes of 8 A100, each node with 4 NICs of 100 Gb/s."""


def _stage_of(problem: Problem) -> StageAttention:
    (stage,) = problem.model.stages(1)
    return StageAttention(stage, problem, lanes_in_one_node(problem.topology))


def masked(seqlens: list[int], rule: str) -> list[Sample]:
    """Return samples of these lengths, the longest first, with masks by a rule."""
    mask_of = parse_mask_rule(rule)
    return [
        Sample(sample_id=number, seqlen=size, mask=mask_of(size))
        for number, size in enumerate(sorted(seqlens, reverse=True))
    ]
