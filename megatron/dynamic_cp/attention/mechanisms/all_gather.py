"""Attention over a pack with one all-gather of keys and values instead of a ring.

Fewer, larger messages, none of them hidden; a rank holds the KV of whole sequences while it computes a layer. Gradients
of KV come back with one reduce-scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.dynamic_cp.attention.mechanisms.executor import (
    ShardExecutor,
    joined,
    joined_gradient,
    padded_apart,
)
from megatron.dynamic_cp.attention.mechanisms.row_order import from_sequence_order, row_order
from megatron.dynamic_cp.attention.mechanisms.transfers import Transfer, all_gather_tokens, reduce_scatter_tokens
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import gathered_packs
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


class AllGather(ShardExecutor):
    """The gathering as an `executor.Executor`: q, k and v stay the lane's zigzag shards.

    Backward needs these, not what was gathered: it gathers again, so that memory stays that of a shard.
    """

    grows_with_group = True
    takes_narrow_values = True

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        """Return the gathering over the whole group."""
        return (("gather", params.cp_group),)

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shard's queries, and keys and values as kv_T2HD, joined where values are narrower."""
        self._key_width = k_THD.shape[-1]
        if v_THD.shape[-1] < k_THD.shape[-1]:
            return q_THD, joined(k_THD, v_THD)
        return q_THD, torch.stack((k_THD, v_THD), dim=1)

    def attend(self, sums: RowSums, kv: Tensor) -> None:
        """Add up over the keys of all lanes."""
        gathered_2SHD = self._in_sequence_order(kv)
        for pack in gathered_packs(self._params, kv.device):
            sums.attend(pack, gathered_2SHD)

    def attend_backward(self, rows: RowGradients, kv: Tensor) -> Tensor:
        """Return the gradient of what this lane brought."""
        gathered_2SHD = self._in_sequence_order(kv)
        grad_2SHD = None
        for pack in gathered_packs(self._params, kv.device):
            grad_2SHD = rows.attend(pack, gathered_2SHD, grad_2SHD)
        assert grad_2SHD is not None
        grad = grad_2SHD.transpose(0, 1) if kv.dim() == 4 else joined_gradient(grad_2SHD, kv)
        return reduce_scatter_tokens(from_sequence_order(grad, row_order(self._params, kv.device)), self._params)

    def leave_gradients(self, grad_q_THD: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three apart."""
        if grad.dim() == 4:
            return grad_q_THD, grad[:, 0], grad[:, 1]
        return grad_q_THD, grad[..., : self._key_width], grad[..., self._key_width :]

    def _in_sequence_order(self, kv: Tensor) -> Tensor:
        """Return the keys and values of all lanes as kv_2SHD, sequence by sequence."""
        gathered = all_gather_tokens(kv, self._params).index_select(0, row_order(self._params, kv.device))
        return gathered.transpose(0, 1) if kv.dim() == 4 else padded_apart(gathered, self._key_width)
