"""Attention of a layer that runs in two nano-batches, as three autograd nodes for each: launch, attend and wait.

Backward of `wait` launches the gradient of the output, that of `attend` computes, and that of `launch` waits for the
gradients of queries and keys. autograd runs ready nodes in the reverse order of their making, so backward interleaves
nano-batches and layers as forward did. Tokens go from node to node in buffers of the layer (`NanoBatchedLayer`); in the
graph a node gets *tickets*, empty tensors, of those that must have run before it.
Shapes: T local tokens of a nano-batch, H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.errors import DisagreementError
from dynamic_cp.placement.programme import Programme
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pool.layer_steps import NUM_NANO_BATCHES, Repeats, steps_of
from dynamic_cp.types.placement import ROW
from megatron.dynamic_cp.attention.kernels.choice import kernel_for
from megatron.dynamic_cp.attention.mechanisms.blocks import BackwardPass, Fetched, ForwardPass
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums, offset_gradient, with_offset
from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.attention.placed_packs import PlacedLane, PlacedPacks
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, LayerCache
from megatron.dynamic_cp.pool.layer_pass import LayerPass, StepOrder, mirrored


def nano_batches_of_tokens(lane: PlacedLane) -> NDArray[np.int64]:
    """Return [token] the nano-batch, 0 or 1, of a lane's tokens (padding: 1); DisagreementError if in none or both."""
    programme = lane.programme
    found: dict[int, set[int]] = {}
    for nano_batch, tiles in enumerate(programme.tiles):
        for row, _ in tiles:
            found.setdefault(row, set()).add(nano_batch)
    for exchange in programme.exchanges:
        for _, entries in exchange.sends:
            for number, kind in entries:
                if kind == ROW and programme.held[number].kind < 0:
                    found.setdefault(number, set()).add(exchange.division)
    nano_batches = np.full(lane.num_tokens, NUM_NANO_BATCHES - 1, np.int64)
    for number, one in enumerate(programme.held):
        if one.kind >= 0:
            continue
        of_home = found.get(number, set())
        if of_home not in ({0}, {1}):
            raise DisagreementError(
                f"tokens {one.start} to {one.stop} of sample {one.sample} are computed in the nano-batches "
                f"{sorted(of_home)}, one of 0 and 1 is needed: plan this step again"
            )
        nano_batches[one.place : one.place + one.num_tokens] = of_home.pop()
    return nano_batches


