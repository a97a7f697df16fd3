"""Chooses megatron-core's fusions, the same on all ranks, and has each compiled once.

Megatron-core's fused activations, dropout and cross entropy are torch.compile'd functions. By themselves they compile
for the first length, again for variable lengths when a second one comes, and for each combination of inputs that need
gradients. That happens in the middle of training, and a resumed run, which meets another length first, computes with
other kernels. `compile_once` wraps each function: the wrapper marks the number of tokens as dynamic before the first
compilation and passes tensors that always look alike. Each function is then compiled once (dropout twice with full
recomputation), at its first call with 2 tokens or more: in the warm-up on a GPU, in the first step on CPU ranks. One
token (an empty place of a plan) is computed uncompiled, because torch.compile treats 0 and 1 as constants.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import layers as core_layers
from torch import Tensor
from torch.utils._triton import has_triton

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import ModelSettings
from megatron.dynamic_cp.agreement.verify import agree
from megatron.dynamic_cp.flags.features import has_biases, named_activation

# Module -> function -> positions of the arguments with a row per token. Autograd does not see them: the callers are
# autograd functions with their own backward.
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


def compile_once() -> None:
    """Wrap megatron-core's functions in this process; a second call does nothing."""
    for path, functions in _PER_TOKEN.items():
        module = importlib.import_module(path)
        for name, places in functions.items():
            _replace(module, name, functools.partial(_for_any_length, places=places))
    dropout = importlib.import_module(_DROPOUT)
    _replace(dropout, "bias_dropout_add_fused_train", _add_for_any_length)
    # An evaluation has no dropout to fuse, and a kernel for a bias and a sum is not worth a compilation during
    # training.
    _replace(dropout, "bias_dropout_add_fused_inference", _plain)


def _replace(module: Any, name: str, caller_of: Callable[[Any], Callable[..., Any]]) -> None:
    compiled = getattr(module, name)
    if not hasattr(compiled, "is_for_any_length"):
        caller = caller_of(compiled)
        caller.is_for_any_length = True  # type: ignore[attr-defined]
        setattr(module, name, caller)


def _plain(compiled: Any) -> Callable[..., Any]:
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
        # First pass of a recomputed layer: its input may need gradients or not, one kernel serves both.
        with torch.no_grad():
            return compiled((_of_any_length(x.detach()), bias), _of_any_length(residual.detach()), prob)

    return call


def _of_any_length(tensor: Tensor) -> Tensor:
    """Return `tensor` [T, ...] with T marked as dynamic and differences removed that only torch.compile sees."""
    if tensor.dim() > 1 and tensor.size(1) == 1 and tensor.stride(1) != tensor.stride(0):
        tensor = tensor.flatten(0, 1).unsqueeze(1)  # transposed, its one sample has a stride of T times the width
    if not tensor.is_floating_point():
        tensor = tensor.clone()  # labels are at any offset in their batch; a few bytes
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


CONFIG_FIELDS = frozenset(
    {
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
    }
)

