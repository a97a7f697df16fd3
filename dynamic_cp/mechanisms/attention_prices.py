"""Attention and its exchange inside a CP group: seconds of one stage as linear pieces of (tokens, tokens squared).

A causal sequence of S tokens lies zigzag on cp ranks, L = S / cp tokens each. Every ring step costs a rank the same
FLOPs, but step 0 is a causal kernel on its own L tokens and steps 1 .. cp-1 are full tiles of L x L/2, which run
faster. A kernel's rate saturates, rate(L) = rate_max * L / (L + L_half), so the seconds of a step are
a * (L^2 + L_half * L): linear in the sums of S and S^2 over the bucket. The exchange of step j+1 runs while step j
computes:

    p2p         (cp-1) steps;  exposed = max(0, exchange - step0) + (cp-2) * max(0, exchange - step1)
    all_gather  the same bytes at once, hidden behind nothing
    a2a         queries, keys, values and outputs change hands, (cp-1)/cp of them; hidden behind nothing. Each rank
                then sees whole sequences (L = S) with 1/cp of the heads
    a2a+p2p     a2a among the u lanes of an inner group inside a node, then the ring of p2p over the n = cp/u inner
                groups: each rank sees L = S / n tokens with 1/u of the heads in every step

`sent_bytes.py` counts the bytes, `heads.py` says which heads change hands: the query heads of a TP rank must be a
multiple of u. The ring uses the NIC where the group spans nodes, an inner group never does; of an a2a over nodes only
the part that leaves the node does. Exchanges of keys and values carry twice the bytes backward (keys and values, and
their gradients); a2a carries as many as forward.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamic_cp.convex import Convex, Kink, Linear, merged
from dynamic_cp.mechanisms.heads import heads_of_rank, inner_sizes, kv_heads_of
from dynamic_cp.mechanisms.links import ACROSS_NODES, lanes_in_one_node
from dynamic_cp.mechanisms.sent_bytes import sent_bytes
from dynamic_cp.types import Hardware, ModelShape, PlanOptions, Topology

_BACKWARD_FLOPS_OVER_FORWARD = 2.5
"""Five GEMMs backward (scores once more, and four gradients) for two forward: arXiv 2307.08691, section 4.1."""


class _Kernel(NamedTuple):
    """Seconds of a kernel on L tokens: per_token2 * (L^2 + extra_tokens * L)."""

    per_token2: float
    extra_tokens: float

    def on_parts(self, parts: int, times: float = 1.0) -> Linear:
        """Return `times` the seconds of the kernel on S / parts tokens of every sequence."""
        per_token2 = times * self.per_token2 / parts
        return Linear(0.0, per_token2 * self.extra_tokens, per_token2 / parts)


class AttentionPrices:
    """Attention of one pipeline stage (all its layers), forward and backward, by exchange, CP size and link.

    Limits: the zigzag split is taken as perfectly even; no contention between links; one NIC a rank; the tiles of
    all_gather are priced as those of the ring, and its shards as if each crossed every NIC in turn.
    """

    def __init__(self, model: ModelShape, hardware: Hardware, topology: Topology, options: PlanOptions) -> None:
        layers = model.num_layers / topology.pp_size
        self._layers = layers
        self._hardware = hardware
        flops_per_token2 = layers * model.attention_flops_per_token2 / topology.tp_size
        self._forward, self._backward = _kernels(flops_per_token2, hardware, model.causal_attention)
        # With fewer KV heads than TP ranks every rank keeps a whole head.
        kv_channels = max(model.kv_size / topology.tp_size, model.kv_channels)
        self._kv_bytes = layers * 2 * kv_channels * options.bytes_per_element
        self._query_bytes = layers * 2 * model.query_size / topology.tp_size * options.bytes_per_element
        self._heads = heads_of_rank(model, topology.tp_size)
        self._node_lanes = lanes_in_one_node(topology)
        self._allowed_inner_sizes = options.inner_cp_sizes

    def inner_sizes(self, exchange: str, cp_size: int) -> tuple[int, ...]:
        """Return the inner sizes with which a group of `cp_size` can use `exchange`, the largest first; () if none."""
        return inner_sizes(exchange, cp_size, self._heads, self._node_lanes, self._allowed_inner_sizes)

    def a2a_rule(self) -> str:
        """Return what exchanges of heads need, with this model's numbers."""
        query_heads, kv_heads = self._heads or ("no whole number", "none")
        return (
            "a2a needs the query heads of a TP rank to be a multiple of the lanes that share them out (of the CP size, "
            "or with a2a+p2p of an inner size above 1 and below the CP size whose blocks each lie in one node); here "
            f"are {query_heads} query heads, {kv_heads} KV heads, and blocks of at most {self._node_lanes} lanes "
            "lie in one node"
        )

    def price(self, exchange: str, cp_size: int, inner: int, link: int) -> tuple[Convex, Convex]:
        """Return (forward, backward) of attention and its exposed exchange; `inner`: one of `inner_sizes`."""
        if cp_size == 1:
            return tuple(Convex(first.on_parts(1)) for first, _ in (self._forward, self._backward))  # type: ignore[return-value]
        hardware, outer = self._hardware, cp_size // inner
        bandwidths = hardware.bandwidth_in_node_bytes_per_s, hardware.bandwidth_across_nodes_bytes_per_s
        latency_s = self._layers * hardware.exchange_latency_s_per_layer
        sent = sent_bytes(cp_size, inner, self._query_bytes, self._kv_bytes, self._copies(inner))
        step = Linear(latency_s, sent.ring_step / cp_size / bandwidths[link])
        inner_link = link if exchange == "a2a" else 0
        leaving = 1.0
        if inner_link == ACROSS_NODES and self._node_lanes < inner:
            leaving = (inner - self._node_lanes) / (inner - 1)
        inner_s = Linear(sent.inner_steps * latency_s, leaving * sent.inner / cp_size / bandwidths[inner_link])
        inner_s = inner_s.plus(Linear(0.0, (1.0 - leaving) * sent.inner / cp_size / bandwidths[0]))
        sides = []
        for (first, later), times, launch in (
            (self._forward, 1.0, 1.0),
            (self._backward, hardware.exchange_backward_over_forward, 2.0),
        ):
            # 1 / inner of the heads on 1 / outer of each sequence, in `outer` steps.
            step0, step1 = first.on_parts(outer, 1 / inner), later.on_parts(outer, 1 / inner)
            compute = step0.plus(step1, outer - 1).plus(inner_s)
            transfer = Linear().plus(step, times)
            if exchange == "all_gather":
                sides.append(Convex(compute.plus(transfer, outer - 1)))
                continue
            overhead_s = (outer - 1) * launch * self._layers * hardware.ring_step_overhead_s_per_layer
            kinks: tuple[Kink, ...] = ()
            if outer > 1:
                kinks = (Kink(1.0, transfer.plus(step0, -1.0)), Kink(outer - 2.0, transfer.plus(step1, -1.0)))
            sides.append(Convex(compute.plus(Linear(overhead_s)), merged(kinks)))
        return sides[0], sides[1]

    def _copies(self, inner: int) -> int:
        return kv_heads_of(*self._heads, inner).copies if self._heads and inner > 1 else 1


