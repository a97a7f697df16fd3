"""Compares a kernel with the portable one on the device where it will run, once, at start-up.

The flash and cuDNN operators are private to torch: their layouts have changed between versions, and a wrong log-sum-exp
or an unwritten gradient trains without an error. Triton compiles differently for each device. Some milliseconds here
make that an error at start-up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CAUSAL, Lambda
from megatron.dynamic_cp.attention.kernels.choice import CPU, PORTABLE, Kernel
from megatron.dynamic_cp.attention.packs import Pack

# bfloat16 rounds each of out and gradients to 3 digits: 0.2 to 0.6 % of their norm.
TOLERANCE = 0.02
# Local tokens of three sequences: the shortest that a ring has, one beside a power of two, one of several blocks.
_SEQLENS = (2, 66, 522)
_WINDOW = Lambda(3, 100)
_NAMES = ("output", "log-sum-exp", "gradient of the queries", "gradient of the keys", "gradient of the values")


def check_kernel(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int
) -> float:
    """Return the largest relative error of `kernel` over the three steps of a ring; waits for the device.

    Where it serves ranges of keys, also over a window with a sink.

    Raises:
        UnsupportedFeatureError: it is above TOLERANCE; names what is wrong.
    """
    if kernel in (CPU, PORTABLE):
        return 0.0
    halves = tuple(seqlen // 2 for seqlen in _SEQLENS)
    packs = {
        "causal": Pack.build(_SEQLENS, mask=CAUSAL, device=device),
        "with half the keys": Pack.build(_SEQLENS, halves, device=device),
        "with half the queries": Pack.build(halves, _SEQLENS, device=device),
    }
    if kernel.serves_ranges:
        window = np.concatenate([_WINDOW.key_ranges(seqlen) for seqlen in _SEQLENS])
        packs["of windows"] = Pack.build(_SEQLENS, device=device, key_ranges=window)
    worst = 0.0
    for step, pack in packs.items():
        inputs = _inputs(pack, device, dtype, heads, kv_heads, head_dim)
        results = zip(_NAMES, _results(kernel, inputs, pack), _results(PORTABLE, inputs, pack), strict=True)
        # One after the other: backward is not called with a wrong log-sum-exp.
        for name, actual, expected in results:
            error = _error(actual, expected)
            if not error <= TOLERANCE:  # also when it is not a number
                raise UnsupportedFeatureError(
                    f"attention kernel {kernel.name} of torch {torch.__version__} is wrong on {_name(device)}: {name} "
                    f"of a pack {step} is off by {error:.3g} of its norm, {TOLERANCE} is allowed (heads "
                    f"{heads}/{kv_heads}, width {head_dim}): take another --attention-backend, or another torch",
                    kernel=kernel.name,
                    error=error,
                )
            worst = max(worst, error)
    return worst


def _results(kernel: Kernel, inputs: list[Tensor], pack: Pack) -> Iterator[Tensor]:
    """Yield what `_NAMES` says. Backward gets a log-sum-exp over more keys than the pack's, as in a ring."""
    grad, query, key, value = inputs
    scale = query.shape[-1] ** -0.5
    out, lse = kernel.forward(query, key, value, pack, scale)
    yield out
    yield lse
    yield from kernel.backward(grad, query, key, value, out, lse + 0.5, pack, scale)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in norm."""
    if actual.shape != expected.shape:
        return torch.inf
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def _inputs(
    pack: Pack, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(pack.row_seqlens) + sum(pack.row_seqlens))
    num_rows, num_columns = sum(pack.row_seqlens), sum(pack.column_seqlens)
    shapes = [(num_rows, heads), (num_rows, heads), (num_columns, kv_heads), (num_columns, kv_heads)]
    return [torch.randn(*shape, head_dim, generator=generator).to(device, dtype) for shape in shapes]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
