"""Layers of a stage in two halves of a micro-batch's tokens: one half is computed while the other's attention travels.

A half is some rows of the hidden states; norms, projections and MLPs do not see which. Between them attention goes out
and comes back (`attention.halves`), and the end of a layer is one stretch with the beginning of the next one:

    before 0, launch 0, before 1, launch 1, attend 0, attend 1,
    wait 0, after 0 and the next layer's before 0, launch 0, wait 1, after 1 and the next layer's before 1, ...

With full recomputation forward runs the same way and keeps what goes into each layer (`_RunTwice`). Backward goes from
layer to layer, and beside the gradients of each the one before is computed again as far as its attention (`_Repeated`).
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

from dynamic_cp.pool.layer_steps import NUM_HALVES
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.pool.halves import Attend, Beside, HalvedLayer, Halves, Launch, Wait


def run_blocks_in_halves(model: Sequence[torch.nn.Module]) -> None:
    """Have the blocks of a stage run in halves what comes in halves: they have the same parts, and another way through.

    GPTModel names the class of its block itself, so the blocks that it made are given the other class.
    """
    for module in (module for chunk in model for module in chunk.modules()):
        if type(module) is TransformerBlock:
            module.__class__ = BlockInHalves


class BlockInHalves(TransformerBlock):
    """megatron-core's TransformerBlock; only micro-batches whose attention goes out in halves run otherwise."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """See TransformerBlock.forward."""
        halves: Halves | None = getattr(packed_seq_params, "halves", None)
        if halves is None:
            kwargs |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            found: Tensor = super().forward(hidden_states, *args, **kwargs)
            return found
        if not self.pre_process:
            hidden_states = self.input_tensor
        is_sharded = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_sharded else nullcontext():
            states = self._through_layers(_apart(hidden_states, halves, is_sharded), halves, rotary_pos_emb)
        hidden_states = _together(states, halves, is_sharded)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _through_layers(self, states: list[Tensor], halves: Halves, rotary: Tensor | None) -> list[Tensor]:
        """Return what comes out of the last layer, [half]."""
        numbered = list(enumerate(self.layers))
        if self.config.recompute_granularity == "full" and self.training:
            repeated = [_Repeated(layer, number, halves, rotary) for number, layer in numbered]
            return list(_RunTwice.apply(repeated, *states))
        return _run((_Layer(layer, number, halves, rotary) for number, layer in numbered), states)


def _run(layers: Iterable[_Layer], states: Sequence[Tensor]) -> list[Tensor]:
    """Return what comes out of the last one of neighbouring layers, [half].

    Args:
        states: what goes into the first one, [half].
    """
    found, behind = list(states), None
    for ahead in layers:
        for half in range(NUM_HALVES):
            if behind is not None:
                found[half] = behind.end(half)
            ahead.begin(found[half], half)
        ahead.attend()
        if behind is not None and ahead.exchange.repeats:
            ahead.exchange.beside = behind.exchange
        behind = ahead
    assert behind is not None, "a stage has layers"
    return [behind.end(half) for half in range(NUM_HALVES)]


class _Begun(NamedTuple):
    """What a half has when its attention leaves."""

    residual: Tensor
    gate: Tensor | None
    norm: Any
    ticket: Tensor


class _Kept(NamedTuple):
    """What a layer is computed again from.

    Attributes:
        states: [half] what went into it.
        random: [half] states of random numbers behind its attention; none where the layer draws none.
    """

    states: list[Tensor]
    random: list[Any]