KERNEL = "fused_weight_gradient_mlp_cuda"
_FROM_APEX = "apex is built from NVIDIA's repository with --cpp_ext and --cuda_ext"
_ON_CPU = "CPU ranks, unless a flag asks for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """The fusions of a run.

    Attributes:
        gradient_accumulation: matrix products add weight gradients to their buffers.
        activation: bias and the activation of the MLP.
        dropout: bias, dropout and residual.
        on, off: for the log, names of active ones, and (name, reason) of the others.
    """

    gradient_accumulation: bool = False
    activation: bool = False
    dropout: bool = False
    on: tuple[str, ...] = ()
    off: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        because: dict[str, list[str]] = {}
        for name, reason in self.off:
            because.setdefault(reason, []).append(name)
        off = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in because.items())
        return f"fusions: {', '.join(self.on) or 'none'}; off: {off}"

    def completed_flags(self, model: ModelSettings) -> dict[str, bool]:
        """Return the decided values of the flags that `model` left open."""
        return {
            "gradient_accumulation_fusion": self.gradient_accumulation,
            "bias_dropout_fusion": self.dropout,
            "bias_swiglu_fusion": model.swiglu and self.activation,
            "bias_gelu_fusion": not model.swiglu and self.activation,
        }


NOTHING = Fusions()
"""No fusion: the value before the choice."""


def choose(model: ModelSettings, device: torch.device) -> Fusions:
    """Choose this run's fusions, also where flags leave them open, and prepare the compiled ones. DynamicCPError on
    every rank if a requested one is not available, or ranks differ in what is installed. Collective."""
    fusions = agree(
        lambda: _decide(model, device),
        lambda chosen: hashlib.sha256(repr(chosen).encode()).hexdigest(),
        what="fused kernels (apex, Triton, TransformerEngine) that are installed",
        device=device,
    )
    if fusions.activation or fusions.dropout or model.cross_entropy_fusion_impl == "native":
        compile_once()
    return fusions


def _decide(model: ModelSettings, device: torch.device) -> Fusions:
    cannot_compile = why_not_compiled(device)
    reason_to_leave = _ON_CPU if device.type == "cpu" else ""
    own_sum = "--fp32-residual-connection adds in float32" if model.fp32_residual_connection else ""
    no_bias = "--disable-bias-linear leaves no bias" if model.disable_bias_linear and not model.swiglu else ""
    if model.num_experts is not None and has_biases(model):
        no_bias = "megatron-core's of experts has no bias"
    if name := named_activation(model):
        no_bias, activation = "its activation is this project's own", (name, "--bias-swiglu-fusion", None)
    elif model.swiglu:
        activation = ("SwiGLU", "--bias-swiglu-fusion", model.bias_swiglu_fusion)
    else:
        activation = ("GELU (in its form with tanh)", "--bias-gelu-fusion", model.bias_gelu_fusion)
    rows = [
        (
            "gradient_accumulation",
            "weight gradients",
            "--gradient-accumulation-fusion",
            model.gradient_accumulation_fusion,
            why_no_kernel(),
        ),
        ("activation", *activation, no_bias or cannot_compile),
        ("dropout", "dropout", "--bias-dropout-fusion", model.bias_dropout_fusion, own_sum or cannot_compile),
    ]
    decided: dict[str, bool] = {}
    on: list[str] = []
    off: list[tuple[str, str]] = []
    for key, name, flag, asked, missing in rows:
        if asked and missing:
            raise InvalidInputError(f"{flag} cannot be had: {missing}; install it or leave the flag out")
        if asked is False:
            reason = flag.replace("--", "--no-", 1)
        else:
            reason = missing if asked else reason_to_leave or missing
        decided[key] = not reason
        if reason:
            off.append((name, reason))
        else:
            on.append(name)
    if decided["gradient_accumulation"]:
        check_kernel(device, torch.bfloat16 if model.bf16 else torch.float32)
    if model.cross_entropy_loss_fusion:
        on.append(f"cross entropy ({model.cross_entropy_fusion_impl})")
        _check_cross_entropy(model.cross_entropy_fusion_impl, cannot_compile)
    else:
        off.append(("cross entropy", "no --cross-entropy-loss-fusion"))
    off.append(("RoPE", "its rotation of packed shards is this project's own"))
    return Fusions(**decided, on=tuple(on), off=tuple(off))


def _check_cross_entropy(impl: str, cannot_compile: str) -> None:
    if impl == "native" and cannot_compile:
        raise InvalidInputError(f"--cross-entropy-loss-fusion cannot be had: {cannot_compile}; leave it out")
    if impl == "te" and language_module.te_parallel_cross_entropy is None:
        raise InvalidInputError(
            "--cross-entropy-fusion-impl te needs TransformerEngine's cross entropy, which megatron-core did not find: "
            "install TransformerEngine or take native"
        )


def why_no_kernel() -> str:
    """Return why megatron-core has no kernel that adds a matrix product to a gradient buffer, "" if it has one."""
    if core_layers._grad_accum_fusion_available:
        return ""
    return f"apex's {KERNEL} cannot be imported, {_FROM_APEX}"


def why_not_compiled(device: torch.device) -> str:
    """Return why torch.compile makes no kernels for `device`, "" if it does."""
    if torch._dynamo.config.disable:
        return "torch.compile is switched off (TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE)"
    if device.type == "cuda" and not has_triton():
        return "torch.compile needs Triton, which this torch does not find"
    named = os.environ.get("CXX" if device.type == "cpu" else "CC")
    compilers = (named,) if named else (("g++", "clang++") if device.type == "cpu" else ("cc", "gcc", "clang"))
    if not any(shutil.which(one) for one in compilers):
        return f"torch.compile needs a compiler, none of {', '.join(compilers)} is there"
    return ""


def check_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidInputError if apex's kernel, maybe built for another torch, fails or gets a small product wrong."""
    inputs = (torch.arange(32 * 16, device=device) % 5).view(32, 16).to(dtype)
    grads = (torch.arange(32 * 8, device=device) % 3).view(32, 8).to(dtype)
    buffer = torch.ones(8, 16, device=device)
    expected = 1 + (grads.float().t() @ inputs.float())  # small integers: exact
    remedy = "rebuild apex for this torch or give --no-gradient-accumulation-fusion"
    try:
        core_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, grads, buffer)
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:200]
        raise InvalidInputError(f"apex's {KERNEL} fails ({type(error).__name__}: {said}): {remedy}") from error
    if not torch.equal(buffer, expected):
        difference = (buffer - expected).abs().max().item()
        raise InvalidInputError(
            f"apex's {KERNEL} is off by {difference} from a product of up to {expected.max().item()}: {remedy}"
        )
