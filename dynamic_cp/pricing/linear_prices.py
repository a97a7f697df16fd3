"""Seconds of linear attention on one pipeline stage, all its layers, and of the two ways in which lanes share it.

`core` are the seconds of a token's products, `memory` those of the bytes that its convolution and all copies around the
kernel move, `again` those of one more pass of the kernel. In one direction, T tokens and N samples of a bucket on cp
lanes take

    alone   T * (core + memory)
    heads   T * (core * most heads of a lane / heads + memory / cp) + two all-to-alls of T / cp tokens
    states  T / cp * (core + memory + again) + N * (composing + tokens of chunks that are not full + messages)

Where attention is placed, a lane with T tokens takes, with R of its stretches linked (`plans.stretches`),

    homes   T * (core + memory) + linked tokens * again + R * (composing + half a chunk) + messages

Nothing hides the exchanges. So both ways are linear in tokens, and states in samples as well: packers, who know tokens
alone, take heads; `search.states` chooses for each bucket of the finished packing.

Backward, core products are BACKWARD_OVER_FORWARD times those forward. With states, forward computes the summaries of
chunks in one more pass of the kernel; backward runs the kernel's backward pass twice, once for the gradients of the
states before chunks.

Limits: of composing states FLOPs and bytes are priced, not the few launches for each doubling of the chunks. A kernel
walks through the chunks of a sample one after the other, with heads and samples as its only parallelism; how far that
lowers its rate for few heads is not known, nor priced.
"""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.mechanisms.stage_attention import Linear
from dynamic_cp.mechanisms.transfers import lanes_in_one_node
from dynamic_cp.placement.sent import Sent
from dynamic_cp.plans.stretches import Stretches
from dynamic_cp.pricing.edges import memory_s
from dynamic_cp.types import ACROSS_NODES, IN_NODE, Bucket, Hardware, LinearAttention, Problem, Stage
from dynamic_cp.types.linear_attention import CHUNK_TOKENS, CHUNKS_PER_LANE

BACKWARD_OVER_FORWARD = 2.5
"""Products backward over forward: twice as many, and what a chunk keeps too much of is computed again. An estimate."""
_OVER_FORWARD = 1.0, BACKWARD_OVER_FORWARD
"""Core products over those forward, (forward, backward)."""
_PASSES = {
    ("gated_delta_net", "alone"): ((4, 2, 0, 0), (6, 5, 0, 0)),
    ("gated_delta_net", "heads"): ((12, 2, 6, 0), (12, 5, 8, 0)),
    ("gated_delta_net", "states"): ((6, 2, 2, 0.5), (9, 5, 0, 0)),
    ("mamba2", "alone"): ((4, 1, 5, 1), (6, 3, 27, 1)),
    ("mamba2", "heads"): ((12, 1, 11, 1), (12, 3, 35, 1)),
    ("mamba2", "states"): ((6, 1, 5, 1), (9, 3, 27, 1)),
}
"""Passes of a token's channels through memory in bfloat16, forward and backward: of what is convolved, of its keys, of
its values, and of keys and queries of every head. The convolution takes 2 and 4 of the first, the kernel's own are not
among them. `tests/distributed/test_linear_launches.py` counts them."""
_SHARE_OF_GEMMS = 0.125
"""Rate of the core products over that of GEMMs, where hardware does not say. An assumption: docs/cost-model.md."""


class LinearSeconds(NamedTuple):
    """Seconds of linear attention in one direction.

    Attributes:
        linear: for the tokens of a bucket.
        per_sample: for each of its samples besides.
        host_s: of the host, for its exchange.
    """

    linear: Linear
    per_sample: float = 0.0
    host_s: float = 0.0


Both = tuple[LinearSeconds, LinearSeconds]
"""(forward, backward)."""


def core_flops_per_s(hardware: Hardware) -> float:
    """Return the rate of the products of linear attention, also where hardware does not say."""
    return hardware.linear_attention_flops_per_s or _SHARE_OF_GEMMS * hardware.linear_flops_per_s


class LaneLinear(NamedTuple):
    """Seconds of linear attention of the lanes of a placed bucket.

    Attributes:
        constant_s: [forward or backward, lane].
        per_token_s: [forward or backward] of each token of a lane besides.
        host_s: [forward or backward, lane] of the host, for its messages.
    """

    constant_s: Floats
    per_token_s: Floats
    host_s: Floats


