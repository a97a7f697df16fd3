"""Which of megatron-core's fusions a run has: chosen once, the same on all ranks, and why others are off."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
from dataclasses import dataclass

import torch
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import layers as core_layers
from torch.utils._triton import has_triton

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.verify import agree
from megatron.trainer import compile_once

CONFIG_FIELDS = frozenset(
    {
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
    }
)
"""Fields of TransformerConfig that this module sets."""

KERNEL = "fused_weight_gradient_mlp_cuda"
_FROM_APEX = "apex is built from NVIDIA's repository with --cpp_ext and --cuda_ext"
_ON_CPU = "CPU ranks, unless a flag asks for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusions:
    """What is fused.

    Attributes:
        on: names of what is, as the log says them.
        off: (name, reason) of what is not.
    """

    on: tuple[str, ...]
    off: tuple[tuple[str, str], ...]

    def describe(self) -> str:
        """Return one line for the log."""
        because: dict[str, list[str]] = {}
        for name, reason in self.off:
            because.setdefault(reason, []).append(name)
        off = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in because.items())
        return f"fusions: {', '.join(self.on) or 'none'}; off: {off}"


def activation_flag(args: argparse.Namespace) -> str:
    """Return the destination of the flag that belongs to the run's activation."""
    return "bias_swiglu_fusion" if args.swiglu else "bias_gelu_fusion"


def choose(args: argparse.Namespace, device: torch.device) -> Fusions:
    """Return the fusions of this run, decide in `args` what was left to us, and prepare what is compiled; collective.

    Raises:
        DynamicCPError: one that was asked for cannot be had, or ranks differ in what is installed; on every rank.
    """
    wanted = {name: getattr(args, name) for name in ("gradient_accumulation_fusion", "bias_dropout_fusion")}
    wanted["activation"] = getattr(args, activation_flag(args))

    def on_this_rank() -> tuple[Fusions, dict[str, bool]]:
        return _decide(args, wanted, device)

    fusions, decided = agree(
        on_this_rank,
        lambda chosen: hashlib.sha256(repr(chosen).encode()).hexdigest(),
        what="fused kernels (apex, Triton, TransformerEngine) that are installed",
        device=device,
    )
    args.gradient_accumulation_fusion = decided["gradient_accumulation_fusion"]
    args.bias_dropout_fusion = decided["bias_dropout_fusion"]
    args.bias_swiglu_fusion = args.swiglu and decided["activation"]
    args.bias_gelu_fusion = not args.swiglu and decided["activation"]
    if decided["activation"] or decided["bias_dropout_fusion"] or args.cross_entropy_fusion_impl == "native":
        compile_once.install()
    return fusions


def _decide(
    args: argparse.Namespace, wanted: dict[str, bool | None], device: torch.device
) -> tuple[Fusions, dict[str, bool]]:
    """Return what is fused and, by the names of `wanted`, whether it is."""
    flag = "--" + activation_flag(args).replace("_", "-")
    cannot_compile = why_not_compiled(device)
    reason_to_leave = _ON_CPU if device.type == "cpu" else ""
    no_bias = "--disable-bias-linear leaves no bias" if args.disable_bias_linear and not args.swiglu else ""
    rows = [
        ("gradient_accumulation_fusion", "weight gradients", "--gradient-accumulation-fusion", why_no_kernel()),
        ("activation", "SwiGLU" if args.swiglu else "GELU (in its form with tanh)", flag, no_bias or cannot_compile),
        ("bias_dropout_fusion", "dropout", "--bias-dropout-fusion", cannot_compile),
    ]
    decided: dict[str, bool] = {}
    on: list[str] = []
    off: list[tuple[str, str]] = []
    for key, name, flag, missing in rows:
        asked = wanted[key]
        if asked and missing:
            raise InvalidInputError(f"{flag} cannot be had: {missing}; install it or leave the flag out", flag=flag)
        if asked is False:
            reason = flag.replace("--", "--no-", 1)
        else:
            reason = missing if asked else reason_to_leave or missing
        decided[key] = not reason
        if reason:
            off.append((name, reason))
        else:
            on.append(name)
    if decided["gradient_accumulation_fusion"]:
        check_kernel(device, torch.bfloat16 if args.bf16 else torch.float32)
    if args.cross_entropy_loss_fusion:
        on.append(f"cross entropy ({args.cross_entropy_fusion_impl})")
        _check_cross_entropy(args.cross_entropy_fusion_impl, cannot_compile)
    else:
        off.append(("cross entropy", "no --cross-entropy-loss-fusion"))
    off.append(("RoPE", "its rotation of packed shards is this project's own"))
    return Fusions(on=tuple(on), off=tuple(off)), decided


def _check_cross_entropy(impl: str, cannot_compile: str) -> None:
    if impl == "native" and cannot_compile:
        raise InvalidInputError(f"--cross-entropy-loss-fusion cannot be had: {cannot_compile}; leave it out", impl=impl)
    if impl == "te" and language_module.te_parallel_cross_entropy is None:
        raise InvalidInputError(
            "--cross-entropy-fusion-impl te needs TransformerEngine's cross entropy, which megatron-core did not find: "
            "install TransformerEngine or take native",
            impl=impl,
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
    """Add one small product to a float32 buffer by apex's kernel and compare: apex may be built for another torch.

    Raises:
        InvalidInputError: it fails or gives something else.
    """
    inputs = (torch.arange(32 * 16, device=device) % 5).view(32, 16).to(dtype)
    grads = (torch.arange(32 * 8, device=device) % 3).view(32, 8).to(dtype)
    buffer = torch.ones(8, 16, device=device)
    expected = 1 + (grads.float().t() @ inputs.float())  # small whole numbers: exact
    remedy = "rebuild apex for this torch or give --no-gradient-accumulation-fusion"
    try:
        core_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, grads, buffer)
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:200]
        raise InvalidInputError(f"apex's {KERNEL} fails ({type(error).__name__}: {said}): {remedy}") from error
    if not torch.equal(buffer, expected):
        difference = (buffer - expected).abs().max().item()
        raise InvalidInputError(
            f"apex's {KERNEL} is off by {difference} from a product of up to {expected.max().item()}: {remedy}",
            difference=difference,
        )