def _kernels(
    flops_per_token2: float, hardware: Hardware, causal: bool
) -> tuple[tuple[_Kernel, _Kernel], tuple[_Kernel, _Kernel]]:
    """Return ((causal, full tile) forward, the same backward); without a mask every kernel is a full tile."""

    def forward(rate: float, extra_tokens: float) -> _Kernel:
        return _Kernel(flops_per_token2 / rate, extra_tokens)

    def backward(rate: float, extra_tokens: float, of: _Kernel) -> _Kernel:
        if rate:
            return _Kernel(_BACKWARD_FLOPS_OVER_FORWARD * flops_per_token2 / rate, extra_tokens)
        return of._replace(per_token2=hardware.attention_backward_over_forward * of.per_token2)

    first = forward(hardware.attention_flops_per_s, hardware.attention_extra_tokens)
    later = first
    if hardware.attention_full_flops_per_s:
        later = forward(hardware.attention_full_flops_per_s, hardware.attention_full_extra_tokens)
    first_back = backward(hardware.attention_backward_flops_per_s, hardware.attention_backward_extra_tokens, first)
    later_back = backward(
        hardware.attention_full_backward_flops_per_s, hardware.attention_full_backward_extra_tokens, later
    )
    if not causal:
        first, first_back = later, later_back
    return (first, later), (first_back, later_back)
