"""A schedule of pipeline stages in which all of them are in the same phase, so that any of them may compute attention.

A *tick* is one forward or one backward pass of one model chunk of one micro-batch on each stage, layer by layer beside
each other. The ranks of all stages and lanes with the same tensor-parallel rank are one group, the *pool*: each brings
the tokens of its own micro-batch, and computes the tiles that the tick's placement gives it. A stage without a
micro-batch in a tick (while the pipeline fills or drains) only serves the others. `dynamic_cp.pool.ticks` has their
order. A backward tick has other micro-batches than a forward tick, so each has its own placement, and backward fetches
anew what it needs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.pool.layer_steps import Repeats
from dynamic_cp.pool.ticks import Tick, Unit, num_ticks, tick_order
from dynamic_cp.types import BY_PLACEMENT
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.data.micro_batches import PoolSteps, RunStep
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.measuring import span
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, LayerCache
from megatron.dynamic_cp.pool.block import run_blocks_in_nano_batches
from megatron.dynamic_cp.pool.lane_ticks import LaneTicks, Pool, lane_ticks, pool_group
from megatron.dynamic_cp.pool.nano_batches import NanoBatches
from megatron.dynamic_cp.pool.serving import serve, serve_nano_batches
from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator

FORWARD = KINDS[0]


def run_ticks(
    pool: Pool,
    model: Sequence[torch.nn.Module],
    data_iterators: Sequence[Iterator[dict[str, Any]]],
    communicator: PlannedP2PCommunicator,
    groups: ProcessGroupCollection,
    *,
    num_microbatches: int,
    forward_step_func: Callable[..., Any],
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Run all micro-batches forward (and backward) by ticks; return what the loss function logged.

    Gradients are summed up and finished as in megatron-core's schedules. `data_iterators` yield this lane's
    micro-batches, one iterator for each chunk of the stage; `groups` is from `pipeline_p2p.schedule_groups`. Raises
    UnsupportedFeatureError: a configuration under which ranks would not run the same layers at once. Raises
    DisagreementError: the pool has other ticks than the pass, or other tokens than a micro-batch.
    """
    config = get_model_config(model[0])
    check_config(config)
    stage, shape = communicator.pp_group.rank(), (communicator.pp_group.size(), len(model), num_microbatches)
    check_number(pool, num_ticks(*shape), forward_only=forward_only)
    if pool.in_nano_batches:
        run_blocks_in_nano_batches(model)
    mine = _Microbatches(
        model, data_iterators, pool, config, groups.cp.size(), forward_step_func, num_microbatches, stage, shape[0]
    )
    idle = _Server(model, pool, repeats=repeats_attention(config))
    sync = _GradientSync(config, model, num_microbatches, is_first=stage == 0)
    # What the other stages have sent for the next tick of each direction.
    came: dict[str, Tensor | None] = dict.fromkeys(KINDS)
    for tick in tick_order(*shape):
        is_forward = tick.kind == FORWARD
        if forward_only and not is_forward:
            continue
        unit, left = tick.unit(stage, *shape), None
        with span("tick %s", tick):
            if unit is None:
                idle.serve(pool.lane_of(tick), is_forward=is_forward)
            elif is_forward:
                left = mine.forward(unit, pool.lane_of(tick), came[tick.kind], keep=not forward_only)
            else:
                with sync.of_backward(unit):
                    left = mine.backward(unit, pool.lane_of(tick), came[tick.kind])
        following = Tick(tick.kind, tick.number + 1).unit(stage, *shape)
        if is_forward:
            comes = following is not None and not mine.begins(following)
            came[tick.kind] = communicator.send_forward_recv_forward(left, comes, _FROM_PLAN)
        else:
            comes = following is not None and not mine.ends(following)
            came[tick.kind] = communicator.send_backward_recv_backward(left, comes, _FROM_PLAN)
            sync.after_tick(tick.unit(0, *shape))
    communicator.finish()
    if not forward_only and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(list(model), mine.num_tokens, pg_collection=groups)
    return mine.logged


