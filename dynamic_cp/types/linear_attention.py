"""Linear attention: layers whose tokens meet through a state, as in a gated delta net and in Mamba-2.

The state S of a head is [key_size, value_size]; a token updates it, S = T S + U, and reads it. A chunk of tokens
changes a state by one pair (A, b), its *summary*: S_out = A S_in + b. For a gated delta net A is a matrix [key_size,
key_size], for Mamba-2 a number. The lanes of a group share a sample in one of two ways:

    heads    an all-to-all gives each lane all tokens of a share of the heads, another returns their outputs
    states   each lane computes the summaries of its chunks; an all-to-all gives each lane the summaries of a share of
             the heads, which it composes in the order of the sample; another returns the state before each chunk

All sizes and FLOPs are of the whole layer; `of_rank` has the share of a tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least

LinearKind = Literal["gated_delta_net", "mamba2"]
LINEAR_KINDS: tuple[LinearKind, ...] = get_args(LinearKind)

StateExchange = Literal["heads", "states"]
STATE_EXCHANGES: tuple[StateExchange, ...] = get_args(StateExchange)
"""Ways in which lanes share a layer; the first is that of plans that name none."""

CHUNK_TOKENS = 64
"""Tokens of a sample that kernels compute at once, as products of matrices."""
STATE_BYTES = 4
"""Bytes of a number of a state or a summary: always float32."""
GATE_BYTES = 4
"""Bytes of a number with which a token changes a state (its decay, its step): float32 as well."""
CHUNKS_PER_LANE = 2
"""Chunks of a sample that a lane of a group holds, zigzag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """One layer of linear attention.

    Attributes:
        num_heads: value heads, each with a state.
        num_groups: key heads of a gated delta net, groups of B and C of Mamba-2; divides num_heads.
        key_size, value_size: width of a key head and of a value head; the state size and the head size of Mamba-2.
        kernel_size: tokens that the convolution before it sees: a token and those right before it.
    """

    kind: LinearKind
    num_heads: int
    num_groups: int
    key_size: int
    value_size: int
    kernel_size: int = 4

    def __post_init__(self) -> None:
        if self.kind not in LINEAR_KINDS:
            raise InvalidInputError(f"kind of linear attention is {self.kind!r}: use one of {', '.join(LINEAR_KINDS)}")
        require_at_least(
            1,
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            key_size=self.key_size,
            value_size=self.value_size,
            kernel_size=self.kernel_size,
        )
        if self.num_heads % self.num_groups:
            raise InvalidInputError(
                f"{self.num_heads} heads of linear attention are no multiple of its {self.num_groups} groups (key "
                "heads): every group serves the same number of heads"
            )

    def of_rank(self, tp_size: int) -> LinearAttention:
        """Return what a tensor-parallel rank has of it. Raises InvalidInputError: TP does not divide heads and
        groups."""
        if self.num_heads % tp_size or self.num_groups % tp_size:
            raise InvalidInputError(
                f"TP {tp_size} does not divide {self.num_heads} heads and {self.num_groups} groups (key heads) of "
                "linear attention: use a tp_size (--tensor-model-parallel-size) that divides both"
            )
        return replace(self, num_heads=self.num_heads // tp_size, num_groups=self.num_groups // tp_size)

    @property
    def has_delta_rule(self) -> bool:
        """Whether a token changes a state by a matrix, as in a gated delta net, instead of by a number."""
        return self.kind == "gated_delta_net"

    @property
    def value_channels(self) -> int:
        """Channels of the values, of the gate z, and of the heads' outputs."""
        return self.num_heads * self.value_size

    @property
    def convolved_channels(self) -> int:
        """Channels that are convolved: queries, keys and values; for Mamba-2 B, C and x."""
        return 2 * self.num_groups * self.key_size + self.value_channels

    @property
    def gate_channels(self) -> int:
        """Numbers per token that say how it changes states: decay and beta of each head; for Mamba-2 the step."""
        return (2 if self.has_delta_rule else 1) * self.num_heads

    def weights(self, hidden_size: int) -> int:
        """Return the weights of both projections: to convolved channels, gate z and decays; from the heads' outputs."""
        return hidden_size * (self.convolved_channels + 2 * self.value_channels + self.gate_channels)

    @property
    def small_weights(self) -> int:
        """Weights of the convolution, the decays and the output norm; TP ranks share them."""
        convolution = self.kernel_size * self.convolved_channels
        if self.has_delta_rule:
            return convolution + 2 * self.num_heads + self.value_size
        return convolution + self.convolved_channels + 3 * self.num_heads + self.value_channels

    # FLOPs per token, forward.

    @property
    def core_flops(self) -> int:
        """FLOPs per token in chunks of CHUNK_TOKENS: products within its chunk, and with the state before it."""
        return self._core_flops(self.value_size)

    def _core_flops(self, value: int) -> int:
        chunk, key = CHUNK_TOKENS, self.key_size
        if self.has_delta_rule:
            return self.num_heads * (6 * key * value + chunk * (4 * key + 2 * value))
        return self.num_heads * (4 * key * value + chunk * value) + self.num_groups * chunk * key

    @property
    def summary_flops(self) -> int:
        """FLOPs per token that the summaries add where states are exchanged: the kernel runs once more. For a gated
        delta net it runs on values [v | 0], so that A comes out beside b."""
        return self._core_flops(self.value_size + self.key_size * self.has_delta_rule)

    def carrying_flops(self, chain: int) -> int:
        """Return the FLOPs per run, all heads, of composing `chain` runs with transitions in log2(chain) steps."""
        num_steps = (chain - 1).bit_length()
        states = 2 * self.num_heads * self.key_size * self.value_size * (self.key_size if self.has_delta_rule else 1)
        transitions = 2 * self.num_heads * self.key_size**3 if self.has_delta_rule else self.num_heads
        return num_steps * (states + transitions)

    # Bytes.

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all heads."""
        return STATE_BYTES * self.num_heads * self.key_size * self.value_size

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summary of a chunk: b, as large as a state, and A."""
        return self.state_bytes + STATE_BYTES * self.num_heads * (self.key_size**2 if self.has_delta_rule else 1)

    def heads_of_lane(self, lane: int, num_lanes: int) -> range:
        """Return the heads that a lane computes where heads are exchanged. The first lanes take one more if lanes do
        not divide the heads; with fewer heads than lanes the last ones have none."""
        each, more = divmod(self.num_heads, num_lanes)
        first = lane * each + min(lane, more)
        return range(first, first + each + (lane < more))

    def groups_of_lane(self, lane: int, num_lanes: int) -> range:
        """Return the groups (key heads) that serve the heads of a lane."""
        heads, per_group = self.heads_of_lane(lane, num_lanes), self.num_heads // self.num_groups
        return range(heads.start // per_group, -(-heads.stop // per_group)) if heads else range(0)

    def copied_groups(self, num_lanes: int) -> int:
        """Return the number of groups that all lanes hold together, copies counted: at least num_groups."""
        if num_lanes >= self.num_heads:  # a head, or none, each
            return self.num_heads
        return sum(len(self.groups_of_lane(lane, num_lanes)) for lane in range(num_lanes))

    def most_heads(self, num_lanes: int) -> int:
        """Return the heads of the busiest lane where heads are exchanged."""
        return -(-self.num_heads // num_lanes)

    def heads_bytes(self, num_lanes: int, element_bytes: int) -> float:
        """Return the mean bytes that a lane sends per token it holds, each way, where heads are exchanged."""
        there = 2 * self.copied_groups(num_lanes) * self.key_size + self.value_channels
        each_way = element_bytes * (there + self.value_channels) + GATE_BYTES * self.gate_channels
        return each_way * (num_lanes - 1) / num_lanes

    def states_bytes(self, num_lanes: int, *, backward: bool = False) -> float:
        """Return the bytes that a lane sends per sample where states are exchanged, in the mean of lanes, but the halo.
        Forward sends summaries out and states back, backward gradients of states both ways, but no matrices A."""
        out = self.state_bytes if backward else self.summary_bytes
        return CHUNKS_PER_LANE * (out + self.state_bytes) * (num_lanes - 1) / num_lanes

    def halo_bytes(self, num_lanes: int, element_bytes: int) -> float:
        """Return the bytes per sample and direction, in the mean of lanes, of the kernel_size - 1 tokens before each
        chunk, which its convolution needs from another lane (the two middle chunks share one). Chunks are at least that
        long."""
        tokens = (self.kernel_size - 1) * (CHUNKS_PER_LANE * num_lanes - 2) if num_lanes > 1 else 0
        return tokens / num_lanes * self.convolved_channels * element_bytes
