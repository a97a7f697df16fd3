"""Layers of a stage in two halves of a micro-batch's tokens: one half is computed while the other's attention travels.

A half is some rows of the hidden states; norms, projections and MLPs do not see which. Between them attention goes out
and comes back (`attention.halves`), and the end of a layer is one stretch with the beginning of the next one:

    before 0, launch 0, before 1, launch 1, attend 0, attend 1,
    wait 0, after 0 and the next layer's before 0, launch 0, wait 1, after 1 and the next layer's before 1, ...

Layers that are recomputed as a whole end where they begin.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron.dynamic_cp.attention.halves import Attend, HalvedLayer, Halves, Launch, Wait
from megatron.dynamic_cp.attention.mechanisms.halves import NUM_HALVES
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


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
        if self.config.recompute_granularity == "full" and self.training:
            for number, layer in enumerate(self.layers):
                alone = partial(_run, {number: layer}, halves, rotary)
                states = list(tensor_parallel.checkpoint(alone, False, *states))
            return states
        return list(_run(dict(enumerate(self.layers)), halves, rotary, *states))


def _run(layers: dict[int, Any], halves: Halves, rotary: Tensor | None, *states: Tensor) -> tuple[Tensor, ...]:
    """Return what comes out of the last one of neighbouring layers, [half].

    Args:
        layers: number on the stage -> layer.
        rotary: the whole table of angles.
        states: what goes into the first one, [half].
    """
    found, behind = list(states), None
    for number, layer in layers.items():
        ahead = _Layer(layer, number, halves)
        for half in range(NUM_HALVES):
            if behind is not None:
                found[half] = behind.end(half)
            ahead.begin(found[half], half, rotary)
        ahead.attend()
        behind = ahead
    assert behind is not None, "a stage has layers"
    return tuple(behind.end(half) for half in range(NUM_HALVES))


class _Begun(NamedTuple):
    """What a half has when its attention leaves."""

    residual: Tensor
    gate: Tensor | None
    norm: Any
    ticket: Tensor


class _Layer:
    """One layer of a micro-batch."""

    def __init__(self, layer: Any, number: int, halves: Halves) -> None:
        self._layer, self._halves = layer, halves
        attention = layer.self_attention
        repeats = attention.checkpoint_core_attention and layer.training
        keeps = torch.is_grad_enabled()
        self._exchange = HalvedLayer(halves, attention.core_attention, number, keeps=keeps, repeats=repeats)
        self._begun: list[_Begun] = []
        self._tickets: list[Tensor] = []

    def begin(self, state: Tensor, half: int, rotary: Tensor | None) -> None:
        """Run a half up to its attention, and send that out."""
        layer, norm = self._layer, None
        if layer.recompute_input_layernorm:
            norm = tensor_parallel.CheckpointWithoutOutput()
            normed = norm.checkpoint(layer.input_layernorm, state)
        else:
            normed = layer.input_layernorm(state)
        query, key, value, gate = layer.self_attention.queries_keys_values(normed, rotary, self._halves.params_of(half))
        ticket = Launch.apply(query, key, value, self._exchange, half)
        residual = state.float() if layer.config.fp32_residual_connection else state
        self._begun.append(_Begun(residual, gate, norm, ticket))

    def attend(self) -> None:
        """Attend to what is this rank's of both halves; the second one needs keys of the first."""
        tickets = [one.ticket for one in self._begun]
        for half in range(NUM_HALVES):
            self._tickets.append(Attend.apply(self._exchange, half, *tickets[: half + 1]))

    def end(self, half: int) -> Tensor:
        """Return what comes out of the layer, once a half's attention is back."""
        layer, begun = self._layer, self._begun[half]
        out_THD = Wait.apply(self._exchange, half, self._tickets[half])
        context = out_THD.reshape(len(out_THD), 1, -1)
        projected = layer.self_attention.projected(context, begun.gate)
        if begun.norm is not None:
            begun.norm.discard_output_and_register_recompute(projected[0])
        add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
        state: Tensor = layer._forward_mlp(add(projected, begun.residual, layer.hidden_dropout))
        return state


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
