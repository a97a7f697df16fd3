"""Add up attention rectangles of the same rows: out and log-sum-exp in float32."""

from __future__ import annotations

import torch
from torch import Tensor


class RowAccumulator:
    """Running softmax-weighted sum of rectangles, for all local tokens of a pack.

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
        self.out_THD[rows] = (
            self.out_THD[rows] * torch.exp(old_lse - new_lse)[..., None]
            + out_THD.float() * torch.exp(lse_TH - new_lse)[..., None]
        )
        self.lse_TH[rows] = new_lse
