"""What linear layers and norms of TransformerEngine 2.11 and 2.20 call of its compiled part, in torch. Source:
`pytorch/csrc/extensions/gemm.cpp` and `normalization.cpp`."""

from typing import Any

import torch
from torch import Tensor

num_into_buffers = 0
"""Products that went where the caller said, of the process: gradients of weights."""
TYPES = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}


def generic_gemm(
    a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool, out: Tensor | None, quantizer: Any, out_type: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, is_backward: bool,
    workspace: Tensor | None, workspace_size: int, accumulate: bool, use_split_accumulator: bool, **rest: Any,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    """Return b @ a, each as it is or transposed, and the gradient of a bias: the sum of b's rows."""
    assert quantizer is None
    assert not gelu
    assert rest["comm_overlap"] is None
    assert a.is_contiguous()
    assert b.is_contiguous()
    rows_a, rows_b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    product = (rows_b.t() if transpose_b else rows_b) @ (rows_a.t() if transpose_a else rows_a)
    if bias is not None and not is_backward:
        product = product + bias
    if not transpose_b:
        product = product.view(*b.shape[:-1], product.shape[-1])
    global num_into_buffers
    num_into_buffers += out is not None
    if out is None:
        assert not accumulate
        out = product.to(b.dtype if out_type is None else TYPES[out_type.name])
    elif accumulate:
        out += product.view_as(out)
    else:
        out.copy_(product.view_as(out))
    bias_grad = rows_b.sum(0).to(bias.dtype) if bias is not None and is_backward else None
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a: list[Tensor], transpose_a: bool, b: list[Tensor], transpose_b: bool, out: list[Tensor], out_type: Any,
    rows: list[int], bias: list[Tensor], bias_type: Any, is_one_output: bool, gelu_in: list[Tensor],
    is_backward: bool, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Write b @ a of each expert, as `generic_gemm`, into its output or its rows of the one that there is."""
    _, _, accumulate, use_split_accumulator, _ = rest
    outs = out[0].split(rows) if is_one_output else out
    assert len(a) == len(b) == len(outs)
    for number, (one_a, one_b, one_out) in enumerate(zip(a, b, outs, strict=True)):
        one_bias = bias[number] if bias and bias[number].numel() else None
        product = (one_a, transpose_a, one_b, transpose_b, one_out, None, out_type, one_bias, bias_type)
        rest = (False, None, is_backward, None, 0, accumulate, use_split_accumulator)
        _, bias_grad, *_ = generic_gemm(*product, *rest, comm_overlap=None)
        if bias_grad is not None:
            bias[number].copy_(bias_grad)
    return bias


def layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of rows, their mean, and one by their deviation."""
    mean = x.mean(-1, dtype=torch.float32)
    scale = (x.float() - mean[:, None]).square().mean(-1).add(eps).rsqrt()
    return _written((x.float() - mean[:, None]) * scale[:, None] * _gain(weight, rest[-1]) + bias, x, rest), mean, scale


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *rest: Any) -> tuple[Tensor, None, Tensor]:
    """Return the norm of rows, nothing, and one by their root mean square."""
    scale = x.float().square().mean(-1).add(eps).rsqrt()
    return _written(x.float() * scale[:, None] * _gain(weight, rest[-1]), x, rest), None, scale


def _gain(weight: Tensor, is_centred_at_zero: bool) -> Tensor:
    return weight.float() + 1 if is_centred_at_zero else weight


def _written(result: Tensor, x: Tensor, rest: tuple[Any, ...]) -> Tensor:
    out, quantizer, out_type, _, _ = rest
    assert x.dim() == 2
    assert x.is_contiguous()
    assert quantizer is None
    if out is None:
        return result.to(TYPES[out_type.name])
    return out.copy_(result)


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, margin: int, is_centred_at_zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the input, the weight and the bias."""
    of_norm = grad.float() * _gain(weight, is_centred_at_zero)
    normed = (x.float() - mean[:, None]) * scale[:, None]
    centred = of_norm - of_norm.mean(-1, keepdim=True) - normed * (of_norm * normed).mean(-1, keepdim=True)
    of_weight = (grad.float() * normed).sum(0).to(weight.dtype)
    return (centred * scale[:, None]).to(x.dtype), of_weight, grad.float().sum(0).to(weight.dtype)


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, margin: int, is_centred_at_zero: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and the weight."""
    of_norm = grad.float() * _gain(weight, is_centred_at_zero)
    normed = x.float() * scale[:, None]
    of_input = (of_norm - normed * (of_norm * normed).mean(-1, keepdim=True)) * scale[:, None]
    return of_input.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


WRITTEN = (generic_gemm, te_general_grouped_gemm, layernorm_fwd, rmsnorm_fwd, layernorm_bwd, rmsnorm_bwd)