_FROM_PLAN = (0, 0, 0)
"""Shapes come from the plan (`PlannedP2PCommunicator`)."""
_AS_MANY = "all stages run as many layers, one beside the other"
_UNTRIED = "it was not tried with one"
_REFUSED = {
    "num_layers_in_first_pipeline_stage": _AS_MANY,
    "num_layers_in_last_pipeline_stage": _AS_MANY,
    "account_for_embedding_in_pipeline_split": _AS_MANY,
    "account_for_loss_in_pipeline_split": _AS_MANY,
    "pipeline_model_parallel_layout": _AS_MANY,
    "mtp_num_layers": _AS_MANY,
    "num_moe_experts": "stages without a micro-batch have no tokens for experts",
    "window_size": _UNTRIED,
    "multi_latent_attention": _UNTRIED,
}
"""Field of a configuration that would make ranks of a pool wait for ever, or that was not tried -> why."""


def layers_of(model: Sequence[torch.nn.Module]) -> list[TorchTHDAttention]:
    """Return the attention of each layer of the first chunk, in order, which stands for all chunks of the stage. Raises
    UnsupportedFeatureError: there is none that places attention, or chunks have other numbers of layers."""
    layers = [[module for module in chunk.modules() if isinstance(module, TorchTHDAttention)] for chunk in model]
    if not all(layers):
        raise UnsupportedFeatureError(
            "the model has no attention of ours on this stage, and attention of a pool is placed: use "
            "--transformer-impl local, or plan without the pool"
        )
    if len({len(of_chunk) for of_chunk in layers}) > 1:
        raise UnsupportedFeatureError(
            f"the model chunks of this stage have {' and '.join(str(len(of_chunk)) for of_chunk in layers)} layers, in "
            f"a pool they must have as many, because {_AS_MANY}: leave the layout of stages out, or plan without the "
            "pool"
        )
    return layers[0]


def repeats_attention(config: Any) -> bool:
    """Return whether backward computes attention a second time."""
    granularity = config.recompute_granularity
    return granularity == "full" or (granularity == "selective" and "core_attn" in config.recompute_modules)


def check_config(config: Any) -> None:
    """Raise UnsupportedFeatureError where ranks would not run the same layers at once."""
    for name, why in _REFUSED.items():
        if getattr(config, name, None) not in (None, False, 0):
            raise UnsupportedFeatureError(
                f"{name} is {getattr(config, name)}, in a pool it must be off, because {why}: leave it out, or plan "
                "without the pool"
            )
    method = config.recompute_method, config.recompute_num_layers
    if config.recompute_granularity == "full" and method != ("uniform", 1):
        raise UnsupportedFeatureError(
            f"full recomputation with the method {method[0]} and {method[1]} layers: "
            "in a pool all ranks recompute layer by layer; give --recompute-method uniform --recompute-num-layers 1"
        )


def check_number(pool: Pool, needed: int, *, forward_only: bool) -> None:
    """Raise DisagreementError unless the pool has a part for each tick of the pass."""
    for name, planned in (("forward", len(pool.ticks.forward)), ("backward", len(pool.ticks.backward))):
        if planned != needed and not (forward_only and name == "backward"):
            raise DisagreementError(
                f"the pool has {planned} {name} ticks, the pass has {needed}: it is that of another number of "
                "micro-batches, stages or model chunks; plan this step again"
            )


