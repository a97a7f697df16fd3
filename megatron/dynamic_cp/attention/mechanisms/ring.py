"""Ring attention over a pack (p2p): keys and values travel round the ring; attention hides the transfers.

The ring is the whole CP group (p2p), the outer lanes (a2a+p2p, after heads were exchanged) or this lane alone (a2a).
Causal: rank r starts with its own KV, a causal square over its two chunks. With the KV of rank j < r, all queries see
the first of j's two chunks; with j > r, the second half of the queries sees both. So every later step is half a square
on every rank. Full: all queries see the KV of every rank but padding. Backward runs the ring again: the gradient of a
rank's KV starts at its successor, collects one share per stop and arrives on the last shift.

In a `LatentRing` the latents travel, and each lane projects them up with its own copy of the weights, again in
backward: keys and values of other lanes are not kept. A lane's gradient of the weights has shares from all lanes'
tokens, and megatron-core's sum over lanes counts each share once.

Shapes: T local tokens, H heads, D channels of a head, C channels of a token, P projected ones, 2 keys and values.
Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag split as in Megatron-Core and TransformerEngine;
DeepSeek-V2 (arXiv 2405.04434), section 2.1, for the projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.attention.kernels.merging import SUM_DTYPE
from megatron.dynamic_cp.attention.mechanisms.executor import KeyValueExecutor
from megatron.dynamic_cp.attention.mechanisms.transfers import RingShift, Transfer
from megatron.dynamic_cp.attention.merge import RowGradients, RowSums
from megatron.dynamic_cp.attention.packs import ring_packs
from megatron.dynamic_cp.measuring import span
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class Ring(KeyValueExecutor):
    """The ring as an `executor.Executor`; q, k and v stay the lane's zigzag shards."""

    stacked_dim = 0
    grows_with_group = False  # the same few shapes, once more for each lane

    @staticmethod
    def transfers(params: DynamicPackedSeqParams) -> tuple[tuple[Transfer, ProcessGroup | None], ...]:
        return (("shift", params.ring_group),)

    def attend(self, sums: RowSums, kv_2THD: Tensor) -> None:
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
        """Return the gradient of kv_2THD; lanes' shares add up in the model's dtype, as in TransformerEngine's ring."""
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
                if grad_kv is None:  # that lane holds only padding, which nobody sees
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
        """Return kv_2THD from what a lane sends: keys and values, stacked or joined."""
        return sent if sent.dim() == 4 else self.padded_apart(sent)

    def gradient_of_sent(self, grad_2THD: Tensor, sent: Tensor) -> Tensor:
        """Return the gradient of `sent` from that of its `keys_and_values`."""
        return grad_2THD if sent.dim() == 4 else self.joined_gradient(grad_2THD, sent)


def _start_shift(tensor: Tensor, params: DynamicPackedSeqParams, into: Tensor | None) -> RingShift:
    assert params.ring_group is not None
    return RingShift(tensor, params.ring_group, params, into)


class LatentWidths(NamedTuple):
    """Channels of a head: of a key without and with rotation, and of values, at most as wide as a whole key."""

    content: int
    rotated: int
    value: int

    @property
    def key(self) -> int:
        """Channels of a whole key."""
        return self.content + self.rotated

    def sent(self, weight: Tensor) -> tuple[int, int]:
        """Return the channels of a token that travel: of its latent, and of its rotated key."""
        return weight.shape[1], self.rotated


class UpProjection:
    """Projects latents [T, latent and rotated key] up to keys and values of a tensor-parallel rank's heads, and back.
    `grad_weight`, float32 [heads * (content + value), latent], sums over all calls of `gradient`; None before the
    first."""

    def __init__(self, weight: Tensor, widths: LatentWidths) -> None:
        self._weight, self._widths = weight, widths
        self.grad_weight: Tensor | None = None

    def keys_and_values(self, latents_TC: Tensor) -> Tensor:
        """Return kv_2THD; values are padded to the width of keys, as kernels need them."""
        widths = self._widths
        latent_TC, rotated_TC = self._parts(latents_TC)
        projected_THD = (latent_TC @ self._weight.t()).unflatten(-1, (-1, widths.content + widths.value))
        kv_2THD = latents_TC.new_zeros((2, *projected_THD.shape[:2], widths.key))
        kv_2THD[0, ..., : widths.content] = projected_THD[..., : widths.content]
        kv_2THD[0, ..., widths.content :] = rotated_TC[:, None]
        kv_2THD[1, ..., : widths.value] = projected_THD[..., widths.content :]
        return kv_2THD

    def gradient(self, grad_2THD: Tensor, latents_TC: Tensor) -> Tensor:
        """Return the gradient of `latents_TC` from that of its `keys_and_values`, and add up that of the weights."""
        widths = self._widths
        latent_TC, _ = self._parts(latents_TC)
        grad_k_THD, grad_v_THD = grad_2THD
        parts = (grad_k_THD[..., : widths.content], grad_v_THD[..., : widths.value])
        projected_TP = torch.cat(parts, dim=-1).flatten(1).to(latents_TC.dtype)
        share = (projected_TP.t() @ latent_TC).to(SUM_DTYPE)
        self.grad_weight = share if self.grad_weight is None else self.grad_weight.add_(share)
        # All heads have the same rotated key.
        rotated_TC = grad_k_THD[..., widths.content :].sum(dim=1, dtype=SUM_DTYPE).to(latents_TC.dtype)
        return torch.cat((projected_TP @ self._weight, rotated_TC), dim=-1)

    def _parts(self, latents_TC: Tensor) -> tuple[Tensor, Tensor]:
        latent_TC, rotated_TC = latents_TC.split(self._widths.sent(self._weight), dim=-1)
        return latent_TC, rotated_TC


class LatentRing(Ring):
    """The ring of latents as an `executor.Executor`, for `thd.attention_from_latents`; `up` projects them."""

    up: UpProjection

    def keys_and_values(self, sent: Tensor) -> Tensor:
        return self.up.keys_and_values(sent)

    def gradient_of_sent(self, grad_2THD: Tensor, sent: Tensor) -> Tensor:
        return self.up.gradient(grad_2THD, sent)

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse keys and values: only `attention_from_latents` can run this ring."""
        raise UnsupportedFeatureError(
            f"the plan asks for {self._params.cp_comm_type} at {self._params.label}, and this attention brings keys "
            "and values instead of latents: only --multi-latent-attention has them; plan with --cp-comm-type p2p"
        )
