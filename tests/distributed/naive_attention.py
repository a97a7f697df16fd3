"""The judge of the attention tests: softmax over the whole matrix of scores, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynamic_cp.types import CAUSAL, Lambda, Mask, Sample

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5


def naive(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (out_THD, lse_HT) with the whole matrix of scores, in the inputs' dtype."""
    all_pairs = torch.ones(len(q_THD), len(k_THD), dtype=torch.bool)
    return naive_of_pairs(q_THD, k_THD, v_THD, all_pairs.tril() if causal else all_pairs)


def naive_of_pairs(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Return `naive` where `sees` says which keys each query sees, pair by pair."""
    group = q_THD.shape[1] // k_THD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_THD, v_THD))
    scores = (torch.einsum("thd,shd->hts", q_THD, k_THD) * SCALE).masked_fill(~sees, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_THD), scores.logsumexp(-1)


def sees_of(sample: Sample, mask: Mask = CAUSAL) -> Tensor:
    """Return which keys each token of a sample sees, pair by pair, in layers with `mask`."""
    keys = torch.arange(sample.seqlen)
    ranges = (sample.mask or mask).key_ranges(sample.seqlen)
    begin, end = (torch.from_numpy(ranges[:, first::2].astype(np.int64))[..., None] for first in (0, 1))
    sees = ((keys >= begin) & (keys < end)).any(dim=1)
    if sample.mask is None or not isinstance(mask, Lambda):
        return sees
    positions = sample.mask.positions(sample.seqlen)
    at = keys if positions is None else torch.from_numpy(positions)
    return sees & ((at[:, None] - at < mask.window) | (at < mask.sink))


def naive_samples(inputs_THD: Sequence[Tensor], samples: Sequence[Sample], mask: Mask = CAUSAL) -> list[Tensor]:
    """Return (out_THD, lse_TH, the gradients of q, k and v) of samples that lie one after the other, without padding.

    Args:
        inputs_THD: q, k, v and the gradient of the output.
        mask: of samples that bring none.
    """
    q, k, v = (x.clone().requires_grad_() for x in inputs_THD[:3])
    seqlens = [sample.seqlen for sample in samples]
    of_samples = zip(*(x.split(seqlens) for x in (q, k, v)), samples, strict=True)
    outs, lse = zip(*(naive_of_pairs(*qkv, sees_of(sample, mask)) for *qkv, sample in of_samples), strict=True)
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, (q, k, v), inputs_THD[3])
    return [out.detach(), torch.cat([x.t() for x in lse]).detach(), *grads]


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
