"""The collective of linear attention: a message from each lane of the CP group to each other one, and its way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.mechanisms.transfers import Expected, all_to_all_messages
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams

Messages = Sequence[Sequence[Tensor]]
"""[lane] tensors for it, or of it; equally many for all."""


def exchanged(messages: Messages, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams) -> Messages:
    """Return what each lane has for this one, given what this one has for each; gradients go the other way."""
    flat = [tensor for message in messages for tensor in message]
    return _by_lane(_Exchange.apply(expected, params, *flat), len(messages))


class _Exchange(torch.autograd.Function):
    """One collective forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        messages = _by_lane(flat, len(expected))
        ctx.sent, ctx.params = [[Expected(tensor.shape, tensor.dtype) for tensor in one] for one in messages], params
        received = all_to_all_messages(messages, expected, params)
        return tuple(tensor for message in received for tensor in message)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        received = all_to_all_messages(_by_lane(grads, len(ctx.sent)), ctx.sent, ctx.params)
        return None, None, *(tensor for message in received for tensor in message)


def _by_lane(flat: Sequence[Tensor], num_lanes: int) -> list[list[Tensor]]:
    each = len(flat) // num_lanes
    return [list(flat[lane * each : (lane + 1) * each]) for lane in range(num_lanes)]