def sent_states(stretches: Stretches, sizes: LinearAttention, element_bytes: int) -> Sent:
    """Return what lanes send each other in one layer: tokens before stretches, and states of linked ones.

    Forward: summaries to the lane that composes a share of the heads, and states back. Backward: gradients of states,
    out and back; the matrices A stay where they were composed.

    Args:
        sizes: of a layer on a tensor-parallel rank; element_bytes: of a number of its channels.
    """
    num_lanes = stretches.num_lanes
    before = stretches.before(sizes.kernel_size - 1)
    owner, user = stretches.lane[before.source], stretches.lane[before.stretch]
    halo = np.bincount(owner * num_lanes + user, minlength=num_lanes**2).reshape(num_lanes, num_lanes)
    halo_bytes = halo * float(sizes.convolved_channels * element_bytes)
    share = np.array([len(sizes.heads_of_lane(lane, num_lanes)) for lane in range(num_lanes)]) / sizes.num_heads
    out, back = np.outer(stretches.num_linked, share), np.outer(share, stretches.num_linked)
    forward = sizes.summary_bytes * out + sizes.state_bytes * back + halo_bytes
    backward = sizes.state_bytes * (out + back) + halo_bytes.T
    sender, receiver = np.nonzero(~np.eye(num_lanes, dtype=np.bool_))
    return Sent(sender, receiver, np.stack([forward, backward])[:, sender, receiver])


