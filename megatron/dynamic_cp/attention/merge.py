"""Attention of many rectangles: out and log-sum-exp added up in float32, gradients shared out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.tiles import Tile, tile_backward, tile_forward


class RowSums:
    """Running softmax-weighted sum over rectangles, for all local tokens of a pack.

    Attributes:
        out_THD: float32 [T, heads, dim]; final after the last `add`.
        lse_TH: float32 [T, heads].
    """

    def __init__(self, q_THD: Tensor) -> None:
        self.out_THD = torch.zeros(q_THD.shape, dtype=torch.float32, device=q_THD.device)
        self.lse_TH = torch.full(q_THD.shape[:2], float("-inf"), dtype=torch.float32, device=q_THD.device)

    def add(self, rows: slice, out_THD: Tensor, lse_TH: Tensor) -> None:
        """Merge a rectangle's result for `rows`: every row of it saw at least one key."""
        old_lse = self.lse_TH[rows]
        new_lse = torch.logaddexp(old_lse, lse_TH)
        old_share, new_share = torch.exp(old_lse - new_lse), torch.exp(lse_TH - new_lse)
        self.out_THD[rows] = self.out_THD[rows] * old_share[..., None] + out_THD.float() * new_share[..., None]
        self.lse_TH[rows] = new_lse


def attend(tiles: Iterable[Tile], sums: RowSums, q_THD: Tensor, kv_2SHD: Tensor, scale: float) -> None:
    """Add the rectangles `tiles` of q_THD against the keys kv_2SHD[0] and values kv_2SHD[1] to `sums`."""
    for tile in tiles:
        key, value = kv_2SHD[:, tile.columns]
        sums.add(tile.rows, *tile_forward(q_THD[tile.rows], key, value, causal=tile.causal, scale=scale))


class RowGradients:
    """What the backward pass of any rectangle needs of its rows, and their gradient as it grows.

    Attributes:
        grad_q_THD: float32 [T, heads, dim].
    """

    def __init__(self, grad_THD: Tensor, q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor, scale: float) -> None:
        self._saved = (grad_THD, q_THD, out_THD, lse_TH)
        self._scale = scale
        self.grad_q_THD = torch.zeros_like(q_THD, dtype=torch.float32)

    def attend(self, tiles: Iterable[Tile], kv_2SHD: Tensor) -> Tensor:
        """Return the gradient of kv_2SHD from the rectangles `tiles`, in its dtype, and add theirs to `grad_q_THD`.

        The dtype is enough: a key or value gets one or two shares here, the ring adds the rest.
        """
        grad_kv_2SHD = torch.zeros_like(kv_2SHD)
        for tile in tiles:
            grad, q, out, lse = (x[tile.rows] for x in self._saved)
            key, value = kv_2SHD[:, tile.columns]
            shares = tile_backward(grad, q, key, value, out, lse, causal=tile.causal, scale=self._scale)
            self.grad_q_THD[tile.rows] += shares[0]
            grad_kv_2SHD[0, tile.columns] += shares[1]
            grad_kv_2SHD[1, tile.columns] += shares[2]
        return grad_kv_2SHD
