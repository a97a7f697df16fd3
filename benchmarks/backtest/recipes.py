"""What recipes of published runs cost besides, where no job of this project can have it: counted, not fitted.

Sequences of a run have one length, so what grows with tokens is a constant of a layer here.
"""

from __future__ import annotations

from dataclasses import replace

from dynamic_cp.types import Hardware, ModelShape

ROPE_S = 0.00021, 0.00023
"""Of the host, (forward, backward), for a sample of a pack in a layer: since its pull request 5243 (June 2026, in
megatron-core 0.19) Megatron-LM rotates packs sample by sample unless RoPE is fused. Queries and keys take 28 launches
in each direction (counted), at the 3 us that hardware files take, and 130 and 145 us of a CPU (measured with 2 tokens a
sample on one core of a server CPU)."""


def with_split_experts(hardware: Hardware, model: ModelShape, tokens: float, ep_size: int, tp_size: int) -> Hardware:
    """Return the prices of a layer whose experts are split over `tp_size` TP ranks each, for so many tokens of a rank.

    Ranks of an EP group lie `tp_size` apart, so fewer of them share a node. Behind its exchange the TP ranks gather
    what they got, and before the way back they add up their parts: megatron-core 0.10's `MoEAlltoAllTokenDispatcher`.
    """
    experts = model.experts
    assert experts is not None, "only experts are split"
    in_node_s = 1 / hardware.collective_bandwidth_in_node_bytes_per_s
    copies = tokens * experts.topk * model.hidden_size * 2  # in bytes

    def exchange_s(stride: int) -> float:
        near = min(ep_size, max(1, int(hardware.ranks_per_node) // stride))
        far_s = (ep_size - near) / hardware.bandwidth_across_nodes_bytes_per_s
        return copies / ep_size * ((near - 1) * in_node_s + far_s)

    more_s = 2 * (exchange_s(tp_size) - exchange_s(1) + (tp_size - 1) * copies * in_node_s)
    return replace(
        hardware,
        forward_overhead_s_per_layer=hardware.forward_overhead_s_per_layer + more_s,
        backward_overhead_s_per_layer=hardware.backward_overhead_s_per_layer + more_s,
    )


def with_rope_by_sample(hardware: Hardware, num_samples: int) -> Hardware:
    """Return the prices of a layer that rotates packs of so many samples one by one."""
    forward_s, backward_s = ROPE_S
    return replace(
        hardware,
        host_forward_s_per_layer=hardware.host_forward_s_per_layer + num_samples * forward_s,
        host_backward_s_per_layer=hardware.host_backward_s_per_layer + num_samples * backward_s,
    )
