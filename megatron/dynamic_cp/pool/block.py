"""Layers of a stage in two nano-batches of a micro-batch: one is computed while the attention of the other travels.

A nano-batch is some rows of the hidden states. Attention goes out and comes back (`nano_batches`) while the rest of the
other nano-batch's layer is computed, and the end of a layer runs together with the beginning of the next one:

    before 0, launch 0, before 1, launch 1, attend 0, attend 1,
    wait 0, after 0 and the next layer's before 0, launch 0, wait 1, after 1 and the next layer's before 1, ...

With full recomputation forward keeps the input of each layer (`_RunTwice`), and beside the gradients of a layer
backward computes the layer before again up to its attention (`_Repeated`).
Shapes: T local tokens of a nano-batch, H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from dynamic_cp.pool.layer_steps import NUM_NANO_BATCHES
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.pool.nano_batches import Attend, Beside, Launch, NanoBatchedLayer, NanoBatches, Wait


def run_blocks_in_nano_batches(model: Sequence[torch.nn.Module]) -> None:
    """Make the blocks of a stage run nano-batched micro-batches in nano-batches. GPTModel names the class of its block
    itself, so the blocks that it made are given the other class."""
    for module in (module for chunk in model for module in chunk.modules()):
        if type(module) is TransformerBlock:
            module.__class__ = BlockInNanoBatches


class BlockInNanoBatches(TransformerBlock):
    """megatron-core's TransformerBlock; only micro-batches whose attention goes out in nano-batches run otherwise."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        nano_batches: NanoBatches | None = getattr(packed_seq_params, "nano_batches", None)
        if nano_batches is None:
            kwargs |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            found: Tensor = super().forward(hidden_states, *args, **kwargs)
            return found
        if not self.pre_process:
            hidden_states = self.input_tensor
        is_sharded = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_sharded else nullcontext():
            states = self._through_layers(_apart(hidden_states, nano_batches, is_sharded), nano_batches, rotary_pos_emb)
        hidden_states = _together(states, nano_batches, is_sharded)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _through_layers(self, states: list[Tensor], nano_batches: NanoBatches, rotary: Tensor | None) -> list[Tensor]:
        numbered = list(enumerate(self.layers))
        if self.config.recompute_granularity == "full" and self.training:
            repeated = [_Repeated(layer, number, nano_batches, rotary) for number, layer in numbered]
            return list(_RunTwice.apply(repeated, *states))
        return _run((_Layer(layer, number, nano_batches, rotary) for number, layer in numbered), states)


