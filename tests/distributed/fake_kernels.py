"""Stand-ins for the CUDA kernels that torch ships, registered for CPU tensors under their own schemas.

The dispatcher checks the schema, these check what flash_api.cpp and cuDNN's MHA.cpp check and what they silently rely
on, and torch's CPU kernel computes each sequence. Memory that the real kernels leave unwritten is not-a-number here.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels import cpu as kernels_cpu

calls: Counter[str] = Counter()
_library: torch.library.Library | None = None


def install() -> None:
    """Register the stand-ins in this process."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for name, function in (
            ("_flash_attention_forward", flash_forward),
            ("_flash_attention_backward", flash_backward),
            ("_cudnn_attention_forward", cudnn_forward),
            ("_cudnn_attention_backward", cudnn_backward),
        ):
            _library.impl(name, function, "CPU")
    calls.clear()


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    calls["flash forward"] += 1
    assert not any(others.values()), f"not used here: {others}"
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert max_q > 1 or query.shape[1] == key.shape[1], "another path, whose log-sum-exp lies in another order"
    out, lse = _attend(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)
    unwritten = torch.full((2,), 7, dtype=torch.uint64)
    return out, lse, unwritten, torch.empty((), dtype=torch.uint64), torch.empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    calls["flash backward"] += 1
    assert not any(others.values()), f"not used here: {others}"
    assert dropout_p == 0.0
    assert rng_state.dtype == torch.uint64
    assert rng_state.shape == (2,)
    assert logsumexp.is_contiguous(), "its strides are not read"
    return _gradients(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    calls["cudnn forward"] += 1
    calls[f"cudnn plan {max_q} {max_k} {is_causal}"] += 1
    assert attn_bias is None
    assert compute_log_sumexp
    assert all(x.is_contiguous() for x in (query, key, value))
    out, lse = _attend(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, seed.clone(), torch.empty(0)


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    calls["cudnn backward"] += 1
    assert attn_bias is None
    assert dropout_p == 0.0
    assert all(x.is_contiguous() for x in (grad_out, query, key, value, out, logsumexp))
    return _gradients(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
) -> None:
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert {query.dtype} == {key.dtype, value.dtype}
    assert query.dim() == key.dim() == 3
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    assert query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0
    assert query.shape[2] <= 256
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    for boundaries, tensor, longest in ((cum_seq_q, query, max_q), (cum_seq_k, key, max_k)):
        assert boundaries is not None
        assert boundaries.dtype == torch.int32
        assert boundaries.dim() == 1
        assert boundaries.is_contiguous()
        assert boundaries.device == tensor.device
        assert boundaries[0] == 0
        assert boundaries[-1] == len(tensor), "gradients of rows that no sequence covers are never written"
        lengths = boundaries.diff()
        assert lengths.min() >= 1
        assert lengths.max() <= longest, "the kernel would not compute the last blocks"
        assert isinstance(longest, int)
    assert len(cum_seq_q) == len(cum_seq_k)
    assert not is_causal or torch.equal(cum_seq_q, cum_seq_k), "unequal lengths are aligned at their ends"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal)
    assert scale is not None
    out = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], len(query)), torch.nan)
    for rows, columns in _slices(cum_seq_q, cum_seq_k):
        out[rows], lse[:, rows] = kernels_cpu.forward(
            query[rows], key[columns], value[columns], causal=is_causal, scale=scale
        )
    return out, lse


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal)
    assert scale is not None
    assert grad_out.shape == out.shape == query.shape
    assert grad_out.dtype == out.dtype == query.dtype
    assert grad_out.stride(-1) == out.stride(-1) == 1
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.dtype == torch.float32
    grads = [torch.full_like(x, torch.nan) for x in (query, key, value)]
    for rows, columns in _slices(cum_seq_q, cum_seq_k):
        grads[0][rows], grads[1][columns], grads[2][columns] = kernels_cpu.backward(
            grad_out[rows],
            query[rows],
            key[columns],
            value[columns],
            out[rows],
            logsumexp[:, rows],
            causal=is_causal,
            scale=scale,
        )
    return grads[0], grads[1], grads[2]


def _slices(cum_seq_q: Tensor, cum_seq_k: Tensor) -> list[tuple[slice, slice]]:
    ends = [x.tolist() for x in (cum_seq_q, cum_seq_k)]
    return [(slice(*rows), slice(*columns)) for rows, columns in zip(*(pairwise(x) for x in ends), strict=True)]
