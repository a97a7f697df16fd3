"""flash-attn 2.8's functions for packed sequences as TransformerEngine calls them: A100, --attention-backend flash. A
sequence lies where its boundaries say; what is behind the last one is left as it was."""

import importlib.metadata
import sys
import types
from typing import Any

import torch
from torch import Tensor

from tests.distributed.real_transformer_engine.extension import CALLS, NAN, Attention, Extension, named

VERSION = "2.8.3"
unwritten = NAN
"""What is in memory that a kernel leaves as it was; on a device, what was there before."""
Places = tuple[Tensor, Tensor, int, int]
"""Boundaries of queries and of keys, and the longest sequence of both."""


def _attention(q: Tensor, k: Tensor, v: Tensor, places: Places, scale: float, causal: bool) -> Attention:
    cu_q, cu_k, max_q, max_k = places
    mask = "CAUSAL_BOTTOM_RIGHT" if causal else ""
    return Attention(q, k, v, scale=scale, mask=mask, max_q=max_q, max_kv=max_k).between(cu_q, cu_k, cu_q, cu_k)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, *places: Any, dropout_p: float, softmax_scale: float, causal: bool, **_rest: Any
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Return output, log-sum-exp [H, T], nothing and random states."""
    assert dropout_p == 0
    CALLS.append("flash_attn_fwd")
    out = torch.full(q.shape, unwritten, dtype=q.dtype)
    lse_HT = _attention(q, k, v, places, softmax_scale, causal).forward(out)
    return out, lse_HT, None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, *args: Any, **rest: Any
) -> None:
    """Write gradients into the first three of `args`, all of them; the others are places."""
    assert rest["dropout_p"] == 0
    CALLS.append("flash_attn_bwd")
    grads, places = list(args[:3]), args[3:]
    for x in grads:
        x.fill_(unwritten)
    attention = _attention(q, k, v, places, rest["softmax_scale"], rest["causal"])
    for rows, columns in attention.sequences:
        for x, part in zip(grads, (rows, columns, columns), strict=True):
            x[part] = 0
    attention.backward(out, grad, lse_HT, grads)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, places: Places, rest: dict[str, Any]) -> Tensor:
        out, lse_HT, _, _ = _flash_attn_varlen_forward(q, k, v, *places, **rest)
        ctx.save_for_backward(q, k, v, out, lse_HT)
        ctx.places, ctx.rest = places, rest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = [torch.empty_like(x) for x in ctx.saved_tensors[:3]]
        _flash_attn_varlen_backward(grad.contiguous(), *ctx.saved_tensors, *grads, *ctx.places, **ctx.rest)
        return *grads, None, None


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, **rest: Any,
) -> Tensor:  # fmt: skip
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _Varlen.apply(q, k, v, places, {"dropout_p": dropout_p, **rest})


def install() -> None:
    """Let TransformerEngine, which is not imported yet, find flash-attn."""
    functions = (_flash_attn_varlen_forward, _flash_attn_varlen_backward, flash_attn_varlen_func)
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update({function.__name__: function for function in functions})
    for name in ("flash_attn_func", "_flash_attn_forward", "_flash_attn_backward"):
        setattr(interface, name, named(name))
    package = types.ModuleType("flash_attn")
    package.__path__ = []  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn": package, interface.__name__: interface}
    sys.modules["flash_attn_2_cuda"] = Extension("flash_attn_2_cuda")
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name == "flash-attn" else version(name)
