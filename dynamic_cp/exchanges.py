"""Attention and its exchange inside a CP group: seconds of one stage as linear pieces of (tokens, tokens squared).

A causal sequence of S tokens lies zigzag on cp ranks, L = S / cp tokens each. Every ring step costs a rank the same
FLOPs, but step 0 is a causal kernel on its own L tokens and steps 1 .. cp-1 are full tiles of L x L/2, which run
faster. A kernel's rate saturates, rate(L) = rate_max * L / (L + L_half), so the seconds of a step are
a * (L^2 + L_half * L): linear in the sums of S and S^2 over the bucket. The exchange of step j+1 runs while step j
computes:

    p2p         (cp-1) steps;  exposed = max(0, exchange - step0) + (cp-2) * max(0, exchange - step1)
    all_gather  the same bytes at once, hidden behind nothing
    a2a         queries, keys, values and outputs change hands, (cp-1)/cp of them; hidden behind nothing. Each rank
                then sees whole sequences (L = S) with 1/cp of the heads, so query heads and KV heads of a TP rank must
                be multiples of cp

Exchanges of keys and values carry twice the bytes backward (keys and values, and their gradients); a2a carries as many
as forward.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamic_cp.types import Hardware, ModelShape, PlanOptions, Topology

PRICED_CP_COMM_TYPES = ("p2p", "all_gather", "a2a")

_BACKWARD_FLOPS_OVER_FORWARD = 2.5
"""Five GEMMs backward (scores once more, and four gradients) for two forward: arXiv 2307.08691, section 4.1."""
_COLLECTIVES_OF_A2A = 4
"""Queries, keys and values before, outputs after."""


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
    """Seconds of one direction: a linear part and what is exposed of hidden exchanges."""

    linear: Linear
    kinks: tuple[Kink, ...] = ()


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

    Limits: the zigzag split is taken as perfectly even; no contention between links; the tiles of all_gather are priced
    as those of the ring.
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
        self._query_heads = model.num_attention_heads / topology.tp_size
        self._kv_heads = max(1.0, model.num_query_groups / topology.tp_size)

    def is_possible(self, exchange: str, cp_size: int) -> bool:
        """Return whether a group of `cp_size` can use `exchange`; query heads are a multiple of KV heads."""
        return exchange != "a2a" or self._kv_heads % cp_size == 0

    def a2a_rule(self) -> str:
        """Return what a2a needs, with this model's numbers."""
        return (
            "a2a needs the query heads and the KV heads of a TP rank to be multiples of the CP size; "
            f"here they are {self._query_heads:g} and {self._kv_heads:g}"
        )

    def price(self, exchange: str, cp_size: int, bandwidth_bytes_per_s: float) -> tuple[Convex, Convex]:
        """Return (forward, backward) of attention and its exposed exchange."""
        if cp_size == 1:
            return tuple(Convex(first.on_parts(1)) for first, _ in (self._forward, self._backward))  # type: ignore[return-value]
        latency_s = self._layers * self._hardware.exchange_latency_s_per_layer
        if exchange == "a2a":
            moved = (self._kv_bytes + self._query_bytes) * (cp_size - 1) / cp_size
            exchange_s = Linear(_COLLECTIVES_OF_A2A * latency_s, moved / cp_size / bandwidth_bytes_per_s)
            # 1 / cp of the heads on whole sequences.
            both = (first.on_parts(1, 1 / cp_size).plus(exchange_s) for first, _ in (self._forward, self._backward))
            return tuple(Convex(linear) for linear in both)  # type: ignore[return-value]
        step = Linear(latency_s, self._kv_bytes / cp_size / bandwidth_bytes_per_s)
        back = self._hardware.exchange_backward_over_forward
        sides = []
        for (first, later), times, launch in ((self._forward, 1.0, 1.0), (self._backward, back, 2.0)):
            step0, step1 = first.on_parts(cp_size), later.on_parts(cp_size)
            compute = step0.plus(step1, cp_size - 1)
            transfer = Linear().plus(step, times)
            if exchange == "all_gather":
                sides.append(Convex(compute.plus(transfer, cp_size - 1)))
                continue
            overhead_s = (cp_size - 1) * launch * self._layers * self._hardware.ring_step_overhead_s_per_layer
            kinks = (Kink(1.0, transfer.plus(step0, -1.0)), Kink(cp_size - 2.0, transfer.plus(step1, -1.0)))
            sides.append(Convex(compute.plus(Linear(overhead_s)), merged(kinks)))
        return sides[0], sides[1]


def merged(kinks: tuple[Kink, ...]) -> tuple[Kink, ...]:
    """Return `kinks` with those of equal numbers added up and without those of weight 0."""
    weights: dict[Linear, float] = {}
    for weight, inner in kinks:
        weights[inner] = weights.get(inner, 0.0) + weight
    return tuple(Kink(weight, inner) for inner, weight in weights.items() if weight)


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
