"""What a tick takes: layers of the fullest lane, attention of the most loaded server, transfers of the busiest link.

    layers    = linear of the fullest lane + attention of the most loaded server, in each half, of one model chunk
    tick      = max(layers, busiest link) + what the first half fetches and the last one gives back, in two halves
              = layers + busiest link, in one
    seconds   = tick * (1 + noise margin) + embedding, head and hop of the stages that pay them

Every layer waits for the slowest of all servers. With a jitter of sigma for each server and layer, the slowest of N is
sigma * E[max of N normals] late in every layer; without such a barrier lanes average over layers. The difference is
what the margin stands for: at 2% jitter 4% with 64 servers, 5% with 256.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.disaggregation.profile import AttentionProfile
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.links import lanes_in_one_node
from dynamic_cp.mechanisms.placed_seconds import token_bytes
from dynamic_cp.placement.traffic import bytes_of_tasks
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import CAUSAL, NOISE_MARGIN, ModelShape, Tasks

TOLERANCES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""How far servers may be from even; a tick takes the one with which it is fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What task plans may be.

    Attributes:
        ping_pong: layers run in two halves, of which one computes while the other travels.
        noise_margin: share by which ticks last longer than planned, >= 0.
        tolerances: shares by which servers may exceed the mean work, each >= 0; a tick takes the fastest.
        tile_tokens: tasks are cut at multiples of it.
        attention_servers: of policy pool-dedicated: ranks of a tensor-parallel place that hold no weights and only
            serve; 0: none, as of all others.
    """

    ping_pong: bool = True
    noise_margin: float = NOISE_MARGIN
    tolerances: tuple[float, ...] = TOLERANCES
    tile_tokens: int = 128
    attention_servers: int = 0

    def __post_init__(self) -> None:
        if not self.noise_margin >= 0:
            raise InvalidInputError(
                f"noise_margin is {self.noise_margin}, at least 0 is needed: give a share such as {NOISE_MARGIN}"
            )
        if not self.tolerances or not all(tolerance >= 0 for tolerance in self.tolerances):
            raise InvalidInputError(
                f"tolerances are {self.tolerances}, at least one of at least 0 is needed: give shares such as 0.1"
            )
        if self.tile_tokens < 1 or self.tile_tokens % 16:
            raise InvalidInputError(
                f"tile_tokens is {self.tile_tokens}, a multiple of 16 is needed: kernels have rows of 64 or 128"
            )

    @property
    def num_halves(self) -> int:
        """1, or 2 with ping-pong."""
        return 2 if self.ping_pong else 1

    def with_margin(self, noise_margin: float) -> TaskOptions:
        """Return these options with another margin."""
        return replace(self, noise_margin=noise_margin)


class TickSeconds(NamedTuple):
    """Seconds of one tick without embedding, head and hops, and without noise.

    Attributes:
        linear_s: what is not attention, on the fullest lane.
        attention_s: on the most loaded server, half by half.
        exchange_s: on the busiest link.
        exposed_s: what of the exchange nothing hides.
        beside_s: how long both kinds of ranks compute at once, where linear layers and attention have ranks of their
            own (`on_their_own`).
    """

    linear_s: float
    attention_s: float
    exchange_s: float
    exposed_s: float
    beside_s: float = 0.0

    @property
    def total_s(self) -> float:
        """How long the tick lasts."""
        return self.linear_s + self.attention_s + self.exposed_s - self.beside_s

    def on_their_own(self, num_layers: float, *, is_in_halves: bool) -> TickSeconds:
        """Return the same of linear layers and attention on ranks of their own, as `dedicated.py` says.

        Args:
            num_layers: of the tick.
            is_in_halves: layers of one half run beside attention of the other one.
        """
        linear_s, attention_s, exchange_s = self.linear_s, self.attention_s, self.exchange_s
        one_by_one_s = linear_s + attention_s + exchange_s
        total_s = one_by_one_s
        if is_in_halves:
            longest_s = max(linear_s, attention_s, exchange_s, one_by_one_s / 2)
            total_s = min(one_by_one_s, longest_s + (attention_s + exchange_s) / (2 * max(num_layers, 1.0)))
        return self._replace(exposed_s=exchange_s, beside_s=one_by_one_s - total_s)


