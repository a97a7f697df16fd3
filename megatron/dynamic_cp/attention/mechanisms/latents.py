"""Attention over a pack with a ring of latents: what multi-latent attention projects keys and values up from travels.

The ring is that of `ring`, step by step; before a lane attends to another one's tokens it projects their latents up by
itself, with its own copy of the weights. So each lane has a share of the gradient of these weights from the tokens of
all lanes, and megatron-core's sum over lanes counts every one once. Backward projects up again: neither keys nor values
of other lanes are kept.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, for the projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.attention.kernels.log_sum_exp import SUM_DTYPE
from megatron.dynamic_cp.attention.mechanisms.ring import Ring


class LatentWidths(NamedTuple):
    """Channels of a head: of queries and keys without and with rotation, and of values, at most as both together."""

    content: int
    rotated: int
    value: int

    @property
    def key(self) -> int:
        """Of a whole key."""
        return self.content + self.rotated

    def sent(self, weight: Tensor) -> tuple[int, int]:
        """Channels of a token that travel: of the latent, which `weight` projects up, and of the rotated key."""
        return weight.shape[1], self.rotated


class UpProjection:
    """Keys and values of the heads of a tensor-parallel rank from latents [T, latent and rotated key], and back.

    Attributes:
        grad_weight: float32 [heads * (content + value), latent], the sum over all calls of `gradient`; None: none yet.
    """

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
        """Return the latents and the rotated keys."""
        latent_TC, rotated_TC = latents_TC.split(self._widths.sent(self._weight), dim=-1)
        return latent_TC, rotated_TC


class LatentRing(Ring):
    """The ring of latents as an `executor.Executor`, for who has latents (`thd.attention_from_latents`).

    Attributes:
        up: how keys and values follow from them.
    """

    up: UpProjection

    def keys_and_values(self, sent: Tensor) -> Tensor:
        """Return those that a lane's latents are projected up to."""
        return self.up.keys_and_values(sent)

    def gradient_of_sent(self, grad_2THD: Tensor, sent: Tensor) -> Tensor:
        """Return the gradient of a lane's latents, and add up that of the projection."""
        return self.up.gradient(grad_2THD, sent)

    def enter(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse keys and values, which plain attention brings."""
        raise UnsupportedFeatureError(
            f"the plan asks for {self._params.cp_comm_type} at {self._params.label}, and this attention brings keys "
            "and values instead of latents: only --multi-latent-attention has them; plan with --cp-comm-type p2p",
            cp_comm_type=self._params.cp_comm_type,
        )
