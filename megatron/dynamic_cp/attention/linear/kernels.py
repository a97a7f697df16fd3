"""Which kernel computes linear attention: torch's products of matrices on CPUs, flash-linear-attention on GPUs.

flash-linear-attention's functions take the boundaries of runs, a state before each and give that behind each, and have
gradients to both. A scan without beta is its `chunk_simple_gla`: with C as queries, B as keys and dt x as values that
is Mamba-2.

A kernel is compared with the portable one on the device where it will run, once, at start-up. A state that is read as
its transpose, or a gradient that is not written, trains without an error. Triton compiles differently for each device.
A second here makes that an error at start-up.

Shapes: T tokens, H heads, K channels of a key (weight: taps), V of a value, C convolved channels.

Source: fla-core of RELEASE; `tests/distributed/test_linear_kernels.py` reads the arguments out of its wheel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.portable import PORTABLE
from megatron.dynamic_cp.attention.linear.recurrence import NORM_EPSILON, LinearKernel, Runs, Steps, state_dtype
from megatron.dynamic_cp.attention.linear.states import summaries
from megatron.dynamic_cp.repairs.releases import each_named

RELEASE = "0.6.0"  # of fla-core, with which this was tried
FUNCTIONS = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_simple_gla": "fla.ops.simple_gla",
    "causal_conv1d": "fla.modules.causal_conv1d",
    "l2norm": "fla.modules.norm.l2norm",
    "rmsnorm_fn": "fla.modules.norm.layernorm_gated",
}
"""What is called, and where it is."""
MOST_KEY_SIZE = 256
"""The widest keys that its gated delta rule takes."""
OLDEST_TRITON = "3.3"
REFUSED_TRITON = "3.4", "3.7.1"
"""Releases of Triton, the first of them and the first behind them, whose gated gradients are wrong on Hopper (its issue
640). There it raises in backward; with tilelang it computes those of a gated delta net, none of Mamba-2."""
_INSTALL = f"install it with pip install 'fla-core[cuda]=={RELEASE}'"
logger = logging.getLogger(__name__)
TOLERANCE = 0.05
"""Of the norm; bfloat16 rounds products of states to 2 or 3 digits, a mistake is of the size of what is compared."""
_LENGTHS = (2, 66, 522)
_GATES = (("decays", "betas"), ("decays",))
_INPUTS = [
    ("what is convolved", "its weights", "its biases", "queries", "keys", "values", *gates, "the states before runs")
    for gates in _GATES
]


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
    installed: str = import_module("triton").__version__
    if (obstacle := why_not_triton(installed, torch.cuda.get_device_capability(device), sizes)) is not None:
        return obstacle
    for name, module in FUNCTIONS.items():
        try:
            missing = not hasattr(import_module(module), name)
        except (ImportError, RuntimeError, ValueError, AssertionError) as error:  # it also reads its variables
            return f"cannot be imported ({error}); {_INSTALL}"
        if missing:
            return f"lacks {name} in {module}; {_INSTALL}"
    return None


def why_not_triton(installed: str, capability: tuple[int, int], sizes: LinearAttention) -> str | None:
    """Return why a release of Triton cannot compute such layers on a device of this compute capability."""
    from packaging.version import Version  # comes with megatron-core

    release, (first, behind) = Version(installed), map(Version, REFUSED_TRITON)
    if release < Version(OLDEST_TRITON):
        return f"needs Triton {OLDEST_TRITON} or newer, {installed} is installed: docs/GPU.md#versions"
    if capability[0] != 9 or not first <= release < behind or (sizes.has_delta_rule and find_spec("tilelang")):
        return None
    tilelang = ", or pip install tilelang beside CUDA's nvcc" if sizes.has_delta_rule else ", tilelang is no help here"
    return (
        f"refuses to train {sizes.kind} on a Hopper GPU with Triton {installed}, whose gradients would be wrong: take "
        f"Triton {REFUSED_TRITON[1]} or newer (torch 2.13 brings it){tilelang}; docs/GPU.md#versions"
    )


def _function(name: str):  # type: ignore[no-untyped-def]
    return getattr(import_module(FUNCTIONS[name]), name)


def scan(steps: Steps, runs: Runs, state: Tensor | None, *, only_state: bool = False) -> tuple[Tensor | None, Tensor]:
    """See `recurrence.Scan`."""
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
        output, last = _function("chunk_gated_delta_rule")(q, k, v, g=decay, beta=beta[0], **arguments)
    else:
        output, last = _function("chunk_simple_gla")(q, k, v, g=decay, **arguments)
    return (None if only_state else output[0]), last.to(state_dtype(v.dtype))


def convolve(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, runs: Runs) -> Tensor:
    """See `recurrence.LinearKernel`."""
    convolved, _ = _function("causal_conv1d")(
        x_TC[None],
        weight=weight_CK,
        bias=bias_C,
        activation="silu",
        cu_seqlens=runs.cu_seqlens,
        cu_seqlens_cpu=runs.host_cu_seqlens,
    )
    return convolved[0]  # type: ignore[no-any-return]


def normalize(x: Tensor) -> Tensor:
    """See `recurrence.LinearKernel`."""
    return _function("l2norm")(x, eps=NORM_EPSILON)  # type: ignore[no-any-return]


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, width: int, gates_first: bool) -> Tensor:
    """See `recurrence.LinearKernel`."""
    options = {"z": z, "eps": epsilon, "group_size": width, "norm_before_gate": not gates_first}
    return _function("rmsnorm_fn")(x, weight=weight, bias=None, **options)  # type: ignore[no-any-return]


FLA = LinearKernel(name="fla", convolve=convolve, normalize=normalize, scan=scan, gated_norm=gated_norm)


@lru_cache
def choose_linear_kernel(device: torch.device, sizes: LinearAttention) -> LinearKernel:
    """Return the kernel of linear attention on `device` and log why, once; called at start-up, too, to end there.
    UnsupportedFeatureError: on a GPU, flash-linear-attention is missing or cannot do it."""
    if device.type == "cpu":
        logger.info("linear attention kernel %s: on the CPU", PORTABLE.name)
        return PORTABLE
    obstacle = why_not(device, sizes)
    if obstacle is not None:
        raise UnsupportedFeatureError(f"layers of linear attention find no kernel: flash-linear-attention {obstacle}")
    logger.info("linear attention kernel %s: on %s", FLA.name, torch.cuda.get_device_name(device))
    return FLA


def prepare_linear_kernel(sizes: LinearAttention, dtype: torch.dtype, device: torch.device) -> float:
    """Choose the kernel of a run, log why, and return how far it is from the portable one, of the norm; at start-up.
    `sizes` are those of a tensor-parallel rank. UnsupportedFeatureError: no kernel here, or it computes something else.
    """
    return check_linear_kernel(choose_linear_kernel(device, sizes), sizes, dtype, device)


def check_linear_kernel(
    kernel: LinearKernel, sizes: LinearAttention, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the largest relative error of `kernel`, with states before runs; waits for the device.
    UnsupportedFeatureError: it is above TOLERANCE; names what is wrong."""
    if kernel is PORTABLE:
        return 0.0
    runs = Runs.build(_LENGTHS, device)
    inputs = _inputs(sizes, dtype, device)
    worst = 0.0
    found = each_named(f"kernel {kernel.name} of linear attention", _results(kernel, inputs, runs))
    for (name, actual), (_, expected) in zip(found, _results(PORTABLE, inputs, runs), strict=True):
        error = float((actual.float() - expected.float()).norm() / expected.float().norm())
        if actual.shape != expected.shape or not error <= TOLERANCE:  # also when it is not a number
            raise UnsupportedFeatureError(
                f"kernel {kernel.name} of linear attention is wrong on {device}: {name} is off by {error:.3g} of its "
                f"norm, {TOLERANCE} is allowed ({sizes.kind}, keys of {sizes.key_size}, values of {sizes.value_size}): "
                "take another version of flash-linear-attention, Triton or torch"
            )
        worst = max(worst, error)
    return worst


