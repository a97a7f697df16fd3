"""megatron-core's compiled functions, compiled once for micro-batches of every length.

Megatron-core's fused activations, dropout and cross entropy are torch.compile'd functions. On their own they compile
for the first length that they see, anew for lengths as such when a second one comes, and for each mixture of what needs
gradients: in the middle of training, and a resumed run, which sees another length first, computes with other kernels
than the run before it. `install()` puts a caller in front of each that says, before the first compilation, that the
number of tokens changes, and hands over tensors that always look the same. Each is then compiled once, at its first
call with 2 tokens or more (dropout twice with full recomputation): by the warm-up on a GPU, in the first step on CPU
ranks. One token (an empty place of a plan) is computed without, because torch.compile takes 0 and 1 for constants.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Module -> function -> places of the arguments that have a row per token. None of them is differentiated: their callers
# are autograd functions with a backward of their own.
_PER_TOKEN: dict[str, dict[str, tuple[int, ...]]] = {
    "megatron.core.fusions.fused_bias_swiglu": {
        "swiglu": (0,),
        "swiglu_back": (0, 1),
        "bias_swiglu": (0,),
        "bias_swiglu_back": (0, 1),
    },
    "megatron.core.fusions.fused_bias_gelu": {"bias_gelu": (1,), "bias_gelu_back": (0, 2)},
    "megatron.core.fusions.fused_cross_entropy": {
        "calculate_logits_max": (0,),
        "calculate_predicted_logits": (0, 1, 2),
        "calculate_cross_entropy_loss": (0, 1),
        "calculate_gradients": (0, 1, 2, 3),
    },
}
_DROPOUT = "megatron.core.fusions.fused_bias_dropout"


def install() -> None:
    """Put the callers in front of megatron-core's functions, in this process; a second call does nothing."""
    for path, functions in _PER_TOKEN.items():
        module = importlib.import_module(path)
        for name, places in functions.items():
            _replace(module, name, functools.partial(_for_any_length, places=places))
    dropout = importlib.import_module(_DROPOUT)
    _replace(dropout, "bias_dropout_add_fused_train", _add_for_any_length)
    # An evaluation has no dropout to fuse: a bias and a sum are not worth a kernel that is compiled in training.
    _replace(dropout, "bias_dropout_add_fused_inference", _plain)


def _replace(module: Any, name: str, caller_of: Callable[[Any], Callable[..., Any]]) -> None:
    compiled = getattr(module, name)
    if not hasattr(compiled, "is_for_any_length"):
        caller = caller_of(compiled)
        caller.is_for_any_length = True  # type: ignore[attr-defined]
        setattr(module, name, caller)


def _plain(compiled: Any) -> Callable[..., Any]:
    """Return what `compiled` was made of."""
    plain = compiled.__wrapped__

    @functools.wraps(plain)
    def call(*args: Any) -> Any:
        return plain(*args)

    return call


def _for_any_length(compiled: Any, places: tuple[int, ...]) -> Callable[..., Any]:
    plain = compiled.__wrapped__

    @functools.wraps(plain)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or min(args[place].size(0) for place in places) < 2:
            return plain(*args)
        uniform = list(args)
        for place in places:
            uniform[place] = _of_any_length(args[place].detach())
        with torch.no_grad():
            return compiled(*uniform)

    return call


def _add_for_any_length(compiled: Any) -> Callable[..., Any]:
    plain = compiled.__wrapped__

    @functools.wraps(plain)
    def call(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if x.size(0) < 2:
            return plain(x_with_bias, residual, prob)
        if x.requires_grad:
            return compiled((_of_any_length(x), bias), _of_any_length(residual), prob)
        # The first pass of a recomputed layer; its input may be a leaf that needs gradients: one kernel for both.
        with torch.no_grad():
            return compiled((_of_any_length(x.detach()), bias), _of_any_length(residual.detach()), prob)

    return call


def _of_any_length(tensor: Tensor) -> Tensor:
    """Return `tensor` [T, ...], marked; what is alike for computing but not for torch.compile is made alike."""
    if tensor.dim() > 1 and tensor.size(1) == 1 and tensor.stride(1) != tensor.stride(0):
        tensor = tensor.flatten(0, 1).unsqueeze(1)  # transposed, its one sample has a stride of T times the width
    if not tensor.is_floating_point():
        tensor = tensor.clone()  # labels lie somewhere inside their batch; a few bytes
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
