"""Linear attention by flash-linear-attention's Triton programs, through its functions for runs of rows.

Its functions take the boundaries of runs, a state before each and give that behind each, and have gradients to both.
A scan without beta is its `chunk_simple_gla`: with C as queries, B as keys and dt x as values that is Mamba-2.

Source: fla-core of RELEASE; `tests/distributed/test_linear_kernels.py` reads the arguments out of its wheel.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.kernels.kernel import LinearKernel
from megatron.dynamic_cp.attention.linear.recurrence import Steps, state_dtype
from megatron.dynamic_cp.attention.linear.runs import Runs

RELEASE = "0.6.0"  # of fla-core, with which this was tried
FUNCTIONS = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_simple_gla": "fla.ops.simple_gla",
    "causal_conv1d": "fla.modules.causal_conv1d",
}
"""What is called, and where it is."""
MOST_KEY_SIZE = 256
"""The widest keys that its gated delta rule takes."""
_INSTALL = f"install it with pip install 'fla-core[cuda]=={RELEASE}'"


def why_not(device: torch.device, sizes: LinearAttention) -> str | None:
    """Return why it cannot be used, and what helps; None: it can."""
    if device.type != "cuda":
        return "runs on CUDA devices only: train on one, or on CPUs"
    if sizes.has_delta_rule and sizes.key_size > MOST_KEY_SIZE:
        return (
            f"takes keys of at most {MOST_KEY_SIZE} channels, these have {sizes.key_size}: give heads narrower keys "
            "(--linear-key-head-dim)"
        )
    for package in ("triton", "fla"):
        if find_spec(package) is None:
            return f"needs {package}, which is not installed; {_INSTALL}"
    for name, module in FUNCTIONS.items():
        try:
            missing = not hasattr(import_module(module), name)
        except ImportError as error:
            return f"cannot be imported ({error}); {_INSTALL}"
        if missing:
            return f"lacks {name} in {module}; {_INSTALL}"
    return None


def _function(name: str):  # type: ignore[no-untyped-def]
    return getattr(import_module(FUNCTIONS[name]), name)


def scan(steps: Steps, runs: Runs, state: Tensor | None, *, only_state: bool = False) -> tuple[Tensor | None, Tensor]:
    """Return what `kernel.Scan` says."""
    if steps.beta_TH is None:
        steps = steps.by_head()  # its delta rule alone takes groups
    q, k, v, decay, *beta = (tensor[None].contiguous() for tensor in steps.tensors)
    arguments = {
        "scale": steps.scale,
        "initial_state": state,
        "output_final_state": True,
        "cu_seqlens": runs.cu_seqlens,
        "cu_seqlens_cpu": runs.host_cu_seqlens,
    }
    if beta:
        found, last = _function("chunk_gated_delta_rule")(q, k, v, g=decay, beta=beta[0], **arguments)
    else:
        found, last = _function("chunk_simple_gla")(q, k, v, g=decay, **arguments)
    return (None if only_state else found[0]), last.to(state_dtype(v.dtype))


def convolve(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, runs: Runs) -> Tensor:
    """Return what `kernel.LinearKernel.convolve` says."""
    found, _ = _function("causal_conv1d")(
        x_TC[None],
        weight=weight_CK,
        bias=bias_C,
        activation="silu",
        cu_seqlens=runs.cu_seqlens,
        cu_seqlens_cpu=runs.host_cu_seqlens,
    )
    return found[0]  # type: ignore[no-any-return]


FLA = LinearKernel(name="fla", convolve=convolve, scan=scan)
