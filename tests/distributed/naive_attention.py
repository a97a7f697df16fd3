"""The judge of the attention tests: softmax over the whole matrix of scores, in float64. Errors are measured against
the terms of a gradient's sum, which may cancel out and leave nothing but rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dynamic_cp.types import CAUSAL, Lambda, Mask, Sample

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5
NAMES = ("output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values")


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


def sees_of_pack(samples: Sequence[Sample], padded_seqlens: Sequence[int] = (), mask: Mask = CAUSAL) -> Tensor:
    """Return which keys each token of a pack sees; padding none. `padded_seqlens` are () without padding."""
    padded_seqlens = padded_seqlens or [sample.seqlen for sample in samples]
    seen = [sees_of(sample, mask) for sample in samples]
    num_padding = [padded - sample.seqlen for sample, padded in zip(samples, padded_seqlens, strict=True)]
    return torch.block_diag(*(pad(one, (0, more, 0, more)) for one, more in zip(seen, num_padding, strict=True)))


class Exact(NamedTuple):
    """A float64 tensor to compare with; `terms`: how large it is about if the terms of its sums do not cancel out."""

    name: str
    value: Tensor
    terms: float

    def of(self, rows: Tensor) -> Exact:
        return self._replace(value=self.value[rows])


def exact(inputs_THD: Sequence[Tensor], seen: Tensor) -> list[Exact]:
    """Return out, lse_HT and gradients of q, k and v; `seen` says how often each query sees each key."""
    seen, scale = seen.to(inputs_THD[0].device), inputs_THD[0].shape[-1] ** -0.5
    q, k, v = (x.detach().double().requires_grad_() for x in inputs_THD[:3])
    group = q.shape[1] // k.shape[1]
    some = seen.any(1)  # a softmax over nothing has no gradient
    scores = torch.einsum("thd,shd->hts", q[some], k.repeat_interleave(group, 1)) * scale + seen[some].double().log()
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -torch.inf)
    out[some] = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))
    lse[:, some] = scores.detach().logsumexp(-1)
    grad = inputs_THD[3].double()
    found = [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), grad)]

    # dq = scale sum_s p (g v - g out) k, and so on: of each product the square, of sums over channels, too.
    of_q, of_g, of_k, of_v, weights = (x.detach().square() for x in (q[some], grad[some], k, v, scores.softmax(-1)))
    of_k, of_v = (x.repeat_interleave(group, 1) for x in (of_k, of_v))
    of_weights = torch.einsum("thd,shd->hts", of_g, of_v)
    of_scores = scale**2 * weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True))
    of_lse = torch.einsum("thd,shd->hts", of_q, of_k).masked_fill(seen[some] == 0, 0.0) * scale**2
    of_keys = torch.einsum("hts,thd->shd", of_scores, of_q), torch.einsum("hts,thd->shd", weights, of_g)
    squares = [
        torch.einsum("hts,shd->thd", weights, of_v),
        of_lse,
        torch.einsum("hts,shd->thd", of_scores, of_k),
        *(x.unflatten(1, (-1, group)).sum(2) for x in of_keys),
    ]
    terms = [float(of.max().sqrt()) for of in squares]
    return [Exact(*of) for of in zip(NAMES, found, terms, strict=True)]


def exact_samples(inputs_THD: Sequence[Tensor], samples: Sequence[Sample], mask: Mask = CAUSAL) -> list[Exact]:
    """Return `exact` of samples that lie one after the other, without padding, but lse_TH."""
    out, lse, *grads = exact(inputs_THD, sees_of_pack(samples, mask=mask))
    return [out, lse._replace(value=lse.value.t()), *grads]


def assert_close(actual: Tensor, expected: Exact, tolerance: float = 2e-6) -> None:
    """Check the largest error, relative to what the terms amount to; what is infinite has to be so in both."""
    name, value, terms = expected
    assert actual.shape == value.shape, name
    assert actual.isneginf().equal(value.isneginf()), name
    error = (actual.double() - value).masked_fill(value.isneginf(), 0.0).abs().max() / terms
    assert error <= tolerance, f"{name}: error {error}"


def assert_all_close(actual: Sequence[Tensor], expected: Sequence[Exact], tolerance: float = 2e-6) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted, tolerance)


def random_qkv(num_rows: int, num_columns: int, kv_heads: int = KV_HEADS, heads: int = HEADS) -> list[Tensor]:
    """Return float64 q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_columns)
    shapes = [(num_rows, heads), (num_columns, kv_heads), (num_columns, kv_heads), (num_rows, heads)]
    return [torch.randn(*shape, DIM, generator=generator, dtype=torch.float64) for shape in shapes]
