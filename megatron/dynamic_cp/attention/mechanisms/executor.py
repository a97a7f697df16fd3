"""How a mechanism computes attention, for one layer of one micro-batch: the six steps of an executor.

    enter -> attend -> leave, and backward: enter_gradient -> attend_backward -> leave_gradients

Between entering and leaving, a lane holds queries and keys of its own choice: its shard, or its share of the heads.
`thd.attention_thd` runs the steps and keeps what backward needs; an executor holds no tensors.
Shapes: T local tokens, S keys at hand, H heads, D channels of a head, 2 keys and values.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.dynamic_cp.attention.mechanisms.transfers import Transfer
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class Executor(Protocol):
    """A mechanism at work; heads are counted per tensor-parallel rank.

    Attributes:
        grows_with_group: whether kernels meet more keys in a larger group; if not, only the inner size matters.
        heads: the shard's query heads that this lane computes.
        takes_narrow_values: whether `enter` may get values narrower than keys; `attend` pads them.
    """

    grows_with_group: ClassVar[bool]
    heads: slice
    takes_narrow_values: ClassVar[bool]

    def __init__(
        self, params: DynamicPackedSeqParams, query_heads: int, kv_heads: int, device: torch.device
    ) -> None: ...

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        """Return its transfers, each with its group; None: there are no other lanes."""

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return, from this lane's shards, the queries that it computes and the keys and values that it contributes."""

    def attend(self, sums: RowSums, kv: Tensor) -> None:
        """Add up the attention of this lane's queries to all keys that they see; `kv` is from `enter`."""

    def leave(self, out_THD: Tensor) -> Tensor:
        """Return the output of this lane's shard, [T, heads, dim], from that of the queries computed here."""

    def enter_gradient(self, grad_THD: Tensor) -> Tensor:
        """Return the gradient of the output computed here, from that of the shard's output."""

    def attend_backward(self, rows: RowGradients, kv: Tensor) -> Tensor:
        """Return the gradient of `kv`, and add up that of the queries in `rows`."""

    def leave_gradients(self, grad_q_THD: Tensor, grad_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the shards of q, k and v."""


class ShardExecutor:
    """An executor whose lanes compute the queries of their own shards: rows pass unchanged."""

    heads = slice(None)
    takes_narrow_values = False

    def __init__(self, params: DynamicPackedSeqParams, query_heads: int, kv_heads: int, device: torch.device) -> None:
        self._params = params

    def leave(self, out_THD: Tensor) -> Tensor:
        return out_THD

    def enter_gradient(self, grad_THD: Tensor) -> Tensor:
        return grad_THD


class KeyValueExecutor(ShardExecutor):
    """A `ShardExecutor` whose lanes send each other keys and values. Values narrower than keys are joined with them,
    side by side in each head, and padded for kernels; others are stacked along `stacked_dim`."""

    takes_narrow_values = True
    stacked_dim: ClassVar[int]

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shard's queries, and its keys and values stacked or joined."""
        self._key_width = k_THD.shape[-1]
        if v_THD.shape[-1] < k_THD.shape[-1]:
            return q_THD, torch.cat((k_THD, v_THD), dim=-1)
        return q_THD, torch.stack((k_THD, v_THD), dim=self.stacked_dim)

    def leave_gradients(self, grad_q_THD: Tensor, grad_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if grad_kv.dim() == 4:
            return grad_q_THD, grad_kv.select(self.stacked_dim, 0), grad_kv.select(self.stacked_dim, 1)
        return grad_q_THD, grad_kv[..., : self._key_width], grad_kv[..., self._key_width :]

    def padded_apart(self, kv_SHD: Tensor) -> Tensor:
        """Return kv_2SHD from joined keys and values, with values padded to the width of keys."""
        values = kv_SHD[..., self._key_width :]
        padded = torch.nn.functional.pad(values, (0, self._key_width - values.shape[-1]))
        return torch.stack((kv_SHD[..., : self._key_width], padded))

    def joined_gradient(self, grad_2SHD: Tensor, kv_SHD: Tensor) -> Tensor:
        """Return the gradient of joined keys and values from that of their `padded_apart`."""
        value_width = kv_SHD.shape[-1] - grad_2SHD.shape[-1]
        return torch.cat((grad_2SHD[0], grad_2SHD[1, ..., :value_width]), dim=-1)