class StageLinearAttention:
    """Linear attention of one pipeline stage.

    Attributes:
        layers: their number.
        sizes: of one layer on a tensor-parallel rank.
    """

    def __init__(self, stage: Stage, sizes: LinearAttention, problem: Problem) -> None:
        hardware = problem.hardware
        self.layers = stage.linear_attention.num_layers
        self.sizes = sizes.of_rank(problem.topology.tp_size)
        self._hardware, self._node_lanes = hardware, lanes_in_one_node(problem.topology)
        self._element_bytes = problem.options.element_bytes
        self._rate = core_flops_per_s(hardware)
        self._core_s = self._seconds(self.sizes.core_flops)
        self._summary_s = self._seconds(self.sizes.summary_flops)
        self._s_per_memory_byte = memory_s(self.layers, hardware)
        self._bandwidths = hardware.bandwidth_in_node_bytes_per_s, hardware.bandwidth_across_nodes_bytes_per_s

    def alone(self) -> Both:
        """Return what one lane takes."""
        forward, backward = (
            LinearSeconds(Linear(0.0, times * self._core_s + memory))
            for times, memory in zip(_OVER_FORWARD, self._memory_s("alone"), strict=True)
        )
        return forward, backward

    def by_heads(self, cp_size: int, link: int) -> Both:
        """Return what a group takes whose lanes exchange heads."""
        core = self._core_s * self.sizes.most_heads(cp_size) / self.sizes.num_heads
        sent = self.sizes.heads_bytes(cp_size, self._element_bytes.exchanged) / cp_size
        exchange = Linear(2 * self._latency_s, self.layers * sent * self._s_per_byte(cp_size, link))
        forward, backward = (
            LinearSeconds(Linear(0.0, times * core + memory / cp_size).plus(exchange), host_s=self._host_s(2))
            for times, memory in zip(_OVER_FORWARD, self._memory_s("heads", cp_size), strict=True)
        )
        return forward, backward

    def by_states(self, cp_size: int, link: int) -> Both:
        """Return what a group takes whose lanes pass on states."""
        sizes = self.sizes
        computed = self._core_s + self._summary_s, 2 * BACKWARD_OVER_FORWARD * self._core_s
        composing = (CHUNKS_PER_LANE * self._carried_s(CHUNKS_PER_LANE * cp_size)).tolist()
        halo = sizes.halo_bytes(cp_size, self._element_bytes.exchanged)
        states = [sizes.states_bytes(cp_size, backward=backward) for backward in (False, True)]
        latency = Linear(3 * self._latency_s)
        forward, backward = (
            LinearSeconds(
                latency.plus(Linear(0.0, (core_s + memory) / cp_size)),
                # The last chunk of products of each chunk of a lane is half full in the mean.
                composed
                + CHUNKS_PER_LANE * CHUNK_TOKENS / 2 * core_s
                + self.layers * (sent + halo) * self._s_per_byte(cp_size, link),
                self._host_s(3),
            )
            for core_s, memory, composed, sent in zip(
                computed, self._memory_s("states"), composing, states, strict=True
            )
        )
        return forward, backward

    def of_homes(self, bucket: Bucket, rank_token_multiple: int, *, with_exchange: bool) -> LaneLinear:
        """Return what the lanes of a placed bucket take, which pass on states from home to home.

        Stretches that go on from none, and none from them, are computed as on a lane alone.

        Args:
            with_exchange: with what lanes send each other.
        """
        sizes, hardware = self.sizes, self._hardware
        stretches = Stretches.of_placement(bucket, rank_token_multiple)
        linked, num_linked = stretches.is_linked, stretches.num_linked
        linked_tokens = np.bincount(stretches.lane, stretches.length * linked, bucket.cp_size)
        core, summary = self._core_s, self._summary_s
        again = np.array([summary, BACKWARD_OVER_FORWARD * core])
        times = np.array(_OVER_FORWARD)
        carried_s = self._carried_s(int(stretches.depth.max()) + 1)[:, None] * num_linked.sum() / bucket.cp_size
        half_chunks = CHUNK_TOKENS / 2 * num_linked
        constant_s = np.outer(again, linked_tokens + half_chunks) + np.outer(times * core, half_chunks) + carried_s
        host_s = np.zeros_like(constant_s)
        if with_exchange and linked.any():
            nodes = (bucket.first_lane + np.arange(bucket.cp_size)) // self._node_lanes
            sent = sent_states(stretches, sizes, self._element_bytes.exchanged).of_lanes(nodes)
            per_byte = 1.0 / np.array(self._bandwidths)
            constant_s += 3 * self._latency_s + self.layers * np.einsum("dln,l->dn", sent, per_byte)
            # Unlike a collective, each message is a call of its own.
            others = bucket.cp_size - 1
            host_s += self.layers * 3 * others * hardware.host_message_s_per_layer
        per_token_s = times * core + np.array(self._memory_s("states" if linked.any() else "alone"))
        return LaneLinear(constant_s, per_token_s, host_s)

    @property
    def _latency_s(self) -> float:
        return self.layers * self._hardware.exchange_latency_s_per_layer

    def _host_s(self, messages: int) -> float:
        return self.layers * messages * self._hardware.host_message_s_per_layer

    def _seconds(self, flops: float) -> float:
        return self.layers * flops / self._rate

    def _memory_s(self, way: str, num_lanes: int = 1) -> list[float]:
        """Return what bytes through memory take for a token, (forward, backward); lanes that exchange heads have copies
        of groups, too."""
        sizes = self.sizes
        keys, values = 2 * sizes.copied_groups(num_lanes) * sizes.key_size, sizes.value_channels
        channels = keys + values, keys, values, 2 * sizes.num_heads * sizes.key_size
        once = self._element_bytes.activation * self._s_per_memory_byte
        return [once * sum(map(mul, passes, channels)) for passes in _PASSES[sizes.kind, way]]

    def _carried_s(self, chain: int) -> Floats:
        """Return what carrying states takes for a run in a chain of so many, (forward, backward): products of states,
        and passes of b, of A and of both through memory, counted as _PASSES are."""
        sizes, doublings = self.sizes, max((chain - 1).bit_length() - 1, 0)  # besides the first
        own, both = sizes.state_bytes, sizes.summary_bytes
        transition = both - own
        forward = 9 * both + 2 * transition + 11 * own + doublings * (8 * both + transition + 3 * own)
        backward = 20 * own + doublings * (7 * own + 13 * transition) - 5 * transition
        return self._seconds(sizes.carrying_flops(chain)) + np.array([forward, backward]) * self._s_per_memory_byte

    def _s_per_byte(self, cp_size: int, link: int) -> float:
        """Return the seconds per byte that a lane sends to all others alike: some of them may be in its node."""
        leaving = 0.0 if link == IN_NODE else 1.0
        if link == ACROSS_NODES and self._node_lanes < cp_size:
            leaving = (cp_size - self._node_lanes) / (cp_size - 1)
        return leaving / self._bandwidths[ACROSS_NODES] + (1.0 - leaving) / self._bandwidths[IN_NODE]