class _Microbatches:
    """The micro-batches of this stage; keeps those that have gone forward through a chunk and not yet back. `logged` is
    what the loss function logged, `num_tokens` the tokens with a loss so far."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        data_iterators: Sequence[Iterator[dict[str, Any]]],
        pool: Pool,
        config: Any,
        cp_size: int,
        forward_step_func: Callable[..., Any],
        num_microbatches: int,
        stage: int,
        pp_size: int,
    ) -> None:
        self._model, self._data_iterators, self._pool, self._config = model, data_iterators, pool, config
        self._cp_size, self._forward_step_func = cp_size, forward_step_func
        self._num_microbatches, self._stage, self._pp_size = num_microbatches, stage, pp_size
        self._kept: list[deque[tuple[DynamicPackedSeqParams, Tensor | None, Tensor]]] = [deque() for _ in model]
        self.logged: list[dict[str, Any]] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=next(model[0].parameters()).device)

    def begins(self, unit: Unit) -> bool:
        """Return whether a unit is the first chunk of its micro-batch, with the embedding."""
        return self._stage == 0 and unit.chunk == 0

    def ends(self, unit: Unit) -> bool:
        """Return whether a unit is the last chunk of its micro-batch, with the loss."""
        return self._stage == self._pp_size - 1 and unit.chunk == len(self._model) - 1

    def forward(self, unit: Unit, lane: PlacedLane, came: Tensor | None, *, keep: bool) -> Tensor | None:
        """Run the next micro-batch of a chunk; return what the next chunk gets, None behind the last one."""
        batch = next(self._data_iterators[unit.chunk])
        params = _in_pool(batch["packed_seq_params"], self._pool, lane)
        if self._pool.in_nano_batches:
            params.cache.nano_batches = _nano_batches(params, lane, self._config)
            begin_nano_batches(params.cache.nano_batches, lane, self._model, is_forward=True)
        output, num_tokens = schedules.forward_step(
            self._forward_step_func,
            iter([{**batch, "packed_seq_params": params}]),
            self._model[unit.chunk],
            self._num_microbatches,
            came,
            self.logged,
            self._config,
            cp_group_size=self._cp_size,
            current_microbatch=unit.micro_batch,
            is_last_stage=self.ends(unit),
        )
        end_nano_batches(params, keep=keep)
        self.num_tokens += num_tokens
        if isinstance(output, list):
            (output,) = output
        if keep:
            self._kept[unit.chunk].append((params, came, output))
        return None if self.ends(unit) else output

    def backward(self, unit: Unit, lane: PlacedLane, came: Tensor | None) -> Tensor | None:
        """Run the oldest micro-batch of a chunk backward; return what the chunk before gets."""
        params, given, output = self._kept[unit.chunk].popleft()
        move_to(lane, params)
        if params.cache.nano_batches is not None:
            begin_nano_batches(params.cache.nano_batches, lane, self._model, is_forward=False)
        if given is not None:
            given.retain_grad()
        if came is None and self._config.grad_scale_func is not None:
            output = self._config.grad_scale_func(output)
        torch.autograd.backward(output, grad_tensors=came)
        end_nano_batches(params, keep=False)
        return None if given is None else given.grad


class _Server:
    def __init__(self, model: Sequence[torch.nn.Module], pool: Pool, *, repeats: bool) -> None:
        self._model, self._in_nano_batches = model, pool.in_nano_batches
        self._layers, self._repeats = layers_of(model), repeats
        self._params = DynamicPackedSeqParams(
            cp_group=pool.group,
            local_cp_size=pool.group.size(),
            positions=torch.empty(0, dtype=torch.int64, device=next(model[0].parameters()).device),
            cp_comm_type=BY_PLACEMENT,
            stats=pool.stats,
            label="a stage without a micro-batch",
        )

    def serve(self, lane: PlacedLane, *, is_forward: bool) -> None:
        """Compute what the tick's placement gives this rank, layer by layer, in the order of ranks with tokens."""
        move_to(lane, self._params)
        if self._in_nano_batches:
            nano_batches = _nano_batches(self._params, lane, get_model_config(self._model[0]))
            begin_nano_batches(nano_batches, lane, self._model, is_forward=is_forward)
            serve_nano_batches(self._layers, nano_batches)
            return
        for layer in self._layers if is_forward else reversed(self._layers):
            if is_forward or self._repeats:
                serve(layer, self._params, backward=False)
            if not is_forward:
                serve(layer, self._params, backward=True)


