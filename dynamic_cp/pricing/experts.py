"""What routed experts cost on one pipeline stage, and how they couple the lanes of an EP block.

In each of its layers with experts, the lanes of a block compute attention and whatever else is their own (A, priced by
`stage.py`), exchange copies of their tokens by all-to-all (X), compute what they got (E) and exchange it back. Nobody
is done before all are, so a chunk takes, in one direction,

    max over lanes of A + constant + per_mean * (mean tokens of the block's lanes) + per_routed * (most tokens routed)

Attention takes the lanes' maximum, experts their average: level rows are those of level A, whatever the tokens. With

    R        copies of a token: topk layers' worth, each hidden_size channels wide
    E        imbalance * (GEMMs of R + sorting R by expert), and `expert_extra_tokens` more for each expert of a rank
             in grouped products at `expert_flops_per_s`, whose inner dimensions count as `expert_extra_channels`
             longer; one expert after the other (`Experts.grouped` False) its products run at the rate of any GEMM, and
             each expert of a rank takes LAUNCH_SHARE of the constants of a layer besides, on the GPU and on the host.
             In FP8, casting R and what its products keep
    X        R twice over the links that a block spans, by the lane that sends or gets most:
             max(tokens of the fullest lane, imbalance * mean), and twice the latency of an exchange. All-to-all sends
             each copy; DeepEP and HybridEP send a token once to each node, and there once to each rank (experts are
             chosen alike, within the groups of a token). While another micro-batch computes, EXPOSED_SHARE of X is left
    A        has the copying of R on its lane, out and back

Backward: GEMMs at their ratio, the rest once more; and what recomputation repeats.

Limits: dense layers between those with experts count as if lanes met in each of them, too (their maxima would add up
otherwise only where different lanes have most work in different layers). The imbalance is the same in all layers.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamic_cp.mechanisms.transfers import lanes_in_one_node, links_of
from dynamic_cp.pricing.edges import memory_s
from dynamic_cp.types import ACROSS_NODES, Problem, Stage, Topology

LAUNCH_SHARE = 0.25
"""Of what a layer takes however few tokens it has: its MLP alone. Of the host's time of megatron-core's local layer it
is 19% forward and 33% backward, measured on a CPU with 16 tokens; taken for the GPU's constants, too."""
EXPOSED_SHARE = 0.6
"""Of an exchange that overlaps. Source: Qwen3-30B on 16 H100 (Megatron-Bridge, skills, May to August 2026): all-to-all
41.25 s, overlapped 31.31 s, 39% of the exchange as it is priced here; of HybridEP's 37% were hidden in a trace."""
CAST_BYTES = 4
"""Read in bf16 and written in FP8, by rows and by columns: of what a product takes, and of the gradient of its output;
half of it forward, half backward."""
COPY_PASSES = 4
"""Passes through memory to bring copies into order and, later, back: each reads and writes them. An estimate."""


class ExpertPrice(NamedTuple):
    """Seconds of the experts of a stage in one direction: what comes on top of the longest A of a block."""

    constant: float = 0.0
    per_mean: float = 0.0
    per_routed: float = 0.0

    def plus(self, other: ExpertPrice, times: float = 1.0) -> ExpertPrice:
        """Return the sum of this and `times` another."""
        return ExpertPrice(*(one + times * two for one, two in zip(self, other, strict=True)))


def copying_s_per_token(stage: Stage, problem: Problem) -> float:
    """Return the seconds of bringing a token's copies into order on its lane, and what comes back into its place."""
    return memory_s(COPY_PASSES * _routed_bytes(stage, problem), problem.hardware)


def cast_s(channels: float, problem: Problem) -> float:
    """Return the seconds of casting so many channels of a token to FP8, in one direction; 0 in bf16."""
    moved_bytes = CAST_BYTES / 2 * channels / problem.topology.tp_size
    return memory_s(moved_bytes, problem.hardware) if problem.options.fp8 else 0.0