class NanoBatches:
    """A micro-batch on this rank whose layers run in two nano-batches, or what a stage without one does meanwhile.

    Attributes:
        rows: [nano-batch] which of the rank's tokens it has, int64, ascending.
        sizes: [nano-batch] its tokens with padding: at least one, and as many on each tensor-parallel rank.
        back: where each token of the rank is in the two nano-batches without padding, one behind the other.
        step_order: steps of the tick.
    """

    step_order: StepOrder

    def __init__(self, params: DynamicPackedSeqParams, lane: PlacedLane, multiple: int) -> None:
        self.params, device = params, params.positions.device
        self._of_token = nano_batches_of_tokens(lane)
        rows = [np.flatnonzero(self._of_token == nano_batch) for nano_batch in range(NUM_NANO_BATCHES)]
        brings_none = not len(self._of_token)
        self.sizes = tuple(0 if brings_none else max(round_up(len(one), multiple), multiple) for one in rows)
        self.rows = tuple(to_device(one, device) for one in rows)
        order = np.concatenate(rows)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        self.back = to_device(back, device)
        # [token] its place among those of both nano-batches, padding included.
        shift = np.array([0, self.sizes[0] - len(rows[0])], np.int64)
        self._places = back + shift[self._of_token]
        self._rotary_params: list[DynamicPackedSeqParams] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of both nano-batches, with their padding."""
        return sum(self.sizes)

    def range_of(self, nano_batch: int) -> slice:
        """Return where a nano-batch's tokens are among those of both."""
        return slice(0, self.sizes[0]) if nano_batch == 0 else slice(self.sizes[0], self.num_tokens)

    def begin(self, lane: PlacedLane, num_layers: int, *, is_backward: bool, repeats: Repeats) -> None:
        """Begin a tick of `num_layers` layers; `lane` is the rank's part of it, `repeats` what backward computes again.
        Raises DisagreementError: the lane's tokens are in other nano-batches than before."""
        moved = np.flatnonzero(nano_batches_of_tokens(lane) != self._of_token)
        if len(moved):
            raise DisagreementError(
                f"{self.params.label}: {len(moved)} of {len(self._of_token)} tokens are in another nano-batch backward "
                f"than forward, the first being {moved[0]}: plan this step again"
            )
        self._lane, self._packs = lane, None
        self.step_order = StepOrder(steps_of(num_layers, is_backward=is_backward, repeats=repeats), self.params.label)

    def params_of(self, nano_batch: int) -> DynamicPackedSeqParams:
        """Return parameters with the positions of a nano-batch; padding is at position 0."""
        if not self._rotary_params:
            for rows, size in zip(self.rows, self.sizes, strict=True):
                positions = self.params.positions.new_zeros(size)
                positions[: len(rows)] = self.params.positions.index_select(0, rows)
                self._rotary_params.append(replace(self.params, positions=positions, cache=LayerCache()))
        return self._rotary_params[nano_batch]

    def direction(
        self, core: TorchTHDAttention, layer: int, *, is_backward: bool, kept: Fetched | None = None
    ) -> LayerPass:
        """Return one direction of a layer, without tokens yet. `kept` is for backward, from the layer's forward pass
        where that was computed again in the tick."""
        config, device = core.config, self.params.positions.device
        tp_size = config.tensor_model_parallel_size
        heads = config.num_attention_heads // tp_size, max(1, config.num_query_groups // tp_size)
        query, key = (
            torch.empty(0, number, config.kv_channels, dtype=config.params_dtype, device=device) for number in heads
        )
        kernel = kernel_for(query, core.backend)
        packs = self._packs_of(device)[is_backward]
        one: ForwardPass | BackwardPass
        if is_backward:
            lse_HT = torch.empty(heads[0], 0, device=device)
            rows = RowGradients(query, query, query, lse_HT, kernel, core.softmax_scale)
            one = BackwardPass(rows, torch.stack((key, key)), packs, keeps_apart=packs.relays, kept=kept)
        else:
            one = ForwardPass(RowSums(query, kernel, core.softmax_scale), torch.stack((key, key)), packs)
        return LayerPass(one, packs, self.params, self.step_order, layer, is_backward=is_backward)

    def _packs_of(self, device: torch.device) -> tuple[PlacedPacks, PlacedPacks]:
        if self._packs is None:
            lane = replace(self._lane, programme=self._arranged(self._lane.programme), num_tokens=self.num_tokens)
            packs = lane.packs(device, self.params.mask)
            packs = packs._replace(
                row_room=packs.num_tokens + packs.row_room,
                column_room=packs.num_tokens + packs.column_room,
                divisions=packs.divisions + ((),) * (NUM_NANO_BATCHES - len(packs.divisions)),
            )
            self._packs = packs, mirrored(packs)
        return self._packs

    def _arranged(self, programme: Programme) -> Programme:
        held = (one if one.kind >= 0 else one._replace(place=int(self._places[one.place])) for one in programme.held)
        return programme._replace(held=tuple(held))


class Beside(Protocol):
    """Attention of the layer before, which backward computes again beside the gradients of this one."""

    def launch_again(self) -> None:
        """Begin to send both nano-batches."""

    def attend_again(self) -> None:
        """Compute this rank's part of both nano-batches."""


