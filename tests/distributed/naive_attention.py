"""The judge of the attention tests: softmax over the whole matrix of scores, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5


def naive(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (out_THD, lse_HT) with the whole matrix of scores, in the inputs' dtype."""
    group = q_THD.shape[1] // k_THD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_THD, v_THD))
    scores = torch.einsum("thd,shd->hts", q_THD, k_THD) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_THD), scores.logsumexp(-1)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    """Largest error relative to the largest value, as the parity suite measures it."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1)
    assert error <= tolerance, f"error {error}"


def random_qkv(num_rows: int, num_columns: int, kv_heads: int = KV_HEADS, heads: int = HEADS) -> list[Tensor]:
    """Return float64 q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_columns)
    shapes = [(num_rows, heads), (num_columns, kv_heads), (num_columns, kv_heads), (num_rows, heads)]
    return [torch.randn(*shape, DIM, generator=generator, dtype=torch.float64) for shape in shapes]
