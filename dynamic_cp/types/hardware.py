"""Coefficients of the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import largest_power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Coefficients of the cost model, read from `dynamic_cp/data/hardware/*.json` (each number has its source there).

    Formulas: `dynamic_cp.pricing.cost_model`. All are per rank; bandwidths are what a rank reaches, not the
    datasheet's. A default of 0 belongs to an optional term: at 0 it is not priced, unless said otherwise.

    Attributes:
        linear_flops_per_s, linear_extra_tokens: rate of the GEMMs; a pack pays for that many tokens more.
        attention_flops_per_s, attention_extra_tokens: causal forward kernel; on L tokens its rate is
            attention_flops_per_s * L / (L + attention_extra_tokens).
        attention_full_*: the same for a tile without a mask; 0: as causal.
        attention_backward_*, attention_full_backward_*: the same for backward, which has 2.5 times the FLOPs; 0:
            attention_backward_over_forward says how long it takes.
        expert_flops_per_s, expert_extra_tokens: rate of the GEMMs of routed experts (0: linear_flops_per_s), and the
            tokens that each expert of a rank pays for in addition, however few it has.
        expert_extra_channels: channels by which the inner dimension of an expert's GEMM counts as longer: filling and
            emptying a tile takes as long for a narrow expert. In FP8 any GEMM has it, beyond that of bf16.
        fp8_linear_flops_per_s: rate of the GEMMs of layers in FP8, and in proportion of experts; 0: unknown.
        linear_attention_flops_per_s: rate of linear attention's chunk products; 0: linear_flops_per_s / 8.
        head_flops_per_s: rate of the LM head.
        memory_bandwidth_bytes_per_s: of the device's memory; prices the embedding and the loss.
        collective_bandwidth_in_node_bytes_per_s: bus bandwidth, for TP collectives and gradient reduction.
        tp_overlap_exposed_fraction: share of TP collectives that --tp-comm-overlap does not hide.
        collective_device_fraction: share of the device that collectives of lanes take from computation beside them.
        ranks_per_node: ranks of a node, or of a domain of NVLink, where nothing else is said.
        ring_step_overhead_s_per_layer: kernels and merging of one more ring step, not hidden; twice that backward.
        host_forward_s_per_layer, host_backward_s_per_layer: host time to launch a layer; the slower side counts.
        host_expert_forward_s_per_layer, host_expert_backward_s_per_layer: the same besides for router, dispatch and
            routed experts.
        host_ring_step_s_per_layer, host_message_s_per_layer: host time for one more ring step, and for each message or
            all-to-all of an exchange, in either direction.
        hbm_bytes: memory of the device; 0: unknown.
        hbm_reserved_bytes: the part of it that context, libraries and fragmentation take.
        communicator_bytes_per_group: buffers of one process group.
    """

    name: str
    peak_flops_per_s: float
    linear_flops_per_s: float
    attention_flops_per_s: float
    bandwidth_in_node_bytes_per_s: float
    bandwidth_across_nodes_bytes_per_s: float
    p2p_bandwidth_bytes_per_s: float
    exchange_latency_s_per_layer: float
    forward_overhead_s_per_layer: float
    backward_overhead_s_per_layer: float
    overhead_s_per_bucket_stage: float
    linear_extra_tokens: float = 0.0
    attention_extra_tokens: float = 0.0
    attention_full_flops_per_s: float = 0.0
    attention_full_extra_tokens: float = 0.0
    attention_backward_flops_per_s: float = 0.0
    attention_backward_extra_tokens: float = 0.0
    attention_full_backward_flops_per_s: float = 0.0
    attention_full_backward_extra_tokens: float = 0.0
    linear_backward_over_forward: float = 2.0
    attention_backward_over_forward: float = 2.5
    exchange_backward_over_forward: float = 2.0
    recompute_overhead_credit: float = 0.5
    expert_flops_per_s: float = 0.0
    expert_extra_tokens: float = 0.0
    expert_extra_channels: float = 0.0
    fp8_linear_flops_per_s: float = 0.0
    linear_attention_flops_per_s: float = 0.0
    head_flops_per_s: float = 0.0
    memory_bandwidth_bytes_per_s: float = 0.0
    collective_bandwidth_in_node_bytes_per_s: float = 0.0
    tp_overlap_exposed_fraction: float = 1.0
    collective_device_fraction: float = 0.0
    ranks_per_node: float = 8.0
    ring_step_overhead_s_per_layer: float = 0.0
    host_forward_s_per_layer: float = 0.0
    host_backward_s_per_layer: float = 0.0
    host_expert_forward_s_per_layer: float = 0.0
    host_expert_backward_s_per_layer: float = 0.0
    host_ring_step_s_per_layer: float = 0.0
    host_message_s_per_layer: float = 0.0
    hbm_bytes: float = 0.0
    hbm_reserved_bytes: float = 0.0
    communicator_bytes_per_group: float = 0.0
    source: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.type != "float":
                continue
            value, is_rate = getattr(self, entry.name), entry.default is MISSING and entry.name.endswith("_per_s")
            is_number = 0 <= value < math.inf
            if not is_number or (is_rate and not value):
                least = "> 0" if is_number else "a number >= 0"
                raise InvalidInputError(f"hardware {self.name!r}: {entry.name} is {value}, it must be {least}")

    def node_ranks(self, world_size: int) -> int:
        """Return the ranks of a node; of a large domain that does not divide a job, a power of two."""
        ranks = int(self.ranks_per_node)
        return ranks if world_size <= ranks or world_size % ranks == 0 else largest_power_of_two(ranks)

    def in_fp8(self) -> Hardware:
        """Return it with the rates of GEMMs in FP8; what a GEMM takes besides lasts as long as before."""
        ratio = (self.fp8_linear_flops_per_s or self.linear_flops_per_s) / self.linear_flops_per_s
        faster = ("linear_flops_per_s", "linear_extra_tokens", "expert_flops_per_s", "expert_extra_channels")
        return replace(self, **{name: ratio * getattr(self, name) for name in faster})