def expert_prices(stage: Stage, problem: Problem, recomputed_share: float = 1.0) -> tuple[ExpertPrice, ExpertPrice]:
    """Return the price of the experts of a stage (forward, backward); all 0 of a dense one. `recomputed_share`: of its
    layers, in which backward repeats what the options say."""
    hardware, topology, experts = problem.rates, problem.topology, problem.model.experts
    num_layers = stage.sum(lambda layer: layer.num_experts > 0)
    if experts is None or not num_layers:
        return ExpertPrice(), ExpertPrice()
    imbalance = problem.model.imbalance(topology.ep_size)
    flops_per_s = (hardware.expert_flops_per_s if experts.grouped else 0.0) or hardware.linear_flops_per_s
    met = 2 * stage.sum(lambda layer: layer.expert_weights) / topology.tp_size * _narrowness(problem)
    held = 2 * stage.sum(lambda layer: layer.held_expert_weights) / topology.ep_size
    gemms = ExpertPrice(held * hardware.expert_extra_tokens / flops_per_s, imbalance * met / flops_per_s)
    copied_s = copying_s_per_token(stage, problem)
    if problem.options.fp8:  # rows of experts are padded and cut again
        copied_s *= 2
    copied_s += cast_s(stage.sum(lambda layer: layer.routed_kept_channels + layer.routed_channels), problem)
    moved = ExpertPrice(0.0, imbalance * copied_s)
    if topology.ep_size > 1:
        latency_s = 2 * num_layers * hardware.exchange_latency_s_per_layer
        sent_s = 2 * _routed_bytes(stage, problem) * _s_per_byte(problem) * (EXPOSED_SHARE if experts.overlapped else 1)
        moved = moved.plus(ExpertPrice(latency_s, 0.0, sent_s))
    launches = launched_layers(stage, problem)
    forward = gemms.plus(moved).plus(ExpertPrice(launches * hardware.forward_overhead_s_per_layer))
    backward = ExpertPrice(launches * hardware.backward_overhead_s_per_layer).plus(moved)
    backward = backward.plus(gemms, hardware.linear_backward_over_forward)
    if "moe" in problem.options.repeated:
        backward = backward.plus(forward, recomputed_share)
    return forward, backward


def _narrowness(problem: Problem) -> float:
    """Return the seconds of an expert's products over those of products that are as large and as wide as one likes."""
    model, extra = problem.model, problem.rates.expert_extra_channels
    if model.experts is None or not model.experts.grouped:
        return 1.0
    into = 2 / 3 if model.gated_linear_unit else 1 / 2  # of its weights
    return 1.0 + extra * (into / model.hidden_size + (1 - into) / model.experts.ffn_hidden_size)


def launched_layers(stage: Stage, problem: Problem) -> float:
    """Return how many layers' constants a rank of `stage` pays for its experts; 0 where they are grouped."""
    experts = problem.model.experts
    if experts is None or experts.grouped:
        return 0.0
    num_layers = stage.sum(lambda layer: layer.num_experts > 0)
    return LAUNCH_SHARE * num_layers * experts.num_experts / problem.topology.ep_size


def _routed_bytes(stage: Stage, problem: Problem) -> float:
    """Return the bytes of all copies of a token of a lane that one of its TP ranks has."""
    element = problem.options.element_bytes.activation
    return stage.sum(lambda layer: layer.routed_channels) * element / problem.topology.tp_size


def _s_per_byte(problem: Problem) -> float:
    """Return the seconds per byte routed in an EP block: a share stays on the rank, one in the node, one leaves it."""
    hardware, experts, ranks = problem.hardware, problem.model.experts, problem.topology.ep_size
    near = ranks_of_block_in_node(problem.topology)
    # Nothing computes beside it, as beside keys and values.
    in_node = 1 / max(hardware.bandwidth_in_node_bytes_per_s, hardware.collective_bandwidth_in_node_bytes_per_s)
    across = 1 / hardware.bandwidth_across_nodes_bytes_per_s
    assert experts is not None
    if experts.dispatcher == "alltoall":
        return (near - 1) / ranks * in_node + (ranks - near) / ranks * across

    # A group of experts is on as many nodes as it is spread over, several on one node count as one.
    nodes = ranks / near
    most = experts.group_topk * max(1.0, nodes / experts.num_groups) if experts.num_groups else nodes

    def reached(places: float, most: float) -> float:
        """Return how many other places a token is sent to, over its copies."""
        return (1 - 1 / places) * min(most, places * (1 - (1 - 1 / places) ** experts.topk)) / experts.topk

    return reached(ranks, ranks) * in_node + reached(nodes, most) * across


def ranks_of_block_in_node(topology: Topology) -> int:
    """Return how many ranks of an EP block share a node, in the block that is spread most."""
    lanes = topology.expert_lanes
    if lanes > 1 and ACROSS_NODES in links_of(topology).used[lanes.bit_length() - 1]:
        return min(lanes_in_one_node(topology), lanes) * topology.tp_size
    return topology.ep_size
