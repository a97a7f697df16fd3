"""CUDA kernels that torch ships, for CPU tensors: they check what flash_api.cpp and cuDNN's MHA.cpp check or rely on.
Memory that the real kernels leave unwritten is not-a-number here."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.kernels import cpu as kernels_cpu

calls: Counter[str] = Counter()
_library: torch.library.Library | None = None


def install() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for function in (
            *(flash_attention_forward, flash_attention_backward),
            *(cudnn_attention_forward, cudnn_attention_backward),
        ):
            _library.impl(f"_{function.__name__}", _by_schema(function), "CPU")
    calls.clear()


def _by_schema(function: Callable[[Any], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return what calls `function` with all arguments of the operator of its name, under the schema's names."""
    arguments = getattr(torch.ops.aten, f"_{function.__name__}").default._schema.arguments
    kernel, _, pass_ = function.__name__.replace("_attention", "").partition("_")

    def call(*given: Any, **named: Any) -> tuple[Any, ...]:
        calls[f"{kernel} {pass_}"] += 1
        others = {name: value for name, value in named.items() if name != "scale" and value}
        assert not others, f"not used here: {others}"
        defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
        of_places = {one.name: value for one, value in zip(arguments, given, strict=False)}
        asked = SimpleNamespace(**defaults | of_places | named)
        assert asked.dropout_p == 0.0
        return function(asked)

    return call


def flash_attention_forward(asked: Any) -> tuple[Tensor, ...]:
    assert not asked.return_debug_mask
    is_swapped = asked.max_q == 1 and asked.query.shape[1] != asked.key.shape[1]
    assert not is_swapped, "another path, whose log-sum-exp lies in another order"
    out, lse = _attend(asked)
    unwritten = torch.full((2,), 7, dtype=torch.uint64)
    return out, lse, unwritten, torch.empty((), dtype=torch.uint64), torch.empty(0)


def flash_attention_backward(asked: Any) -> tuple[Tensor, ...]:
    assert asked.rng_state.dtype == torch.uint64
    assert asked.rng_state.shape == (2,)
    assert asked.logsumexp.is_contiguous(), "its strides are not read"
    return _gradients(asked)


def cudnn_attention_forward(asked: Any) -> tuple[Any, ...]:
    calls[f"cudnn plan {asked.max_q} {asked.max_k} {asked.is_causal}"] += 1
    assert asked.attn_bias is None
    assert asked.compute_log_sumexp
    assert all(x.is_contiguous() for x in (asked.query, asked.key, asked.value))
    out, lse = _attend(asked)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse, asked.cum_seq_q, asked.cum_seq_k, asked.max_q, asked.max_k, seed, seed.clone(), torch.empty(0)


def cudnn_attention_backward(asked: Any) -> tuple[Tensor, ...]:
    assert asked.attn_bias is None
    tensors = asked.grad_out, asked.query, asked.key, asked.value, asked.out, asked.logsumexp
    assert all(x.is_contiguous() for x in tensors)
    return _gradients(asked)


def _check(asked: Any) -> None:
    query, key, value = asked.query, asked.key, asked.value
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert {query.dtype} == {key.dtype, value.dtype}
    assert query.dim() == key.dim() == 3
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    assert query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0
    assert query.shape[2] <= 256
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    for boundaries, tensor, longest in ((asked.cum_seq_q, query, asked.max_q), (asked.cum_seq_k, key, asked.max_k)):
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
    assert len(asked.cum_seq_q) == len(asked.cum_seq_k)
    are_equal = torch.equal(asked.cum_seq_q, asked.cum_seq_k)
    assert are_equal or not asked.is_causal, "unequal lengths are aligned at their ends"
    assert asked.scale is not None


def _attend(asked: Any) -> tuple[Tensor, Tensor]:
    _check(asked)
    query, key, value = asked.query, asked.key, asked.value
    out = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], len(query)), torch.nan)
    how = {"causal": asked.is_causal, "scale": asked.scale}
    for rows, columns in _slices(asked):
        out[rows], lse[:, rows] = kernels_cpu.forward(query[rows], key[columns], value[columns], **how)
    return out, lse


def _gradients(asked: Any) -> tuple[Tensor, ...]:
    _check(asked)
    query, key, value = asked.query, asked.key, asked.value
    grad_out, out, lse = asked.grad_out, asked.out, asked.logsumexp
    assert grad_out.shape == out.shape == query.shape
    assert grad_out.dtype == out.dtype == query.dtype
    assert grad_out.stride(-1) == out.stride(-1) == 1
    assert lse.shape == (query.shape[1], len(query))
    assert lse.dtype == torch.float32
    grads = [torch.full_like(x, torch.nan) for x in (query, key, value)]
    how = {"causal": asked.is_causal, "scale": asked.scale}
    for rows, columns in _slices(asked):
        grads[0][rows], grads[1][columns], grads[2][columns] = kernels_cpu.backward(
            grad_out[rows], query[rows], key[columns], value[columns], out[rows], lse[:, rows], **how
        )
    return tuple(grads)


def _slices(asked: Any) -> list[tuple[slice, slice]]:
    ends = [x.tolist() for x in (asked.cum_seq_q, asked.cum_seq_k)]
    return [(slice(*rows), slice(*columns)) for rows, columns in zip(*(pairwise(x) for x in ends), strict=True)]