def _inputs(sizes: LinearAttention, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Steps, Tensor]:
    """Return a convolution's channels, weights and biases, steps of all heads, and a state before each run."""
    generator = torch.Generator().manual_seed(1)
    num_rows, heads, channels = sum(_LENGTHS), sizes.num_heads, sizes.convolved_channels

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, of)

    wide = state_dtype(dtype)
    steps = Steps(
        q_THK=random(num_rows, sizes.num_groups, sizes.key_size),
        k_THK=random(num_rows, sizes.num_groups, sizes.key_size),
        v_THV=random(num_rows, heads, sizes.value_size),
        decay_TH=-random(num_rows, heads, of=wide).sigmoid() / 4,
        beta_TH=random(num_rows, heads, of=wide).sigmoid() if sizes.has_delta_rule else None,
        scale=1.0,
    )
    state = random(len(_LENGTHS), heads, sizes.key_size, sizes.value_size, of=wide)
    return [random(num_rows, channels), random(channels, sizes.kernel_size), random(channels)], steps, state


def _results(
    kernel: LinearKernel, inputs: tuple[list[Tensor], Steps, Tensor], runs: Runs
) -> Iterator[tuple[str, Tensor]]:
    """Yield (what it is, the tensor)."""
    convolution, steps, state = inputs
    tensors = [tensor.clone().requires_grad_() for tensor in (*convolution, *steps.tensors, state)]
    convolved = kernel.convolve(tensors[0], tensors[1], tensors[2], runs)
    q, k = kernel.normalize(torch.stack(tensors[3:5]))
    steps = steps.with_tensors([q, k, *tensors[5:-1]])
    scanned, last = kernel.scan(steps, runs, tensors[-1])
    assert scanned is not None
    flat, gates_first = steps.v_THV.flatten(1), steps.beta_TH is None
    width = flat.shape[1] // (steps.k_THK if gates_first else steps.v_THV).shape[1]  # of a group; of a head
    normed = kernel.gated_norm(scanned.flatten(1), flat, tensors[2][: flat.shape[1]], 1e-5, width, gates_first)
    outputs = (convolved, scanned, last, normed)
    names = ("the convolution", "the output", "the state behind runs", "the gated norm")
    yield from zip(names, (output.detach() for output in outputs), strict=True)
    weights = [torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype) for out in outputs]
    for name, grad in zip(_INPUTS[steps.beta_TH is None], torch.autograd.grad(outputs, tensors, weights), strict=True):
        yield f"the gradient of {name}", grad
    with torch.no_grad():  # of a gated delta net these scan wider values, from a state that is not 0
        summary = summaries(kernel, steps, runs)
    yield from (("the transition of runs", summary.transitions), ("what runs add to states", summary.own))
