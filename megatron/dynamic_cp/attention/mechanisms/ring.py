"""Ring attention over a pack (p2p): keys and values travel round the ring; attention hides the transfers.

The ring is the whole CP group (p2p), the outer lanes (a2a+p2p, where `heads` went before) or this lane alone (a2a).

Causal: rank r starts with its own KV (a causal square over its two chunks). The KV of rank j then meets the queries of
r: j < r: all queries see the first of j's two chunks; j > r: the second half of the queries sees both. So each step is
half a square on every rank, and there are as many steps as lanes. Full: all queries see the KV of every rank, without
what is padding; each step is a square. Backward runs the ring again; the gradient of a rank's KV starts at its
successor, collects one share per stop and reaches its owner on the last shift.

Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag split as in Megatron-Core and TransformerEngine.
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
from megatron.dynamic_cp.attention.mechanisms.transfers import RingShift, Transfer
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import ring_packs
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.measuring.nvtx import span


class Ring(ShardExecutor):
    """The ring as an `executor.Executor`: q, k and v stay the lane's zigzag shards."""

    takes_narrow_values = True
    grows_with_group = False  # the same few shapes, once more for each lane

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        """Return the shift round the ring."""
        return (("shift", params.ring_group),)

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shard's queries, and keys and values as kv_2THD, joined where values are narrower."""
        self._key_width = k_THD.shape[-1]
        if v_THD.shape[-1] < k_THD.shape[-1]:
            return q_THD, joined(k_THD, v_THD)
        return q_THD, torch.stack((k_THD, v_THD))

    def attend(self, sums: RowSums, kv_2THD: Tensor) -> None:
        """Add up over all keys of the ring."""
        params = self._params
        size, rank = params.ring_size, params.ring_rank
        spare: Tensor | None = None
        for step in range(size):
            with span("ring step %d of %d", step + 1, size):
                shift = _start_shift(kv_2THD, params, spare) if step < size - 1 else None
                seen_2THD = self.keys_and_values(kv_2THD)
                for pack in ring_packs(params, (rank - step) % size, kv_2THD.device):
                    sums.attend(pack, seen_2THD)
                if shift is not None:
                    spare = kv_2THD if step else None  # not the lane's own: backward needs it
                    kv_2THD = shift.wait()

    def attend_backward(self, rows: RowGradients, kv_2THD: Tensor) -> Tensor:
        """Return the gradient of this lane's kv_2THD.

        The lanes' shares of it are added up in the model's dtype, as in TransformerEngine's ring.
        """
        params = self._params
        size, rank = params.ring_size, params.ring_rank
        own_grad: Tensor | None = None
        collected: RingShift | None = None
        spare: Tensor | None = None
        spare_grad: Tensor | None = None
        for step in range(size):
            with span("ring step %d of %d, backward", step + 1, size):
                shift = _start_shift(kv_2THD, params, spare) if step < size - 1 else None
                seen_2THD, grad_kv = self.keys_and_values(kv_2THD), None
                for pack in ring_packs(params, (rank - step) % size, kv_2THD.device):
                    grad_kv = rows.attend(pack, seen_2THD, grad_kv)
                if grad_kv is None:  # that lane holds padding alone, which nobody sees
                    grad_kv = torch.zeros_like(seen_2THD)
                grad_kv = self.gradient_of_sent(grad_kv, kv_2THD)
                if own_grad is None:
                    own_grad = grad_kv
                else:
                    if collected is not None:
                        spare_grad = collected.wait()
                        grad_kv += spare_grad
                    collected = _start_shift(grad_kv, params, spare_grad)
                if shift is not None:
                    spare = kv_2THD if step else None
                    kv_2THD = shift.wait()
        assert own_grad is not None
        if collected is not None:
            own_grad += collected.wait()
        return own_grad

    def keys_and_values(self, sent: Tensor) -> Tensor:
        """Return kv_2THD of a lane from what it sends round, here themselves or joined."""
        return sent if sent.dim() == 4 else padded_apart(sent, self._key_width)

    def gradient_of_sent(self, grad_2THD: Tensor, sent: Tensor) -> Tensor:
        """Return the gradient of `sent` from that of its `keys_and_values`."""
        return grad_2THD if sent.dim() == 4 else joined_gradient(grad_2THD, sent)

    def leave_gradients(self, grad_q_THD: Tensor, grad_2THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three apart."""
        if grad_2THD.dim() == 4:
            return grad_q_THD, grad_2THD[0], grad_2THD[1]
        return grad_q_THD, grad_2THD[..., : self._key_width], grad_2THD[..., self._key_width :]


def _start_shift(tensor: Tensor, params: DynamicPackedSeqParams, into: Tensor | None) -> RingShift:
    assert params.ring_group is not None
    return RingShift(tensor, params.ring_group, params, into)
