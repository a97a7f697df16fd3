"""Compares a kernel of linear attention with the portable one on the device where it will run, once, at start-up.

A state that is read as its transpose, or a gradient that is not written, trains without an error. Triton compiles
differently for each device. A second here makes that an error at start-up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.kernels.choice import choose_linear_kernel
from megatron.dynamic_cp.attention.linear.kernels.kernel import LinearKernel
from megatron.dynamic_cp.attention.linear.kernels.portable import PORTABLE
from megatron.dynamic_cp.attention.linear.recurrence import Steps, state_dtype
from megatron.dynamic_cp.attention.linear.runs import Runs
from megatron.dynamic_cp.attention.linear.states import summaries

TOLERANCE = 0.05
"""Of the norm; bfloat16 rounds products of states to 2 or 3 digits, a mistake is of the size of what is compared."""
_LENGTHS = (2, 66, 522)
_GATES = (("decays", "betas"), ("decays",))
_INPUTS = [
    ("what is convolved", "its weights", "its biases", "queries", "keys", "values", *gates, "the states before runs")
    for gates in _GATES
]


def prepare_linear_kernel(sizes: LinearAttention, dtype: torch.dtype, device: torch.device) -> float:
    """Choose the kernel of a run, log why, and return how far it is from the portable one, of the norm; at start-up.

    Args:
        sizes: of a tensor-parallel rank.
        dtype: of the model.

    Raises:
        UnsupportedFeatureError: there is no kernel on this device, or it computes something else; names what.
    """
    return check_linear_kernel(choose_linear_kernel(device, sizes), sizes, dtype, device)


def check_linear_kernel(
    kernel: LinearKernel, sizes: LinearAttention, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the largest relative error of `kernel`, with states before runs; waits for the device.

    Raises:
        UnsupportedFeatureError: it is above TOLERANCE; names what is wrong.
    """
    if kernel is PORTABLE:
        return 0.0
    runs = Runs.build(_LENGTHS, device)
    inputs = _inputs(sizes, dtype, device)
    worst = 0.0
    for (name, actual), (_, expected) in zip(
        _results(kernel, inputs, runs), _results(PORTABLE, inputs, runs), strict=True
    ):
        error = float((actual.float() - expected.float()).norm() / expected.float().norm())
        if actual.shape != expected.shape or not error <= TOLERANCE:  # also when it is not a number
            raise UnsupportedFeatureError(
                f"kernel {kernel.name} of linear attention is wrong on {device}: {name} is off by {error:.3g} of its "
                f"norm, {TOLERANCE} is allowed ({sizes.kind}, keys of {sizes.key_size}, values of {sizes.value_size}): "
                "take another version of flash-linear-attention, Triton or torch",
                kernel=kernel.name,
                error=error,
            )
        worst = max(worst, error)
    return worst


def _inputs(sizes: LinearAttention, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Steps, Tensor]:
    """Return a convolution's channels, weights and biases, steps of two heads of a group, a state before each run."""
    generator = torch.Generator().manual_seed(1)
    num_rows, heads = sum(_LENGTHS), 2

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, of)

    wide = state_dtype(dtype)
    q, k = (torch.nn.functional.normalize(random(num_rows, 1, sizes.key_size), dim=-1) for _ in range(2))
    steps = Steps(
        q_THK=q,
        k_THK=k,
        v_THV=random(num_rows, heads, sizes.value_size),
        decay_TH=-random(num_rows, heads, of=wide).sigmoid() / 4,
        beta_TH=random(num_rows, heads, of=wide).sigmoid() if sizes.has_delta_rule else None,
        scale=1.0,
    )
    state = random(len(_LENGTHS), heads, sizes.key_size, sizes.value_size, of=wide)
    return [random(num_rows, 64), random(64, sizes.kernel_size), random(64)], steps, state


def _results(
    kernel: LinearKernel, inputs: tuple[list[Tensor], Steps, Tensor], runs: Runs
) -> Iterator[tuple[str, Tensor]]:
    """Yield (what it is, the tensor)."""
    convolution, steps, state = inputs
    tensors = [tensor.clone().requires_grad_() for tensor in (*convolution, *steps.tensors, state)]
    convolved = kernel.convolve(tensors[0], tensors[1], tensors[2], runs)
    found, last = kernel.scan(steps.with_tensors(tensors[3:-1]), runs, tensors[-1])
    assert found is not None
    outputs = (convolved, found, last)
    for name, output in zip(("the convolution", "what tokens find", "the state behind runs"), outputs, strict=True):
        yield name, output.detach()
    weights = [torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype) for out in outputs]
    for name, grad in zip(_INPUTS[steps.beta_TH is None], torch.autograd.grad(outputs, tensors, weights), strict=True):
        yield f"the gradient of {name}", grad
    with torch.no_grad():  # of a gated delta net these scan wider values, from a state that is not 0
        transitions, own = summaries(kernel, steps, runs)
    yield from (("the transition of runs", transitions), ("what runs add to states", own))
