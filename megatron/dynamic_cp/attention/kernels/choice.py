"""Chooses the attention kernel by device, dtype and head width, logs the reason, and checks the kernel at start-up.

    cpu       torch's flash kernel for CPUs, a call per sequence
    flash     FlashAttention-2 as torch ships it, a call per pack: bfloat16 on A100, H100 and newer
    cudnn     cuDNN's fused attention through torch, a call per pack: bfloat16 on Hopper, torch 2.14
    portable  matrix products block by block, a call per sequence: anything; float32 on CUDA
    triton    Triton programs of our own, three launches per pack: packs whose rows see ranges of keys, on CUDA

All return the log-sum-exp with the output; backward takes the final ones of each row (FlashAttention-2, arXiv
2307.08691, algorithm 2). The check compares a kernel with the portable one: torch's flash and cuDNN operators are
private and have changed layouts, and a wrong log-sum-exp or an unwritten gradient trains without an error.
Shapes: T tokens (rows or columns), H heads, D channels of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import CAUSAL, Lambda
from megatron.dynamic_cp.attention.kernels import cpu as kernels_cpu
from megatron.dynamic_cp.attention.kernels import cudnn as kernels_cudnn
from megatron.dynamic_cp.attention.kernels import flash as kernels_flash
from megatron.dynamic_cp.attention.kernels import portable as kernels_portable
from megatron.dynamic_cp.attention.kernels import ranged as kernels_ranged
from megatron.dynamic_cp.attention.packs import Pack
from megatron.dynamic_cp.repairs.releases import each_named

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Tensor, Pack, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Pack, float], tuple[Tensor, Tensor, Tensor]]
# Values of --attention-backend, as in Megatron-LM.
BACKENDS = ("auto", "flash", "fused", "unfused")
# bfloat16 rounds outputs and gradients to 3 digits: errors of 0.2 to 0.6 % of their norm.
TOLERANCE = 0.02
# Local tokens of three sequences: the shortest in a ring, one beside a power of two, one of several blocks.
_SEQLENS = (2, 66, 522)
_WINDOW = Lambda(3, 100)
_NAMES = ("output", "log-sum-exp", "gradient of the queries", "gradient of the keys", "gradient of the values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Functions that compute a pack; q_THD, k_THD, v_THD and out_THD share a dtype, and kv heads divide heads.

    Attributes:
        forward: (q, k, v, pack, scale) -> (out_THD, lse_HT float32).
        backward: (grad, q, k, v, out, lse, pack, scale) -> (dq, dk, dv), with the rows' final `out` and `lse`.
        serves_ranges: whether rows of a pack may see ranges of keys.
    """

    name: str
    forward: Forward
    backward: Backward
    serves_ranges: bool = False


