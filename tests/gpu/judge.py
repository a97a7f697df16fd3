"""The judge of the attention tests on a GPU: softmax over the whole matrix of scores, in float64, on the device."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)

# Errors in norm. bfloat16 keeps 8 bits: rounding the exact result costs 1.7e-3 of its norm, and the kernels round the
# weights of softmax as well before they multiply.
OUT_TOLERANCE = 4e-3
# Where the steps of a ring are merged in bfloat16, as TransformerEngine does: each merge rounds the output again, which
# came to 4.2e-3 on the last of 8 lanes in a simulation. This project merges in float32.
MERGED_OUT_TOLERANCE = 7e-3
GRAD_TOLERANCE = 1e-2
# Largest error, absolute: it is float32 throughout, of products of bfloat16 numbers.
LSE_TOLERANCE = 2e-3
# The portable kernel in float32.
FLOAT32_TOLERANCE = 1e-5


def random_inputs(
    num_rows: int, num_columns: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Return q_THD, k_SHD, v_SHD and the gradient of the output on the device."""
    generator = torch.Generator(device=DEVICE).manual_seed(num_rows + 7 * num_columns + heads)
    shapes = [(num_rows, heads), (num_columns, kv_heads), (num_columns, kv_heads), (num_rows, heads)]
    return [torch.randn(*shape, head_dim, generator=generator, device=DEVICE).to(dtype) for shape in shapes]


def exact(
    inputs: list[Tensor], row_seqlens: tuple[int, ...], column_seqlens: tuple[int, ...], *, causal: bool
) -> tuple[list[Tensor], Tensor]:
    """Return (out and the gradients of q, k, v; lse_HT), each sequence by itself, float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    outs, lses = [], []
    for query, key, value in zip(q.split(row_seqlens), k.split(column_seqlens), v.split(column_seqlens), strict=True):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", query, key) * query.shape[-1] ** -0.5
        if causal:
            above = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(above, float("-inf"))
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), value))
        lses.append(scores.detach().logsumexp(-1))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3].double())
    return [out.detach(), *grads], torch.cat(lses, dim=1)


def error_in_norm(actual: Tensor, expected: Tensor, at_least: float = 0.0) -> float:
    """Return |actual - expected| / |expected|, which is taken as `at_least` in root mean square; NaN where one is."""
    assert actual.shape == expected.shape
    norm = max(float(expected.norm()), at_least * expected.numel() ** 0.5)
    assert norm > 0, "nothing to compare with: give at_least"
    return float((actual.double() - expected).norm()) / norm


def assert_close(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype, at_least: float = 0.0) -> None:
    """Check out and the gradients of q, k and v by the tolerances of `dtype`; with few keys gradients of q and k are
    differences of large numbers: `at_least`."""
    out, grad = (OUT_TOLERANCE, GRAD_TOLERANCE) if dtype == torch.bfloat16 else 2 * (FLOAT32_TOLERANCE,)
    errors = [
        error_in_norm(x, y, least) for x, y, least in zip(actual, expected, (0, at_least, at_least, 0), strict=True)
    ]
    bounds = (out, grad, grad, grad)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), errors
