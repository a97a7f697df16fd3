"""Stand-ins for flash-linear-attention's functions: they take what it takes, keep what it keeps, and give zeros."""

from typing import Any

import torch
from torch import Tensor


class _Keeps(torch.autograd.Function):
    """Zeros of some shapes, for which backward is said to need what is given; so are the gradients of that."""

    @staticmethod
    def forward(ctx: Any, shapes: tuple[tuple[int, ...], ...], *given: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*given)
        like = next(one for one in given if one is not None)
        dtypes = (like.dtype, torch.float32)  # of outputs, of states
        return tuple(like.new_zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False))

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if one is None else torch.zeros_like(one) for one in ctx.saved_tensors)


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, **options: Any) -> Any:
    """Keep what the released scans keep: with a delta rule also the matrices of chunks of 64 tokens."""
    heads, width = v.shape[2:]
    matrices = None if beta is None else v.new_zeros((*v.shape[:3], 64))
    state = (len(options["cu_seqlens"]) - 1, heads, q.shape[3], width)
    return _Keeps.apply((v.shape, state), q, k, v, g.clone(), beta, matrices, options["initial_state"])


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, **_options: Any) -> Any:
    return _Keeps.apply((x.shape,), x, weight, bias)[0], None


class _Norm(torch.autograd.Function):
    """Keeps what the release keeps: its output, and a number for each vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(found := torch.zeros_like(x), x.new_zeros(x.shape[:-1], dtype=torch.float32))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def normalize(x: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x)


RELEASED = {
    "chunk_gated_delta_rule": scan, "chunk_simple_gla": scan, "causal_conv1d": convolve, "l2norm": normalize,
    "rmsnorm_fn": lambda x, weight, bias, z, **_options: _Keeps.apply((x.shape,), x, weight, z)[0],
}  # fmt: skip