def _by_sequence(name: str, rectangle: ModuleType) -> Kernel:
    def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, pack: Pack, scale: float) -> tuple[Tensor, Tensor]:
        how = {"causal": pack.causal, "scale": scale}
        seen_keys = pack.seen_keys(rectangle.BLOCK_ROWS)
        if len(seen_keys) == 1:
            return rectangle.forward(q_THD, k_THD, v_THD, **how, seen=seen_keys[0])  # type: ignore[no-any-return]
        out_THD = torch.empty_like(q_THD)
        lse_HT = q_THD.new_empty((q_THD.shape[1], len(q_THD)), dtype=torch.float32)
        for (rows, columns), seen in zip(pack.slices(), seen_keys, strict=True):
            out_THD[rows], lse_HT[:, rows] = rectangle.forward(
                q_THD[rows], k_THD[columns], v_THD[columns], **how, seen=seen
            )
        return out_THD, lse_HT

    def backward(
        grad_THD: Tensor,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        pack: Pack,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        how = {"causal": pack.causal, "scale": scale}
        seen_keys = pack.seen_keys(rectangle.BLOCK_ROWS)
        if len(seen_keys) == 1:
            found = rectangle.backward(grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, **how, seen=seen_keys[0])
            return found  # type: ignore[no-any-return]
        dq, dk, dv = (torch.empty_like(x) for x in (q_THD, k_THD, v_THD))
        for (rows, columns), seen in zip(pack.slices(), seen_keys, strict=True):
            dq[rows], dk[columns], dv[columns] = rectangle.backward(
                grad_THD[rows],
                q_THD[rows],
                k_THD[columns],
                v_THD[columns],
                out_THD[rows],
                lse_HT[:, rows],
                **how,
                seen=seen,
            )
        return dq, dk, dv

    return Kernel(name=name, forward=forward, backward=backward, serves_ranges=True)


CPU = _by_sequence("cpu", kernels_cpu)
PORTABLE = _by_sequence("portable", kernels_portable)
FLASH = Kernel(name="flash", forward=kernels_flash.forward, backward=kernels_flash.backward)
CUDNN = Kernel(name="cudnn", forward=kernels_cudnn.forward, backward=kernels_cudnn.backward)
TRITON = Kernel(name="triton", forward=kernels_ranged.forward, backward=kernels_ranged.backward, serves_ranges=True)
KERNELS = {kernel.name: kernel for kernel in (CPU, FLASH, CUDNN, PORTABLE, TRITON)}


@lru_cache
def choose_kernel(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the kernel for such tensors and log why, once; `backend` is one of BACKENDS. Raises
    UnsupportedFeatureError: it cannot compute them here, or `auto` finds no fast kernel."""
    kernel, reason = _choice(backend, device, dtype, head_dim)
    logger.info("attention kernel %s: %s", kernel.name, reason)
    return kernel


def kernel_for(q_THD: Tensor, backend: str = "auto") -> Kernel:
    """Return `choose_kernel` for tensors like `q_THD`."""
    return choose_kernel(backend, q_THD.device, q_THD.dtype, q_THD.shape[-1])


def kernel_of(pack: Pack, kernel: Kernel, q_THD: Tensor) -> Kernel:
    """Return the kernel for `pack`: the run's `kernel`, unless it cannot serve the pack's ranges of keys."""
    if pack.key_ranges is None or kernel.serves_ranges:
        return kernel
    return ranged_kernel(q_THD.device, q_THD.dtype, q_THD.shape[-1])


@lru_cache
def ranged_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the kernel for packs with ranges of keys where the run's kernel knows none; log it, once."""
    obstacle = kernels_ranged.why_not(device, dtype, head_dim)
    if obstacle is None:
        logger.info("attention kernel %s: where tokens see ranges of keys", TRITON.name)
        return TRITON
    logger.warning(
        "attention kernel %s, several times slower, where tokens see ranges of keys: %s %s",
        PORTABLE.name,
        TRITON.name,
        obstacle,
    )
    return PORTABLE


def _choice(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Kernel, str]:
    if backend not in BACKENDS:
        raise _unsupported(f"is not one of {', '.join(BACKENDS)}", backend)
    if device.type == "cuda" and kernels_ranged.is_interpreted():
        raise UnsupportedFeatureError(
            "TRITON_INTERPRET is set: Triton would run its programs in Python on the host, which only tests want: "
            "unset it to train"
        )
    if backend == "unfused":
        return PORTABLE, "--attention-backend unfused"
    if backend == "auto":
        if device.type == "cpu":
            return CPU, "on the CPU"
        if dtype == torch.float32:
            return PORTABLE, "torch has no kernel for float32 that returns log-sum-exp; --bf16 is many times faster"
        obstacle = kernels_flash.why_not(device, dtype, head_dim)
        if obstacle is None:
            return FLASH, f"{dtype} on {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
        raise _unsupported(
            f"finds no fast kernel: flash {obstacle}. Train with TransformerEngine (--transformer-impl "
            "transformer_engine), or take the portable kernel, several times slower, with --attention-backend unfused",
            backend,
        )
    kernel, module = (FLASH, kernels_flash) if backend == "flash" else (CUDNN, kernels_cudnn)
    obstacle = module.why_not(device, dtype, head_dim)
    if obstacle is not None:
        raise _unsupported(
            f"cannot be used: {kernel.name} {obstacle}. Take --attention-backend auto or unfused", backend
        )
    return kernel, f"--attention-backend {backend}"


def _unsupported(what: str, backend: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"--attention-backend {backend} {what}")


def check_kernel(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int
) -> float:
    """Return the largest relative error of `kernel` over the three steps of a ring; waits for the device. A kernel that
    serves ranges of keys is also checked on a window with a sink; CPU and portable are not checked (0). Raises
    UnsupportedFeatureError: an error is above TOLERANCE."""
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
        found = each_named(f"attention kernel {kernel.name}", _results(kernel, inputs, pack))
        results = zip(_NAMES, found, _results(PORTABLE, inputs, pack), strict=True)
        # Results are computed one by one: backward never runs with a wrong log-sum-exp.
        for name, actual, expected in results:
            error = _error(actual, expected)
            if not error <= TOLERANCE:  # also if NaN
                raise UnsupportedFeatureError(
                    f"attention kernel {kernel.name} of torch {torch.__version__} is wrong on {_name(device)}: {name} "
                    f"of a pack {step} is off by {error:.3g} of its norm, {TOLERANCE} is allowed (heads "
                    f"{heads}/{kv_heads}, width {head_dim}): take another --attention-backend, or another torch"
                )
            worst = max(worst, error)
    return worst


def _results(kernel: Kernel, inputs: list[Tensor], pack: Pack) -> Iterator[Tensor]:
    """Yield what `_NAMES` lists. Backward gets a log-sum-exp over more keys than the pack's, as in a ring."""
    grad, query, key, value = inputs
    scale = query.shape[-1] ** -0.5
    out, lse = kernel.forward(query, key, value, pack, scale)
    yield out
    yield lse
    yield from kernel.backward(grad, query, key, value, out, lse + 0.5, pack, scale)


def _error(actual: Tensor, expected: Tensor) -> float:
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
