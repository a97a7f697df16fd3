"""A schedule of pipeline stages in which all of them are in the same phase, so that any of them may compute attention.

A *tick* is one forward or one backward pass of one micro-batch on each stage, layer by layer beside each other. In it
the ranks of all stages and lanes that have the same tensor-parallel rank are one group, the *pool*: each brings the
tokens of its own micro-batch, and computes whatever tiles the tick's placement gives it. A stage that has no
micro-batch in a tick (while the pipeline fills or drains) brings no tokens and serves the others.

`dynamic_cp.pipeline.ticks` has their order. Other micro-batches meet in a backward tick than in a forward tick, so each
has a placement of its own: backward fetches what it needs anew, and so does what is recomputed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.types import KINDS, num_ticks, tick_order
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.attention.serving import serve
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.data.pool import Pool
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.measuring.nvtx import span
from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator

FORWARD = KINDS[0]


def run_ticks(
    model: torch.nn.Module,
    data_iterator: Iterator[dict[str, Any]],
    pool: Pool,
    communicator: PlannedP2PCommunicator,
    groups: ProcessGroupCollection,
    *,
    num_microbatches: int,
    forward_step_func: Callable[..., Any],
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Run all micro-batches forward (and backward) by ticks; return what the loss function logged.

    Gradients are summed up and finished as megatron-core's schedules do it.

    Args:
        model: the one chunk of this stage.
        data_iterator: yields this lane's micro-batches.
        communicator: of the pass; groups: what `pipeline_p2p.schedule_groups` returns.

    Raises:
        UnsupportedFeatureError: a configuration under which ranks would not run the same layers at once.
        DisagreementError: the pool has other ticks than the pass, or other tokens than a micro-batch.
    """
    config = get_model_config(model)
    check_config(config)
    stage, pp_size = communicator.pp_group.rank(), communicator.pp_group.size()
    ticks = [tick for tick in tick_order(pp_size, 1, num_microbatches) if tick.kind == FORWARD or not forward_only]
    units = [tick.unit(stage, pp_size, 1, num_microbatches) for tick in ticks]
    micro_batches = [None if unit is None else unit.micro_batch for unit in units]
    check_number(pool, num_ticks(pp_size, 1, num_microbatches), forward_only=forward_only)
    mine = _Microbatches(
        model, data_iterator, config, groups.cp.size(), forward_step_func, num_microbatches, stage == pp_size - 1
    )
    idle = _Server(model, pool, repeats=repeats_attention(config))
    sync = _GradientSync(config, is_first=stage == 0)
    # What the other stages have sent for the next tick of each direction.
    came: dict[bool, Tensor | None] = {True: None, False: None}
    for at, (tick, micro_batch) in enumerate(zip(ticks, micro_batches, strict=True)):
        left = None
        is_forward = tick.kind == FORWARD
        with span("tick %s", tick):
            if micro_batch is None:
                idle.serve(pool.lane_of(tick), is_forward=is_forward)
            elif is_forward:
                left = mine.forward(pool.group, pool.lane_of(tick), came[True], micro_batch, keep=not forward_only)
            else:
                sync.before_backward(is_last=micro_batch == num_microbatches - 1)
                left = mine.backward(pool.lane_of(tick), came[False])
        following = next((later for later in range(at + 1, len(ticks)) if ticks[later].kind == tick.kind), None)
        comes = following is not None and micro_batches[following] is not None
        if is_forward:
            sent = left if stage < pp_size - 1 else None
            came[True] = communicator.send_forward_recv_forward(sent, comes and stage > 0, _FROM_PLAN)
        else:
            sent = left if stage > 0 else None
            came[False] = communicator.send_backward_recv_backward(sent, comes and stage < pp_size - 1, _FROM_PLAN)
    communicator.finish()
    if not forward_only:
        sync.finish(model)
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([model], mine.num_tokens, pg_collection=groups)
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
    "softmax_type": _UNTRIED,
}
"""Field of a configuration that would have ranks of a pool wait for ever, or that was not tried -> why."""


def layers_of(model: torch.nn.Module) -> list[TorchTHDAttention]:
    """Return the attention of each layer of a stage, in order.

    Raises:
        UnsupportedFeatureError: there is none that places attention.
    """
    layers = [module for module in model.modules() if isinstance(module, TorchTHDAttention)]
    if not layers:
        raise UnsupportedFeatureError(
            "the model has no attention of ours on this stage, and attention of a pool is placed: use "
            "--transformer-impl local, or plan without the pool"
        )
    return layers


def repeats_attention(config: Any) -> bool:
    """Return whether backward computes attention a second time."""
    granularity = config.recompute_granularity
    return granularity == "full" or (granularity == "selective" and "core_attn" in config.recompute_modules)


def check_config(config: Any) -> None:
    """Raise UnsupportedFeatureError where ranks would not run the same layers at once."""
    if config.virtual_pipeline_model_parallel_size not in (None, 1):
        raise UnsupportedFeatureError(
            f"{config.virtual_pipeline_model_parallel_size} virtual stages: a pool needs ticks, which are built for "
            "one chunk on each stage; leave out --num-layers-per-virtual-pipeline-stage, or plan without the pool"
        )
    for name, why in _REFUSED.items():
        if getattr(config, name, None) not in (None, False, 0, "vanilla"):
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