def _in_pool(params: DynamicPackedSeqParams, pool: Pool, lane: PlacedLane) -> DynamicPackedSeqParams:
    placed = replace(
        params, cp_group=pool.group, cp_comm_type=BY_PLACEMENT, heads_group=None, ring_group=None, cache=LayerCache()
    )
    move_to(lane, placed)
    return placed


def _nano_batches(params: DynamicPackedSeqParams, lane: PlacedLane, config: Any) -> NanoBatches:
    """Return the two nano-batches of a micro-batch, each of a length that tensor-parallel ranks can share."""
    return NanoBatches(params, lane, config.tensor_model_parallel_size if config.sequence_parallel else 1)


def begin_nano_batches(
    nano_batches: NanoBatches, lane: PlacedLane, model: Sequence[torch.nn.Module], *, is_forward: bool
) -> None:
    """Begin a tick of layers in two nano-batches, on all ranks with the same steps."""
    config = get_model_config(model[0])
    repeats: Repeats = "nothing"
    if model[0].training and repeats_attention(config):
        repeats = "layers" if config.recompute_granularity == "full" else "attention"
    nano_batches.begin(lane, len(layers_of(model)), is_backward=not is_forward, repeats=repeats)


def end_nano_batches(params: DynamicPackedSeqParams, *, keep: bool) -> None:
    """Raise if a step of the tick is left; without `keep` the micro-batch is done."""
    if params.cache.nano_batches is not None:
        params.cache.nano_batches.step_order.finish()
        if not keep:
            params.cache.nano_batches = None  # which has the parameters, and would keep them


def move_to(lane: PlacedLane, params: DynamicPackedSeqParams) -> None:
    """Have a micro-batch computed by a tick's programme; DisagreementError if that has other tokens of this rank."""
    if lane.num_tokens != len(params.positions):
        raise DisagreementError(
            f"a tick has {lane.num_tokens} tokens of this rank, its micro-batch has {len(params.positions)}: "
            "the placement of the tick is that of other micro-batches; this is a bug"
        )
    params.cache.move_to(lane)


class _GradientSync:
    """Begins data-parallel sums of a chunk's gradients with its last backward, as megatron-core's schedules do. If a
    user's function begins them (`grad_sync_func`), stages wait until the first one has got there, too."""

    def __init__(self, config: Any, model: Sequence[torch.nn.Module], num_microbatches: int, *, is_first: bool) -> None:
        given = config.no_sync_func
        self._no_sync: list[Any] = given if isinstance(given, list) else [given or contextlib.nullcontext]
        begin = config.grad_sync_func
        self._begin: list[Any] = begin if isinstance(begin, list) else [begin] * len(model)
        self._model, self._last = model, num_microbatches - 1
        self._begin_by_themselves = is_first or begin is None

    @contextlib.contextmanager
    def of_backward(self, unit: Unit) -> Iterator[None]:
        """Keep sums from beginning in a backward pass that must not begin them."""
        with contextlib.ExitStack() as stack:
            if not (self._begin_by_themselves and unit.micro_batch == self._last):
                for no_sync in self._no_sync:
                    stack.enter_context(no_sync())
            yield

    def after_tick(self, first: Unit | None) -> None:
        """On all other stages, begin the sums of the chunk that the first stage has finished in a backward tick."""
        if not self._begin_by_themselves and first is not None and first.micro_batch == self._last:
            self._begin[first.chunk](self._model[first.chunk].parameters())


def _ready(ticks: LaneTicks, groups: DynamicCPGroups, stats: ExchangeStats) -> RunStep:
    return partial(run_ticks, Pool.of(ticks, groups, stats))


STEPS = PoolSteps(pack=lane_ticks, group=pool_group, ready=_ready)