def _run(layers: Iterable[_Layer], states: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of neighbouring layers, [nano-batch], from the input `states` of the first, [nano-batch]."""
    found, behind = list(states), None
    for ahead in layers:
        for nano_batch in range(NUM_NANO_BATCHES):
            if behind is not None:
                found[nano_batch] = behind.end(nano_batch)
            ahead.begin(found[nano_batch], nano_batch)
        ahead.attend()
        if behind is not None and ahead.exchange.repeats:
            ahead.exchange.beside = behind.exchange
        behind = ahead
    assert behind is not None, "a stage has layers"
    return [behind.end(nano_batch) for nano_batch in range(NUM_NANO_BATCHES)]


class _Begun(NamedTuple):
    residual: Tensor
    gate: Tensor | None
    norm: Any
    ticket: Tensor


class _Kept(NamedTuple):
    """What a layer is computed again from, [nano-batch]: its input, and states of random numbers behind its attention,
    none where it draws none."""

    states: list[Tensor]
    random: list[Any]


class _Layer:
    """One layer of a micro-batch, which backward follows if gradients are enabled. It fills `kept`; `is_again` is as of
    `NanoBatchedLayer`, and `exchange` is its attention."""

    def __init__(
        self,
        layer: Any,
        number: int,
        nano_batches: NanoBatches,
        rotary: Tensor | None,
        kept: _Kept | None = None,
        *,
        is_again: bool = False,
    ) -> None:
        self._layer, self._nano_batches, self._rotary, self._kept = layer, nano_batches, rotary, kept
        attention = layer.self_attention
        repeats = attention.checkpoint_core_attention and layer.training
        keeps = torch.is_grad_enabled()
        self.exchange = NanoBatchedLayer(
            nano_batches, attention.core_attention, number, keeps=keeps, repeats=repeats, is_again=is_again
        )
        self._begun: list[_Begun] = []
        self._tickets: list[Tensor] = []

    def begin(self, state: Tensor, nano_batch: int) -> None:
        """Run a nano-batch up to its attention, and launch that."""
        layer, norm = self._layer, None
        if self._kept is not None:
            self._kept.states.append(state)
        if layer.recompute_input_layernorm:
            norm = tensor_parallel.CheckpointWithoutOutput()
            normed = norm.checkpoint(layer.input_layernorm, state)
        else:
            normed = layer.input_layernorm(state)
        params = self._nano_batches.params_of(nano_batch)
        query, key, value, gate = layer.self_attention.queries_keys_values(normed, self._rotary, params)
        ticket = Launch.apply(query, key, value, self.exchange, nano_batch)
        residual = state.float() if layer.config.fp32_residual_connection else state
        self._begun.append(_Begun(residual, gate, norm, ticket))

    def attend(self) -> None:
        """Compute this rank's part of the attention of both nano-batches; the second one needs keys of the first."""
        tickets = [one.ticket for one in self._begun]
        for nano_batch in range(NUM_NANO_BATCHES):
            self._tickets.append(Attend.apply(self.exchange, nano_batch, *tickets[: nano_batch + 1]))

    def end(self, nano_batch: int) -> Tensor:
        """Return the output of the layer, once a nano-batch's attention is back."""
        layer, begun = self._layer, self._begun[nano_batch]
        if self._kept is not None and layer.hidden_dropout > 0.0:
            self._kept.random.append(random._get_all_rng_states())
        offset_H = layer.self_attention.core_attention.softmax_offset
        out_THD = Wait.apply(self.exchange, nano_batch, self._tickets[nano_batch], offset_H)
        context = out_THD.reshape(len(out_THD), 1, -1)
        projected = layer.self_attention.projected(context, begun.gate)
        if begun.norm is not None:
            begun.norm.discard_output_and_register_recompute(projected[0])
        add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
        state: Tensor = layer._forward_mlp(add(projected, begun.residual, layer.hidden_dropout))
        return state


class _Repeated:
    """A layer that forward runs without a graph, and backward runs again."""

    def __init__(self, layer: Any, number: int, nano_batches: NanoBatches, rotary: Tensor | None) -> None:
        self._given, self._kept = (layer, number, nano_batches, rotary), _Kept([], [])
        self._running: _Layer | None = None

    def first_run(self) -> _Layer:
        return _Layer(*self._given, self._kept)

    def launch_again(self) -> None:
        """Run both nano-batches up to their attention again, and launch that."""
        with torch.enable_grad():
            self._running = _Layer(*self._given, is_again=True)
            for nano_batch, state in enumerate(self._kept.states):
                self._kept.states[nano_batch] = state.detach().requires_grad_()
                self._running.begin(self._kept.states[nano_batch], nano_batch)

    def attend_again(self) -> None:
        with torch.enable_grad():
            self._layer.attend()

    def backward(self, gradients: Sequence[Tensor], beside: Beside | None) -> list[Tensor]:
        """Run the rest of the layer again, then the layer backward; return the gradient of its input, [nano-batch].
        `gradients` are those of its output, [nano-batch]; `beside` is the layer before, which runs again meanwhile."""
        self._layer.exchange.beside = beside
        with torch.enable_grad():
            states = [self._end_again(nano_batch) for nano_batch in range(NUM_NANO_BATCHES)]
        self._running = None
        torch.autograd.backward(states, gradients)
        return [state.grad for state in self._kept.states]

    @property
    def _layer(self) -> _Layer:
        assert self._running is not None, "a layer runs again before it runs backward"
        return self._running

    def _end_again(self, nano_batch: int) -> Tensor:
        if not self._kept.random:
            return self._layer.end(nano_batch)
        with random._fork_rng():
            random._set_all_rng_states(*self._kept.random[nano_batch])
            return self._layer.end(nano_batch)


class _RunTwice(torch.autograd.Function):
    """All layers of a chunk with full recomputation, layer by layer; as megatron-core's CheckpointFunction."""

    @staticmethod
    def forward(ctx: Any, repeated: list[_Repeated], *states: Tensor) -> tuple[Tensor, ...]:
        ctx.repeated = repeated
        return tuple(_run((one.first_run() for one in repeated), states))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("layers are recomputed by .backward(), not by .grad()")
        found: Sequence[Tensor] = gradients
        layers: list[_Repeated] = ctx.repeated
        layers[-1].launch_again()
        layers[-1].attend_again()
        while layers:  # what a layer kept goes with it
            layer = layers.pop()
            found = layer.backward(found, layers[-1] if layers else None)
        return None, *found


def _apart(hidden_states: Tensor, nano_batches: NanoBatches, is_sharded: bool) -> list[Tensor]:
    """Return the hidden states of each nano-batch with its padding; a sequence-parallel rank has its share of each."""
    if is_sharded:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    states = []
    for rows, size in zip(nano_batches.rows, nano_batches.sizes, strict=True):
        state = hidden_states.index_select(0, rows)
        state = torch.nn.functional.pad(state, (0, 0, 0, 0, 0, size - len(rows)))
        states.append(scatter_to_sequence_parallel_region(state) if is_sharded else state)
    return states


def _together(states: list[Tensor], nano_batches: NanoBatches, is_sharded: bool) -> Tensor:
    """Return the hidden states in the order of the micro-batch: undoes `_apart`."""
    if is_sharded:
        states = [gather_from_sequence_parallel_region(one, tensor_parallel_output_grad=False) for one in states]
    real = torch.cat([one[: len(rows)] for one, rows in zip(states, nano_batches.rows, strict=True)])
    hidden_states = real.index_select(0, nano_batches.back)
    return scatter_to_sequence_parallel_region(hidden_states) if is_sharded else hidden_states
