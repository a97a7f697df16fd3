"""Kernels and transfers of a pipeline stage, linear in (tokens, tokens squared): prices of attention are made of them.

A causal sequence of S tokens lies zigzag on cp ranks, L = S / cp tokens each. Every ring step costs a rank the same
FLOPs, but step 0 is a causal kernel on its own L tokens and steps 1 .. cp-1 are full tiles of L x L/2, which run
faster. A kernel's rate saturates, rate(L) = rate_max * L / (L + L_half), so the seconds of a step are a * (L^2 + L_half
* L): linear in the sums of S and S^2 over the bucket. The exchange of step j+1 runs while step j computes. The ring
uses the NIC if the group spans nodes; of an all-to-all only the part that leaves the node does. Exchanges of keys and
values carry twice the bytes backward (with their gradients); all-to-alls carry as many as forward.

The seconds of a bucket are a convex, piecewise linear, increasing formula of its tokens T and squared tokens Q:

    constant + per_token * T + per_token2 * Q + sum over k of weight_k * max(0, a_k + b_k * T + c_k * Q)

or the host's seconds, if those are more. A kink is a step of an exchange that hides behind the attention of the whole
bucket, so prices are not additive over samples. `pricing/table.py` has the formula as numbers for compiled loops.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple, TypeVar

from dynamic_cp.arrays import Floats
from dynamic_cp.mechanisms.transfers import heads_of_rank, kv_heads_of, sent_bytes
from dynamic_cp.types import ACROSS_NODES, FULL, IN_NODE, Causal, Full, Hardware, Lambda, Problem, Stage

_BACKWARD_FLOPS_OVER_FORWARD = 2.5
"""Five GEMMs backward (scores once more, and four gradients) for two forward: arXiv 2307.08691, section 4.1."""


_Counts = TypeVar("_Counts", float, Floats)


class Linear(NamedTuple):
    """constant + per_token * T + per_token2 * Q, in seconds."""

    constant: float = 0.0
    per_token: float = 0.0
    per_token2: float = 0.0

    def plus(self, other: Linear, times: float = 1.0) -> Linear:
        """Return self + times * other."""
        return Linear(
            self.constant + times * other.constant,
            self.per_token + times * other.per_token,
            self.per_token2 + times * other.per_token2,
        )


class Kink(NamedTuple):
    """weight * max(0, inner)."""

    weight: float
    inner: Linear


class Convex(NamedTuple):
    """Seconds of one direction: a linear part and the exposed part of hidden exchanges, or `host_s` if that is more."""

    linear: Linear
    kinks: tuple[Kink, ...] = ()
    host_s: float = 0.0


def merged(kinks: tuple[Kink, ...]) -> tuple[Kink, ...]:
    """Return `kinks` with those of equal numbers added up and without those of weight 0."""
    weights: dict[Linear, float] = {}
    for weight, inner in kinks:
        weights[inner] = weights.get(inner, 0.0) + weight
    return tuple(Kink(weight, inner) for inner, weight in weights.items() if weight)


class _Kernel(NamedTuple):
    """Seconds of a kernel on L tokens: per_token2 * (L^2 + extra_tokens * L)."""

    per_token2: float
    extra_tokens: float

    def and_then(self, other: _Kernel) -> _Kernel:
        """Return both, one after the other."""
        per_token2 = self.per_token2 + other.per_token2
        extra = self.per_token2 * self.extra_tokens + other.per_token2 * other.extra_tokens
        return _Kernel(per_token2, extra / per_token2)

    def on_parts(self, parts: int, times: float = 1.0) -> Linear:
        """Return `times` the seconds of the kernel on S / parts tokens of every sequence."""
        per_token2 = times * self.per_token2 / parts
        return Linear(0.0, per_token2 * self.extra_tokens, per_token2 / parts)


class Side(NamedTuple):
    """Attention in one direction: the kernels of step 0 and of later steps, bytes of keys and values (and their
    gradients), and kernels of a step, both in units of those of a forward step."""

    first: _Kernel
    later: _Kernel
    transfers: float
    launches: float

    def steps(self, outer: int, inner: int = 1) -> tuple[Linear, Linear]:
        """Return step 0 and any later one of `outer`: 1 / inner of the heads on 1 / outer of each sequence."""
        return self.first.on_parts(outer, 1 / inner), self.later.on_parts(outer, 1 / inner)

    def of_heads(self, share: float) -> Side:
        first, later = (one._replace(per_token2=share * one.per_token2) for one in (self.first, self.later))
        return self._replace(first=first, later=later)

    def tiles(self, outer: int, inner: int = 1) -> Linear:
        """Return the kernels of all steps."""
        first, later = self.steps(outer, inner)
        return first.plus(later, outer - 1)

    def transfer(self, shard: Linear) -> Linear:
        """Return the seconds of sending the keys and values of a step; `shard`: those of a forward step."""
        return Linear().plus(shard, self.transfers)


class StageAttention:
    """Attention of one pipeline stage, over all its layers that have any.

    Attributes:
        sides, layers: forward and backward; number of layers.
        mask, kinds: of the layers, or of those without a window if only some have one (kernels are priced by it); one
            StageAttention per mask of the layers, `mask` first.
        heads: (query heads, KV heads) of a TP rank; None if they are not whole numbers.
        query_bytes, kv_bytes, lse_bytes: of a token's queries and outputs, its keys and values, its log-sum-exp.
        narrow_kv_bytes, latent_bytes: of its keys, and values in their own width; of its latents (0: none).
        projecting_up: seconds of projecting a rank's latents up once, forward.
        node_lanes: largest group whose lanes surely share a node.
        latency_s, bandwidths: of one transfer in each layer; bytes per second (in a node, across nodes).

    Limits: the zigzag split is taken as perfectly even; no contention between links; one NIC a rank."""

    def __init__(self, stage: Stage, problem: Problem, node_lanes: int) -> None:
        hardware, tp_size = problem.rates, problem.topology.tp_size
        stage = stage.attention
        element_bytes = problem.options.element_bytes.exchanged
        self.layers = stage.num_layers
        self.hardware = hardware
        self.heads = heads_of_rank(problem.model, tp_size)
        forward, backward = _kernels_of_stage(stage, tp_size, hardware)
        self.sides = Side(*forward, 1.0, 1.0), Side(*backward, hardware.exchange_backward_over_forward, 2.0)
        # With fewer KV heads than TP ranks every rank keeps a whole head.
        self.kv_bytes = 2 * stage.sum(lambda layer: max(layer.kv_size / tp_size, layer.kv_channels)) * element_bytes
        self.narrow_kv_bytes = element_bytes * stage.sum(
            lambda layer: (1 + layer.values_over_keys) * max(layer.kv_size / tp_size, layer.kv_channels)
        )
        self.query_bytes = 2 * stage.sum(lambda layer: layer.query_size) / tp_size * element_bytes
        self.lse_bytes = 4 * stage.sum(lambda layer: layer.query_size / layer.kv_channels) / tp_size
        self.latent_bytes = stage.sum(lambda layer: layer.latent_size) * element_bytes
        up_s_per_token = 2 * stage.sum(lambda layer: layer.up_weights) / tp_size / hardware.linear_flops_per_s
        self.projecting_up = Linear(up_s_per_token * hardware.linear_extra_tokens, up_s_per_token)
        self.mask = stage.layers[0][1].mask
        self.kinds: tuple[StageAttention, ...] = (self,)
        of_masks = stage.by_mask
        if len(of_masks) > 1:
            self.kinds = tuple(StageAttention(one, problem, node_lanes) for one in of_masks)
        self.node_lanes = node_lanes
        self.latency_s = stage.num_layers * hardware.exchange_latency_s_per_layer
        self.bandwidths = hardware.bandwidth_in_node_bytes_per_s, hardware.bandwidth_across_nodes_bytes_per_s

    def of_inner_group(self, inner: int) -> StageAttention:
        """Return the attention of one lane of an inner group that stands for a lane: its share of heads and bytes.
        Raise UnsupportedFeatureError if the lanes cannot share the heads evenly."""
        if inner == 1:
            return self
        copies = self._copies(inner)
        one = copy(self)
        one.sides = self.sides[0].of_heads(1 / inner), self.sides[1].of_heads(1 / inner)
        one.query_bytes, one.lse_bytes = self.query_bytes / inner, self.lse_bytes / inner
        one.kv_bytes = copies * self.kv_bytes / inner
        one.node_lanes = self.node_lanes // inner
        one.kinds = tuple(kind.of_inner_group(inner) for kind in self.kinds) if len(self.kinds) > 1 else (one,)
        return one

    def heads_of_group(self, inner: int) -> Linear:
        """Return the seconds of the all-to-alls of a whole inner group in a node, in one direction, for its tokens."""
        return self.exchanged_heads(inner, inner, self._copies(inner), IN_NODE)

    def _copies(self, inner: int) -> int:
        """Return how often KV heads are repeated for an inner group."""
        return kv_heads_of(*(self.heads or (1, 1)), inner).copies

    def alone(self) -> tuple[Convex, Convex]:
        """Return (forward, backward) of a lane by itself."""
        forward, backward = self.sides
        return Convex(forward.first.on_parts(1)), Convex(backward.first.on_parts(1))

    def host_s(self, ring_steps: int, messages: _Counts) -> _Counts:
        """Return the seconds of the host for an exchange of all layers, in one direction."""
        each_s = messages * self.hardware.host_message_s_per_layer
        return self.layers * (each_s + ring_steps * self.hardware.host_ring_step_s_per_layer)

    def kv_shard(self, cp_size: int, copies: int, link: int) -> Linear:
        """Return the seconds of sending a lane's keys and values once, each KV head `copies` times."""
        return Linear(self.latency_s, copies * self.kv_bytes / cp_size / self.bandwidths[link])

    def narrow_kv_shard(self, cp_size: int, link: int) -> Linear:
        """Return `kv_shard` for values that are not padded to the width of keys, each KV head once."""
        return Linear(self.latency_s, self.narrow_kv_bytes / cp_size / self.bandwidths[link])

    def latent_shard(self, cp_size: int, link: int) -> Linear:
        """Return the seconds of sending a lane's latents once; every TP rank sends all of them."""
        return Linear(self.latency_s, self.latent_bytes / cp_size / self.bandwidths[link])

    def exchanged_heads(self, cp_size: int, inner: int, copies: int, link: int) -> Linear:
        """Return the seconds of the all-to-alls of an inner group, in one direction."""
        sent = sent_bytes(cp_size, inner, self.query_bytes, self.kv_bytes, copies)
        leaving = 1.0
        if link == ACROSS_NODES and self.node_lanes < inner:
            leaving = (inner - self.node_lanes) / (inner - 1)
        across = Linear(sent.inner_steps * self.latency_s, leaving * sent.inner / cp_size / self.bandwidths[link])
        return across.plus(Linear(0.0, (1.0 - leaving) * sent.inner / cp_size / self.bandwidths[IN_NODE]))

    def in_ring(
        self,
        outer: int,
        inner: int,
        shard: Linear,
        exchanged_heads: Linear | None = None,
        besides: tuple[Linear, Linear] = (Linear(), Linear()),
    ) -> tuple[Convex, Convex]:
        """Return (forward, backward) of `outer` steps, each of which hides what is sent for the next one.

        Args:
            shard: seconds of sending keys and values for one step, forward.
            exchanged_heads: seconds of exchanges before and after all steps, in each direction.
            besides: what each step computes before its attention, (forward, backward).
        """
        forward, backward = (
            self._ring(side, outer, inner, shard, exchanged_heads or Linear(), more)
            for side, more in zip(self.sides, besides, strict=True)
        )
        return forward, backward

    def _ring(
        self, side: Side, outer: int, inner: int, shard: Linear, exchanged_heads: Linear, besides: Linear
    ) -> Convex:
        overhead_s = (outer - 1) * side.launches * self.layers * self.hardware.ring_step_overhead_s_per_layer
        linear = side.tiles(outer, inner).plus(besides, outer).plus(exchanged_heads).plus(Linear(overhead_s))
        kinks: tuple[Kink, ...] = ()
        if outer > 1:
            first, later = (step.plus(besides) for step in side.steps(outer, inner))
            transfer = side.transfer(shard)
            kinks = (Kink(1.0, transfer.plus(first, -1.0)), Kink(outer - 2.0, transfer.plus(later, -1.0)))
        return Convex(linear, merged(kinks), self.host_s(outer - 1, int(inner > 1)))


_Kernels = tuple[tuple[_Kernel, _Kernel], tuple[_Kernel, _Kernel]]
"""(tile on the diagonal, tile off it) forward, and the same backward."""


def _kernels_of_stage(stage: Stage, tp_size: int, hardware: Hardware) -> _Kernels:
    """Return the kernels of all layers of a stage, one after the other."""
    of_kinds = [
        _kernels(number * layer.kernel_flops_per_token2 / tp_size, hardware, layer.mask)
        for number, layer in stage.layers
    ]
    (first, later), (first_back, later_back) = of_kinds[0]
    for (one, two), (one_back, two_back) in of_kinds[1:]:
        first, later = first.and_then(one), later.and_then(two)
        first_back, later_back = first_back.and_then(one_back), later_back.and_then(two_back)
    return (first, later), (first_back, later_back)


def _kernels(flops_per_token2: float, hardware: Hardware, mask: Causal | Full | Lambda) -> _Kernels:
    """Return the kernels of some layers; with a full mask every tile is full."""

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
    if mask == FULL:
        first, first_back = later, later_back
    return (first, later), (first_back, later_back)