class NanoBatchedLayer:
    """Attention of one layer of a micro-batch, from its first forward step to its last backward one. `layer` is its
    number on the stage. `keeps`: backward will come; `repeats`: and computes attention again; `is_again`: this is
    that second time, with backward in the same tick. `beside` is computed again beside this layer's gradients."""

    beside: Beside | None = None

    def __init__(
        self,
        nano_batches: NanoBatches,
        core: TorchTHDAttention,
        layer: int,
        *,
        keeps: bool,
        repeats: bool,
        is_again: bool,
    ) -> None:
        self._nano_batches, self._core, self._layer = nano_batches, core, layer
        self._keeps, self.repeats, self._is_again = keeps, repeats, is_again
        self._kept: Fetched | None = None
        self._brought: list[tuple[Tensor, ...]] = []
        self._found: list[tuple[Tensor, Tensor]] = []
        self._running: LayerPass | None = None

    def launch(self, query: Tensor, key: Tensor, value: Tensor, nano_batch: int) -> None:
        """Send the queries, keys and values of a nano-batch, [T, heads, dim]."""
        self._brought.append((query.detach(), key.detach(), value.detach()))
        self._launch_forward(nano_batch)

    def attend(self, nano_batch: int) -> None:
        self._direction.attend(nano_batch)

    def wait(self, nano_batch: int) -> Tensor:
        self._direction.wait(nano_batch)
        out_THD = self._output(nano_batch, keep=self._keeps and not self.repeats)
        if nano_batch == NUM_NANO_BATCHES - 1:
            self._kept = self._direction.one.kept if self._is_again else None
            self._running = None
            if not self._keeps:
                self._brought = []
        return out_THD

    def launch_backward(self, grad_THD: Tensor, nano_batch: int) -> None:
        """Send the gradient of a nano-batch's output, and with the second one, which comes first, all keys. What a
        forward pass in the same tick fetched, also queries, is not sent again."""
        if nano_batch == NUM_NANO_BATCHES - 1:
            if self.repeats:
                self._wait_again()
            self._running = self._nano_batches.direction(self._core, self._layer, is_backward=True, kept=self._kept)
        rows, columns = self._direction.one.fetched
        if nano_batch == NUM_NANO_BATCHES - 1 and self._kept is None:
            for each in range(NUM_NANO_BATCHES):
                self._fill(columns, self._brought[each][1:], each)
        of_nano_batch = grad_THD, self._brought[nano_batch][0], *self._found[nano_batch]
        self._fill(rows, of_nano_batch if self._kept is None else (of_nano_batch[0], *of_nano_batch[2:]), nano_batch)
        self._direction.launch(_slot(nano_batch))

    def offset_gradient(self, grad_THD: Tensor, nano_batch: int) -> Tensor | None:
        """Return a nano-batch's part of the gradient of the additional score (`softmax_offset`), None without one."""
        offset_H = self._core.softmax_offset
        if offset_H is None or not offset_H.requires_grad:
            return None
        return offset_gradient(offset_H, grad_THD, *self._found[nano_batch]).to(offset_H.dtype)

    def attend_backward(self, nano_batch: int) -> None:
        """Compute this rank's gradients of a nano-batch, and around both what is computed again."""
        if self.beside is not None and nano_batch == NUM_NANO_BATCHES - 1:
            self.beside.launch_again()
        self._direction.attend(_slot(nano_batch))
        if self.beside is not None and nano_batch == 0:
            self.beside.attend_again()
            self.beside = None

    def launch_again(self) -> None:
        """Send queries, keys and values of both nano-batches again: their outputs were not kept."""
        for nano_batch in range(NUM_NANO_BATCHES):
            self._launch_forward(nano_batch)

    def attend_again(self) -> None:
        for nano_batch in range(NUM_NANO_BATCHES):
            self._direction.attend(nano_batch)

    def gradients(self, nano_batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values of a nano-batch."""
        self._direction.wait(_slot(nano_batch))
        one, rows, dtype = (
            self._direction.one,
            self._nano_batches.range_of(nano_batch),
            self._brought[nano_batch][0].dtype,
        )
        grad_q_THD = one.rows.grad_q_THD[rows].to(dtype, copy=True)
        grad_k_THD, grad_v_THD = one.grad_of_columns(rows).to(dtype, copy=True)
        if nano_batch == 0:
            self._running, self._kept, self._brought, self._found = None, None, [], []
        return grad_q_THD, grad_k_THD, grad_v_THD

    @property
    def _direction(self) -> Any:
        assert self._running is not None, "a nano-batch is launched before it is attended to"
        return self._running

    def _launch_forward(self, nano_batch: int) -> None:
        if nano_batch == 0:
            self._running = self._nano_batches.direction(self._core, self._layer, is_backward=False)
        query, *keys = self._brought[nano_batch]
        rows, columns = self._direction.one.fetched
        self._fill(rows, (query,), nano_batch)
        self._fill(columns, keys, nano_batch)
        self._direction.launch(nano_batch)

    def _fill(self, buffers: Sequence[Tensor], values: Sequence[Tensor], nano_batch: int) -> None:
        for buffer, of_nano_batch in zip(buffers, values, strict=True):
            buffer[self._nano_batches.range_of(nano_batch)].copy_(of_nano_batch)

    def _wait_again(self) -> None:
        """Wait for outputs that are computed again beside the layer behind; the last layer has none and begins here."""
        if self._running is None:
            self.launch_again()
            self.attend_again()
        for nano_batch in range(NUM_NANO_BATCHES):
            self._direction.wait(nano_batch)
            self._output(nano_batch, keep=True)
        self._kept = self._direction.one.kept

    def _output(self, nano_batch: int, *, keep: bool) -> Tensor:
        """Return the output of a nano-batch; `keep`: store what backward needs of it."""
        sums, rows = self._direction.one.sums, self._nano_batches.range_of(nano_batch)
        out_THD, lse_HT, offset_H = sums.out_THD[rows], sums.lse_HT[:, rows], self._core.softmax_offset
        if offset_H is not None:
            out_THD, lse_HT = with_offset(out_THD, lse_HT, offset_H.detach())
        found: Tensor = out_THD.to(self._brought[nano_batch][0].dtype, copy=True)
        if keep:
            self._found.append((found.detach(), lse_HT.t().contiguous()))
        return found


def _slot(nano_batch: int) -> int:
    return NUM_NANO_BATCHES - 1 - nano_batch


class Launch(torch.autograd.Function):
    """Begin the exchange of a nano-batch; returns a ticket."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, one: NanoBatchedLayer, nano_batch: int) -> Tensor:
        ctx.one, ctx.nano_batch = one, nano_batch
        one.launch(query, key, value, nano_batch)
        return query.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, _ticket: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.one.gradients(ctx.nano_batch), None, None


class Attend(torch.autograd.Function):
    """Compute this rank's part of a nano-batch; takes tickets of this one and the one before, returns one."""

    @staticmethod
    def forward(ctx: Any, one: NanoBatchedLayer, nano_batch: int, *tickets: Tensor) -> Tensor:
        ctx.one, ctx.nano_batch, ctx.num_tickets = one, nano_batch, len(tickets)
        one.attend(nano_batch)
        return tickets[-1].new_zeros(0)

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor | None, ...]:
        ctx.one.attend_backward(ctx.nano_batch)
        return None, None, *[ticket] * ctx.num_tickets


class Wait(torch.autograd.Function):
    """Return the output of a nano-batch, [T, heads, dim], for its ticket."""

    @staticmethod
    def forward(
        ctx: Any, one: NanoBatchedLayer, nano_batch: int, ticket: Tensor, _softmax_offset_H: Tensor | None
    ) -> Tensor:
        ctx.one, ctx.nano_batch = one, nano_batch
        return one.wait(nano_batch)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        ctx.one.launch_backward(grad_THD, ctx.nano_batch)
        return None, None, grad_THD.new_zeros(0), ctx.one.offset_gradient(grad_THD, ctx.nano_batch)
