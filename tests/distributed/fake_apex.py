"""Stands in for apex's `fused_weight_gradient_mlp_cuda` on CPU ranks: asserts what it needs, and computes it. Source:
apex, `csrc/megatron/fused_weight_gradient_dense*.cu`; megatron-core 0.16.1, `tensor_parallel/layers.py`."""

import sys
import types

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"

calls: list[tuple[int, int, int]] = []
"""(tokens, width in, width out) of each product of this process."""

_dummies: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}


def wgrad_gemm_accum_fp32(inputs: Tensor, grads: Tensor, main_grad: Tensor) -> None:
    """Add grads^T inputs to `main_grad`, which is float32."""
    assert main_grad.dtype == torch.float32, "apex: d_weight is read as float32"
    _accumulate(inputs, grads, main_grad)


def wgrad_gemm_accum_fp16(inputs: Tensor, grads: Tensor, main_grad: Tensor) -> None:
    """Add grads^T inputs to `main_grad`, which has their type."""
    assert main_grad.dtype == inputs.dtype, "apex: d_weight is read as the type of its operands"
    _accumulate(inputs, grads, main_grad)


def _accumulate(inputs: Tensor, grads: Tensor, main_grad: Tensor) -> None:
    assert inputs.dim() == grads.dim() == main_grad.dim() == 2, "apex reads the last dim as width"
    assert all(tensor.is_contiguous() for tensor in (inputs, grads, main_grad)), "apex takes pointers, no strides"
    assert inputs.dtype == grads.dtype, "apex dispatches on one type"
    assert len(inputs) == len(grads) > 0
    assert main_grad.shape == (grads.size(1), inputs.size(1))
    calls.append((len(inputs), inputs.size(1), grads.size(1)))
    main_grad += grads.float().t() @ inputs.float()


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return TransformerEngine's shared buffer of this shape; what is in it must not reach a gradient."""
    key = (tuple(shape), dtype)
    if key not in _dummies:
        _dummies[key] = torch.full(shape, float("nan"), dtype=dtype)
    return (_dummies[key].zero_() if zero else _dummies[key]).detach()


def install() -> None:
    """Let megatron-core find it, in this process."""
    module = types.ModuleType(NAME)
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp16  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    layers.fused_weight_gradient_mlp_cuda = module
    layers._grad_accum_fusion_available = True
    layers.HAVE_TE, layers.get_dummy_wgrad = True, get_dummy_wgrad
