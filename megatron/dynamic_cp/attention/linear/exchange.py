"""What the lanes of a bucket exchange for linear attention: a message from each to each other one, and its way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.mechanisms.transfers import Expected, LaneMessages, all_to_all_messages
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams

Messages = Sequence[Sequence[Tensor]]
"""[lane] tensors for it, or of it; equally many for all."""


class Place(NamedTuple):
    """Where a lane is among those of its bucket, which may be some of its process group.

    Attributes:
        num_lanes: of the bucket; lane: this one.
    """

    num_lanes: int
    lane: int

    @classmethod
    def of(cls, params: DynamicPackedSeqParams) -> Place:
        """Return that of this lane in a micro-batch."""
        group, placed = params.cp_group, params.placed
        if placed is None:
            return cls(group.size(), group.rank())
        return cls(placed.state_runs.num_lanes, group.rank() - placed.first_in_group)


def exchanged(messages: Messages, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams) -> Messages:
    """Return what each lane has for this one, given what this one has for each; gradients go the other way."""
    flat = [tensor for message in messages for tensor in message]
    return _by_lane(_Exchange.apply(expected, params, *flat), len(messages))


class _Exchange(torch.autograd.Function):
    """Forward once, backward once."""

    @staticmethod
    def forward(
        ctx: Any, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        messages = _by_lane(flat, len(expected))
        ctx.sent, ctx.params = [[Expected(tensor.shape, tensor.dtype) for tensor in one] for one in messages], params
        return tuple(tensor for message in _between_lanes(messages, expected, params) for tensor in message)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        received = _between_lanes(_by_lane(grads, len(ctx.sent)), ctx.sent, ctx.params)
        return None, None, *(tensor for message in received for tensor in message)


def _between_lanes(
    messages: Messages, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams
) -> Messages:
    """Return what each lane has for this one; others of the process group are no part of it."""
    placed = params.placed
    if placed is None:
        return all_to_all_messages(messages, expected, params)
    num_lanes, own = Place.of(params)
    others = [lane for lane in range(num_lanes) if lane != own]
    sends = [(placed.first_in_group + lane, messages[lane]) for lane in others]
    receives = [(placed.first_in_group + lane, expected[lane]) for lane in others]
    came = dict(zip(others, LaneMessages(sends, receives, params).wait(), strict=True))
    return [came[lane] if lane in came else [*map(torch.clone, messages[lane])] for lane in range(num_lanes)]


def _by_lane(flat: Sequence[Tensor], num_lanes: int) -> list[list[Tensor]]:
    each = len(flat) // num_lanes
    return [list(flat[lane * each : (lane + 1) * each]) for lane in range(num_lanes)]
