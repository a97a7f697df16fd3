"""Seconds of tasks and ticks.

A task takes as long as the kernels of `mechanisms.placed_seconds`, without going through their many tiles. A tick takes
its layers, step by step on all servers, or the transfers of the busiest link:

    tick      = max(steps of all layers of a model chunk, busiest link) in two nano-batches
    (`layer_steps.seconds_of_steps`)
              = linear of the fullest lane + attention of the most loaded server + busiest link, in one
    seconds   = tick * (1 + noise margin) + embedding, head and hop of the stages that pay them

Steps are priced server by server: one with little work besides attention, as on a stage without a micro-batch, has time
for more attention. Transfers of either nano-batch take as long as those of the busiest link, round by round.

Every layer waits for the slowest of all servers. With a jitter of sigma for each server and layer, the slowest of N is
sigma * E[max of N normals] late in every layer; without such a barrier lanes average over layers. The margin is the
difference: at 2% jitter 4% with 64 servers, 5% with 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.placed_seconds import add_launches, kernel_rates, tile_s, token_bytes
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE
from dynamic_cp.pool.layer_steps import NUM_NANO_BATCHES, Repeats, seconds_of_steps, step_table
from dynamic_cp.pool.tasks import NANO_BATCH, SERVER, Tasks
from dynamic_cp.pool.traffic import Servers, bytes_of_rounds, fetches_of_tasks
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import CAUSAL, NOISE_MARGIN, ModelShape
from dynamic_cp.types.placement import START, STOP


def task_seconds(stage: StageAttention, tasks: Tasks, num_servers: int) -> Floats:
    """Return [forward or backward, nano-batch, server] seconds of kernels, as `kernel_seconds` of `Tasks.placement`. A
    row of tasks is a causal square and all keys before it, so tiles need not be gone through."""
    return _tasks_s(tasks.rows.astype(np.int64), *kernel_rates(stage), tasks.num_nano_batches, num_servers)


@compiled
def _tasks_s(rows: Ints, rates: Floats, overheads_s: Floats, num_nano_batches: int, num_servers: int) -> Floats:
    """Return [direction, nano-batch, server] seconds of tasks; `rates` and `overheads_s` as of
    `placed_seconds._attention_s`."""
    seconds = np.zeros((2, num_nano_batches, num_servers))
    is_launched = np.zeros((num_nano_batches, num_servers), np.bool_)
    for row in range(len(rows)):
        start, server, nano_batch = float(rows[row, START]), rows[row, SERVER], rows[row, NANO_BATCH]
        queries = rows[row, STOP] - start
        is_launched[nano_batch, server] = True
        for direction in range(2):
            seconds[direction, nano_batch, server] += tile_s(rates[direction], 0, queries * (queries + 1.0), queries)
            if start:
                seconds[direction, nano_batch, server] += tile_s(rates[direction], 2, 2.0 * queries * start, queries)
    add_launches(seconds, is_launched, overheads_s)
    return seconds


TOLERANCES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Unevenness of servers that is tried, ascending; the search goes from one to its neighbours while a tick gets
faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What task plans may be.

    Attributes:
        ping_pong: layers run in two nano-batches, of which one computes while the other travels.
        noise_margin, tolerances: shares by which ticks last longer than planned, and by which servers may exceed the
            mean work (ascending; a tick takes one); each >= 0.
        tile_tokens: tasks are cut at multiples of it.
    """

    ping_pong: bool = True
    noise_margin: float = NOISE_MARGIN
    tolerances: tuple[float, ...] = TOLERANCES
    tile_tokens: int = 128

    def __post_init__(self) -> None:
        if not self.noise_margin >= 0:
            raise InvalidInputError(
                f"noise_margin is {self.noise_margin}, at least 0 is needed: give a share such as {NOISE_MARGIN}"
            )
        if not self.tolerances or not all(tolerance >= 0 for tolerance in self.tolerances):
            raise InvalidInputError(
                f"tolerances are {self.tolerances}, at least one of at least 0 is needed: give shares such as 0.1"
            )
        if list(self.tolerances) != sorted(self.tolerances):
            raise InvalidInputError(
                f"tolerances are {self.tolerances}, {tuple(sorted(self.tolerances))} is their order: neighbours are "
                "tried, so give them ascending"
            )
        if self.tile_tokens < 1 or self.tile_tokens % 16:
            raise InvalidInputError(
                f"tile_tokens is {self.tile_tokens}, a multiple of 16 is needed: kernels have rows of 64 or 128"
            )

    @property
    def num_nano_batches(self) -> int:
        """1, or 2 with ping-pong."""
        return 2 if self.ping_pong else 1