def check_number(pool: Pool, num_ticks: int, *, forward_only: bool) -> None:
    """Raise DisagreementError unless the pool has a part for each tick of the pass."""
    for name, planned in (("forward", len(pool.ticks.forward)), ("backward", len(pool.ticks.backward))):
        if planned != num_ticks and not (forward_only and name == "backward"):
            raise DisagreementError(
                f"the pool has {planned} {name} ticks, the pass has {num_ticks}: one for each micro-batch and one for "
                "each stage but the first; plan this step again",
                planned=planned,
                needed=num_ticks,
            )


class _Microbatches:
    """The micro-batches of this stage: those that have gone forward and not yet back are kept.

    Attributes:
        logged: what the loss function logged. num_tokens: with a loss, so far.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_iterator: Iterator[dict[str, Any]],
        config: Any,
        cp_size: int,
        forward_step_func: Callable[..., Any],
        num_microbatches: int,
        is_last_stage: bool,
    ) -> None:
        self._model, self._data_iterator, self._config = model, data_iterator, config
        self._cp_size, self._forward_step_func = cp_size, forward_step_func
        self._num_microbatches, self._is_last_stage = num_microbatches, is_last_stage
        self._kept: deque[tuple[DynamicPackedSeqParams, Tensor | None, Tensor]] = deque()
        self.logged: list[dict[str, Any]] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=next(model.parameters()).device)

    def forward(
        self, group: ProcessGroup, lane: PlacedLane, came: Tensor | None, micro_batch: int, *, keep: bool
    ) -> Tensor:
        """Run the next one and return what the next stage gets (the loss on the last one)."""
        batch = next(self._data_iterator)
        params = _in_pool(batch["packed_seq_params"], group, lane)
        output, num_tokens = schedules.forward_step(
            self._forward_step_func,
            iter([{**batch, "packed_seq_params": params}]),
            self._model,
            self._num_microbatches,
            came,
            self.logged,
            self._config,
            cp_group_size=self._cp_size,
            current_microbatch=micro_batch,
            is_last_stage=self._is_last_stage,
        )
        self.num_tokens += num_tokens
        if isinstance(output, list):
            (output,) = output
        if keep:
            self._kept.append((params, came, output))
        return output

    def backward(self, lane: PlacedLane, came: Tensor | None) -> Tensor | None:
        """Run the oldest one backward and return what the previous stage gets."""
        params, given, output = self._kept.popleft()
        move_to(lane, params)
        if given is not None:
            given.retain_grad()
        if came is None and self._config.grad_scale_func is not None:
            output = self._config.grad_scale_func(output)
        torch.autograd.backward(output, grad_tensors=came)
        return None if given is None else given.grad


class _Server:
    """A stage in the ticks in which it has no micro-batch."""

    def __init__(self, model: torch.nn.Module, pool: Pool, *, repeats: bool) -> None:
        self._layers, self._repeats = layers_of(model), repeats
        self._params = DynamicPackedSeqParams(
            cp_group=pool.group,
            local_cp_size=pool.group.size(),
            positions=torch.empty(0, dtype=torch.int64, device=next(model.parameters()).device),
            cp_comm_type="blocks",
            stats=pool.stats,
            label="a stage without a micro-batch",
        )

    def serve(self, lane: PlacedLane, *, is_forward: bool) -> None:
        """Compute what the tick's placement gives this rank, layer by layer, in the order of those with tokens."""
        move_to(lane, self._params)
        for layer in self._layers if is_forward else reversed(self._layers):
            if is_forward or self._repeats:
                serve(layer, self._params, backward=False)
            if not is_forward:
                serve(layer, self._params, backward=True)


def _in_pool(params: DynamicPackedSeqParams, group: ProcessGroup, lane: PlacedLane) -> DynamicPackedSeqParams:
    """Return the parameters of a micro-batch whose attention the pool computes."""
    placed = replace(params, cp_group=group, cp_comm_type="blocks", heads_group=None, ring_group=None, packs={})
    move_to(lane, placed)
    return placed


def move_to(lane: PlacedLane, params: DynamicPackedSeqParams) -> None:
    """Have a micro-batch computed by the programme of a tick.

    Raises:
        DisagreementError: the tick has other tokens of this rank than the micro-batch.
    """
    if lane.num_tokens != len(params.positions):
        raise DisagreementError(
            f"a tick has {lane.num_tokens} tokens of this rank, its micro-batch has {len(params.positions)}: "
            "the placement of the tick is that of other micro-batches; this is a bug",
            planned=lane.num_tokens,
            tokens=len(params.positions),
        )
    params.placed = lane
    params.packs.clear()
    params.of_masks.clear()


class _GradientSync:
    """When data-parallel sums of gradients begin: with the last backward, as in megatron-core's schedules."""

    def __init__(self, config: Any, *, is_first: bool) -> None:
        self._config, self._is_first = config, is_first
        self._context: contextlib.AbstractContextManager[Any] | None = (config.no_sync_func or contextlib.nullcontext)()
        self._context.__enter__()

    def before_backward(self, *, is_last: bool) -> None:
        """Let the sums begin with the last backward, unless a function of the user's begins them."""
        if is_last and (self._config.grad_sync_func is None or self._is_first):
            self._enable()

    def finish(self, model: torch.nn.Module) -> None:
        """Begin what has not begun."""
        if self._context is not None:
            self._enable()
            if self._config.grad_sync_func is not None:
                self._config.grad_sync_func(model.parameters())

    def _enable(self) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