class _Layer:
    """One layer of a micro-batch, which backward follows if gradients are enabled.

    Args:
        kept: is filled; is_again: as of `HalvedLayer`.

    Attributes:
        exchange: its attention.
    """

    def __init__(
        self,
        layer: Any,
        number: int,
        halves: Halves,
        rotary: Tensor | None,
        kept: _Kept | None = None,
        *,
        is_again: bool = False,
    ) -> None:
        self._layer, self._halves, self._rotary, self._kept = layer, halves, rotary, kept
        attention = layer.self_attention
        repeats = attention.checkpoint_core_attention and layer.training
        keeps = torch.is_grad_enabled()
        self.exchange = HalvedLayer(
            halves, attention.core_attention, number, keeps=keeps, repeats=repeats, is_again=is_again
        )
        self._begun: list[_Begun] = []
        self._tickets: list[Tensor] = []

    def begin(self, state: Tensor, half: int) -> None:
        """Run a half up to its attention, and send that out."""
        layer, norm = self._layer, None
        if self._kept is not None:
            self._kept.states.append(state)
        if layer.recompute_input_layernorm:
            norm = tensor_parallel.CheckpointWithoutOutput()
            normed = norm.checkpoint(layer.input_layernorm, state)
        else:
            normed = layer.input_layernorm(state)
        params = self._halves.params_of(half)
        query, key, value, gate = layer.self_attention.queries_keys_values(normed, self._rotary, params)
        ticket = Launch.apply(query, key, value, self.exchange, half)
        residual = state.float() if layer.config.fp32_residual_connection else state
        self._begun.append(_Begun(residual, gate, norm, ticket))

    def attend(self) -> None:
        """Attend to what is this rank's of both halves; the second one needs keys of the first."""
        tickets = [one.ticket for one in self._begun]
        for half in range(NUM_HALVES):
            self._tickets.append(Attend.apply(self.exchange, half, *tickets[: half + 1]))

    def end(self, half: int) -> Tensor:
        """Return what comes out of the layer, once a half's attention is back."""
        layer, begun = self._layer, self._begun[half]
        if self._kept is not None and layer.hidden_dropout > 0.0:
            self._kept.random.append(random._get_all_rng_states())
        out_THD = Wait.apply(self.exchange, half, self._tickets[half])
        context = out_THD.reshape(len(out_THD), 1, -1)
        projected = layer.self_attention.projected(context, begun.gate)
        if begun.norm is not None:
            begun.norm.discard_output_and_register_recompute(projected[0])
        add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
        state: Tensor = layer._forward_mlp(add(projected, begun.residual, layer.hidden_dropout))
        return state


class _Repeated:
    """A layer that forward runs without a graph, and backward again."""

    def __init__(self, layer: Any, number: int, halves: Halves, rotary: Tensor | None) -> None:
        self._given, self._kept = (layer, number, halves, rotary), _Kept([], [])
        self._running: _Layer | None = None

    def first_run(self) -> _Layer:
        """Return the layer for forward."""
        return _Layer(*self._given, self._kept)

    def launch_again(self) -> None:
        """Run both halves up to their attention, and send that out."""
        with torch.enable_grad():
            self._running = _Layer(*self._given, is_again=True)
            for half, state in enumerate(self._kept.states):
                self._kept.states[half] = state.detach().requires_grad_()
                self._running.begin(self._kept.states[half], half)

    def attend_again(self) -> None:
        """Attend to what is this rank's of both halves."""
        with torch.enable_grad():
            self._layer.attend()

    def backward(self, gradients: Sequence[Tensor], beside: Beside | None) -> list[Tensor]:
        """Run the rest of the layer again, then the layer backward; return [half] the gradient of what went in.

        Args:
            gradients: [half] of what came out.
            beside: the layer before, which runs again meanwhile.
        """
        self._layer.exchange.beside = beside
        with torch.enable_grad():
            states = [self._end_again(half) for half in range(NUM_HALVES)]
        self._running = None
        torch.autograd.backward(states, gradients)
        return [state.grad for state in self._kept.states]

    @property
    def _layer(self) -> _Layer:
        assert self._running is not None, "a layer runs again before it runs backward"
        return self._running

    def _end_again(self, half: int) -> Tensor:
        """Return what comes out of the layer, from the random numbers that forward had."""
        if not self._kept.random:
            return self._layer.end(half)
        with random._fork_rng():
            random._set_all_rng_states(*self._kept.random[half])
            return self._layer.end(half)


class _RunTwice(torch.autograd.Function):
    """All layers of a chunk with full recomputation: as megatron-core's CheckpointFunction, layer by layer."""

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


def _apart(hidden_states: Tensor, halves: Halves, is_sharded: bool) -> list[Tensor]:
    """Return the hidden states of each half, with its padding; of a sequence-parallel rank its share of each."""
    if is_sharded:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    states = []
    for rows, size in zip(halves.rows, halves.sizes, strict=True):
        state = hidden_states.index_select(0, rows)
        state = torch.nn.functional.pad(state, (0, 0, 0, 0, 0, size - len(rows)))
        states.append(scatter_to_sequence_parallel_region(state) if is_sharded else state)
    return states


def _together(states: list[Tensor], halves: Halves, is_sharded: bool) -> Tensor:
    """Return the hidden states in the order of the micro-batch: undoes `_apart`."""
    if is_sharded:
        states = [gather_from_sequence_parallel_region(one, tensor_parallel_output_grad=False) for one in states]
    real = torch.cat([one[: len(rows)] for one, rows in zip(states, halves.rows, strict=True)])
    hidden_states = real.index_select(0, halves.back)
    return scatter_to_sequence_parallel_region(hidden_states) if is_sharded else hidden_states