class TickSeconds(NamedTuple):
    """Seconds of one tick without embedding, head and hops, and without noise.

    Attributes:
        linear_s, attention_s, exchange_s: all but attention on the fullest lane; attention on the most loaded server,
            nano-batch by nano-batch; the busiest link.
        exposed_s, beside_s: seconds that exchanges add, and seconds saved because some ranks work on nano-batch 0 while
            others work on 1.
    """

    linear_s: float
    attention_s: float
    exchange_s: float
    exposed_s: float
    beside_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.linear_s + self.attention_s + self.exposed_s - self.beside_s


class TickPrices:
    """Prices of ticks and of micro-batches whose attention is tasks; UnsupportedFeatureError for a model that cannot
    have tasks."""

    def __init__(self, cost_model: CostModel, options: TaskOptions) -> None:
        refuse_model(cost_model.model, cost_model.topology.pp_size)
        self.cost_model, self.options = cost_model, options
        self._chunks = cost_model.topology.vp_size
        stage = cost_model.stage
        self._attention = stage.attention
        self._linear = stage.without_attention()
        self._repeats: Repeats = "nothing"
        if stage.repeats_attention:
            self._repeats = "layers" if cost_model.options.recompute == "full" else "attention"
        self._shares = np.array([stage.share_before_attention, 1.0 - stage.share_before_attention])
        self._token_bytes = token_bytes(self._attention)

    @property
    def task_bytes(self) -> tuple[float, float]:
        """Bytes per token of (queries that leave, there and back; keys and values that do), forward."""
        of = self._token_bytes
        return 2 * of.query + of.lse, of.kv

    def extra_tokens(self, direction: int) -> float:
        """Return what a query costs besides its keys, in keys: `scheduler.work_of` counts like the kernels of
        squares."""
        return self._attention.sides[direction].first.extra_tokens

    def seconds(self, tasks: Tasks, direction: int, held: Ints, servers: Servers) -> TickSeconds:
        """Return the seconds of `tasks` forward (0) or backward (1) in the layers of a chunk, recomputation included;
        `held`: [server] padded tokens, 0 if it only serves."""
        both = task_seconds(self._attention, tasks, servers.number)
        attention = {one: both[one] for one in self._passes(direction)}
        rounds = self._rounds_of(tasks, direction, servers)
        linear_s = float(self.linear_s(direction, held).max())
        attention_s = sum(float(seconds.max(axis=1).sum()) for seconds in attention.values()) / self._chunks
        exchange_s = sum(self._exchange_s(one.sum(axis=(0, 1))) for one in rounds.values()) / self._chunks
        if not self.options.ping_pong:
            one_by_one_s = sum(float(self._rounds_s(one).sum()) for one in rounds.values()) / self._chunks
            return TickSeconds(linear_s, attention_s, exchange_s, one_by_one_s)
        longer_s = max(self._steps_s(direction, held, attention, rounds), exchange_s) - linear_s - attention_s
        return TickSeconds(linear_s, attention_s, exchange_s, max(longer_s, 0.0), max(-longer_s, 0.0))

    def linear_s(self, direction: int, rank_tokens: Ints) -> Floats:
        """Return the seconds of all but attention in a chunk, on lanes with so many padded tokens."""
        linear = self._linear[direction]
        stage_s = self.options.num_nano_batches * linear.constant + linear.per_token * rank_tokens
        return np.where(rank_tokens > 0, stage_s / self._chunks, 0.0)

    def attention_s(self, tasks: Tasks, direction: int, num_servers: int) -> Floats:
        """Return [server] seconds of its tasks, recomputation included; arguments as of `seconds`."""
        both = task_seconds(self._attention, tasks, num_servers)
        total: Floats = both[list(self._passes(direction))].sum(axis=(0, 1)) / self._chunks
        return total

    def work_beside(self, direction: int, held: Ints) -> Floats:
        """Return [server] all but attention of a nano-batch, in units of attention's work (`scheduler.work_of`)."""
        if not self.options.ping_pong:
            return np.zeros(len(held))  # attention begins when all are done with it
        per_work_s = sum(self._attention.sides[one].first.per_token2 for one in self._passes(direction))
        return self.linear_s(direction, held) * self._chunks / (2 * per_work_s)

    def _passes(self, direction: int) -> tuple[int, ...]:
        """Return the directions in which attention is computed: both, if backward computes it again."""
        return (0, 1) if direction == 1 and self._repeats != "nothing" else (direction,)

    def _rounds_of(self, tasks: Tasks, direction: int, servers: Servers) -> dict[int, Floats]:
        """Return pass -> `bytes_of_rounds` of all layers of a stage, slots for divisions."""
        fetches = fetches_of_tasks(tasks, servers.of_relay)
        found = {}
        for one in self._passes(direction):
            # Backward fetches columns of both nano-batches with the one that is computed first, the second.
            last = tasks.num_nano_batches - 1
            in_slots = fetches._replace(first=last - fetches.last, last=last - fetches.first) if one else fetches
            # Fetches of a repeated forward pass are still there for the gradients of the same layer.
            is_kept = one == 1 and self.options.ping_pong and self._repeats != "nothing"
            messages = self._token_bytes.messages(in_slots, tasks.tokens, backward=one == 1, is_kept=is_kept)
            found[one] = bytes_of_rounds(messages, servers, tasks.num_nano_batches)
        return found

    def _steps_s(self, direction: int, held: Ints, attention: dict[int, Floats], rounds: dict[int, Floats]) -> float:
        """Return the seconds of the steps of all layers of a chunk; `attention`: pass -> [nano-batch, server] seconds
        of all layers of a stage, `rounds`: pass -> their bytes."""
        layers, num_servers = max(round(self._attention.layers / self._chunks), 1), len(held)
        linear_s = np.zeros((2, num_servers))
        linear_s[direction] = self.linear_s(direction, held)
        if direction == 1 and self._repeats == "layers":
            linear_s[0] = self.linear_s(0, held)
            linear_s[1] = np.maximum(linear_s[1] - linear_s[0], 0.0)
        before_s, after_s = (linear_s * share / (NUM_NANO_BATCHES * layers) for share in self._shares)
        attention_s = np.zeros((2, NUM_NANO_BATCHES, num_servers))
        there_s, back_s = np.zeros((2, NUM_NANO_BATCHES)), np.zeros((2, NUM_NANO_BATCHES))
        for one, by_nano_batch in attention.items():
            # Tasks without nano-batches count as two equal ones.
            attention_s[one] = _in_two(by_nano_batch[::-1] if one else by_nano_batch) / self._attention.layers
            taken_s = self._rounds_s(_in_two(rounds[one])) / self._attention.layers
            there_s[one] = taken_s[:, [ACROSS, INSIDE]].sum(axis=1)
            back_s[one] = taken_s[:, [COLLECT, DELIVER]].sum(axis=1)
        # Backward the rest of a layer comes first.
        ahead_s, behind_s = np.stack([before_s[0], after_s[1]]), np.stack([after_s[0], before_s[1]])
        steps = step_table(layers, direction == 1, self._repeats)
        return float(seconds_of_steps(steps, layers, ahead_s, behind_s, attention_s, there_s, back_s))

    def _rounds_s(self, sent: Floats) -> Floats:
        """Return [division, round] seconds of the busiest link; `sent` is `bytes_of_rounds`."""
        busiest_s = self._busiest_s(sent)
        found: Floats = np.where(busiest_s > 0, busiest_s + self._attention.latency_s, 0.0)
        return found

    def _exchange_s(self, sent: Floats) -> float:
        """Return the seconds of the busiest link; `sent` is [link, sent or received, server] bytes."""
        if not sent.any():
            return 0.0
        # One round there and one back, in each nano-batch.
        return float(self._busiest_s(sent)) + 2 * self.options.num_nano_batches * self._attention.latency_s

    def _busiest_s(self, sent: Floats) -> Floats:
        """Return [...] seconds of the busiest link; `sent` is [..., link, sent or received, server] bytes."""
        found: Floats = (sent.max(axis=(-2, -1)) / np.array(self._attention.bandwidths)).max(axis=-1)
        return found


def _in_two(by_nano_batch: Floats) -> Floats:
    """Return [slot, ...] values, those of a single nano-batch halved."""
    return (
        by_nano_batch
        if len(by_nano_batch) == NUM_NANO_BATCHES
        else np.repeat(by_nano_batch / NUM_NANO_BATCHES, NUM_NANO_BATCHES, axis=0)
    )


def refuse_model(model: ModelShape, pp_size: int) -> None:
    """Raise UnsupportedFeatureError for a model whose attention cannot be tasks: linear attention, windows or other
    masks, experts, or stages or model chunks with different numbers of layers."""
    if model.linear_attention is not None:
        raise UnsupportedFeatureError(
            "layers with linear attention pass on states, which are no tasks of a pool: compare dynamic CP"
        )
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
                f"{what} have {min(numbers):g} to {max(numbers):g} layers, ticks need as many on each: choose PP x VPP "
                "that divides the layers, without --decoder-first-pipeline-num-layers and its like"
            )