class TickPrices:
    """Prices of ticks and of micro-batches whose attention is tasks.

    Args:
        cost_model: prices of the job.
        options: halves and margins.

    Raises:
        UnsupportedFeatureError: a model whose attention is no tasks.
    """

    def __init__(self, cost_model: CostModel, options: TaskOptions) -> None:
        refuse_model(cost_model.model, cost_model.topology.pp_size)
        self.cost_model, self.options = cost_model, options
        self._chunks = cost_model.topology.vp_size
        stage = cost_model.stage
        self._attention = stage.attention
        self._linear = stage.without_attention()
        self._repeats = stage.repeats_attention
        self._token_bytes = token_bytes(self._attention)
        self.profiles = AttentionProfile.of(self._attention, 0), AttentionProfile.of(self._attention, 1)
        self._node_servers = lanes_in_one_node(cost_model.topology)

    @property
    def task_bytes(self) -> tuple[float, float]:
        """Bytes per token of (queries that leave, there and back; keys and values that do), forward."""
        of = self._token_bytes
        return 2 * of.query + of.lse, of.kv

    @property
    def layers_of_tick(self) -> float:
        """Layers of a model chunk."""
        return self._attention.layers / self._chunks

    def seconds(self, tasks: Tasks, direction: int, num_servers: int, rank_tokens: int) -> TickSeconds:
        """Return what `tasks` take forward (0) or backward (1) in the layers of a chunk, recomputation included.

        Args:
            tasks: of a tick.
            direction: which.
            num_servers: that share them.
            rank_tokens: padded tokens of the fullest lane.
        """
        computed = (0, 1) if direction == 1 and self._repeats else (direction,)
        sent = bytes_of_tasks(tasks, computed, num_servers, self._node_servers, self._token_bytes)
        attention_s = sum(
            float(self.profiles[one].server_seconds(tasks, num_servers).max(axis=1).sum()) for one in computed
        )
        attention_s /= self._chunks
        exchange_s = sum(map(self._exchange_s, sent)) / self._chunks
        linear_s = float(self.linear_s(direction, np.array(rank_tokens)))
        exposed_s = exchange_s
        if self.options.ping_pong:
            too_long_s = max(exchange_s - linear_s - attention_s, 0.0)
            exposed_s = too_long_s + exchange_s / (2 * max(self.layers_of_tick, 1.0))
        return TickSeconds(linear_s, attention_s, exchange_s, exposed_s)

    def linear_s(self, direction: int, rank_tokens: Ints) -> Floats:
        """Return the seconds of what is not attention in a chunk, on lanes with so many padded tokens."""
        linear = self._linear[direction]
        stage_s = self.options.num_halves * linear.constant + linear.per_token * rank_tokens
        return np.asarray(stage_s / self._chunks, np.float64)

    def attention_s(self, tasks: Tasks, direction: int, num_servers: int) -> Floats:
        """Return [server] seconds of its tasks, recomputation included; arguments as those of `seconds`."""
        computed = (0, 1) if direction == 1 and self._repeats else (direction,)
        each = [self.profiles[one].server_seconds(tasks, num_servers).sum(axis=0) for one in computed]
        total: Floats = np.array(each).sum(axis=0).astype(np.float64) / self._chunks
        return total

    def _exchange_s(self, sent: Floats) -> float:
        """Return the seconds of the busiest link; `sent` is [link, sent or received, server] bytes."""
        if not sent.any():
            return 0.0
        busiest_s = max(
            float(of_link.max()) / bandwidth
            for of_link, bandwidth in zip(sent, self._attention.bandwidths, strict=True)
        )
        # One round there and one back, in each half.
        return busiest_s + 2 * self.options.num_halves * self._attention.latency_s


def refuse_model(model: ModelShape, pp_size: int) -> None:
    """Refuse a model whose attention cannot be tasks.

    Raises:
        UnsupportedFeatureError: layers that see other keys than all before, experts, or stages or model chunks with
            different numbers of layers.
    """
    if model.layer_masks != (CAUSAL,):
        masks = ", ".join(map(str, model.layer_masks))
        raise UnsupportedFeatureError(
            f"attention tasks have all keys up to their queries, layers of this model have the masks {masks}: use "
            "placed attention (--cp-comm-type blocks)"
        )
    if model.experts is not None:
        raise UnsupportedFeatureError(
            f"layers of this model have {model.experts.num_experts} experts, whose exchange ticks do not price (0 is "
            "possible): compare dynamic CP"
        )
    layers = {stage.num_layers for stage in model.stages(pp_size)}
    chunks = {of_chunk for of_stage in model.pipeline_layers for of_chunk in of_stage}
    for what, numbers in (("stages", layers), ("model chunks", chunks)):
        if len(numbers) > 1:
            raise UnsupportedFeatureError(
                f"{what} have {min(numbers):g} to {max(numbers):g} layers, ticks need as many on each: leave out "
                "--decoder-first-pipeline-num-layers and its like"
            )
