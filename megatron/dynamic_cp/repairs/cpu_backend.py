"""Runs megatron-core on CPU ranks (gloo): one shim for each place where its training path assumes CUDA.

Call `enable()` once per process, before anything of megatron-core is *built* (importing needs no shim). `SHIMS` is the
whole list, each with its reason; tests/distributed/test_cpu_backend.py shows what fails without it.

Costs 3.3 us per torch call. The function mode is thread-local: threads started later must not touch torch devices.
torch suspends it inside `backward()`, where nothing needs its rules; the replaced functions apply everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from dynamic_cp.errors import InvalidInputError

_CUDA_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "BFloat16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shim:
    """One replacement. `owner.attribute` is set to `replacement`; `owner` None = a rule of the function mode."""

    name: str
    reason: str
    owner: Any = None
    attribute: str = ""
    replacement: Callable[..., Any] | None = None


class _Stream:
    """The one stream of a CPU rank, on which all work is done at once; also the event that it records."""

    def wait_stream(self, stream: _Stream) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _Stream:
        """Return an event, which is over."""
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _cpu_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(new_state)


SHIMS: tuple[Shim, ...] = (
    Shim(name="device_keyword", reason='schedules, optimizer and gradient clipping create scalars with device="cuda"'),
    Shim(
        name="tensor_type_name",
        reason='the optimizers compare Tensor.type() with "torch.cuda.FloatTensor" and its 16-bit kin',
    ),
    Shim(name="tensor_cuda_method", reason="tied embeddings across pipeline stages call Tensor.cuda()"),
    Shim(
        name="current_device",
        reason="DDP buffers, pipeline receive buffers and RoPE allocate on torch.cuda.current_device()",
        owner=torch.cuda,
        attribute="current_device",
        replacement=lambda: torch.device("cpu"),
    ),
    Shim(
        name="synchronize",
        reason="pipeline P2P synchronizes the device after its shape exchange",
        owner=torch.cuda,
        attribute="synchronize",
        replacement=lambda device=None: None,
    ),
    Shim(
        name="current_stream",
        reason="the dispatcher of experts compares it with a stream of its own; from 0.19 on gradients wait for it",
        owner=torch.cuda,
        attribute="current_stream",
        replacement=lambda device=None: _Stream(),
    ),
    Shim(
        name="new_stream",
        reason="the dispatcher of experts copies the sizes of what it sends on a stream of its own; Megatron-LM wraps "
        "models on one",
        owner=torch.cuda,
        attribute="Stream",
        replacement=_Stream,
    ),
    Shim(
        name="split_sizes",
        reason="the dispatcher of experts makes sizes lists only where they come from a device; gloo takes no tensors",
        owner=token_dispatcher,
        attribute="maybe_move_tensor_to_cpu",
        replacement=_split_sizes,
    ),
    Shim(
        name="get_rng_state",
        reason="model_parallel_cuda_manual_seed stores the device generator's state",
        owner=torch.cuda,
        attribute="get_rng_state",
        replacement=_cpu_rng_state,
    ),
    Shim(
        name="manual_seed",
        reason="the RNG tracker seeds the device generator; without a device the seed is queued forever",
        owner=torch.cuda,
        attribute="manual_seed",
        replacement=torch.manual_seed,
    ),
    Shim(
        name="tracker_get_rng_state",
        reason="the RNG tracker and activation recomputation read the device generator",
        owner=megatron_random,
        attribute="_get_cuda_rng_state",
        replacement=_cpu_rng_state,
    ),
    Shim(
        name="tracker_set_rng_state",
        reason="... and write it; without a device that is queued too, and all regions share one random sequence",
        owner=megatron_random,
        attribute="_set_cuda_rng_state",
        replacement=_set_cpu_rng_state,
    ),
)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaToCpu(TorchFunctionMode):
    """Answers the three questions about CUDA that are asked of tensors, not of modules."""

    def __init__(self, rules: frozenset[str]) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda and "tensor_cuda_method" in self._rules:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and "tensor_type_name" in self._rules:
            name = func(*args)
            return _CUDA_TYPE_NAMES.get(name, name)
        if _is_cuda(kwargs.get("device")) and "device_keyword" in self._rules:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


_enabled_mode: _CudaToCpu | None = None


def _not_the_rng_warning(record: logging.LogRecord) -> bool:
    """The tracker warns when the CPU generator moves inside a fork; here that is the point."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def enable(without: Iterable[str] = ()) -> None:
    """Install every shim of `SHIMS` in this process, but for those named in `without`; a second call does nothing.
    Raises InvalidInputError: CUDA is available."""
    global _enabled_mode
    if _enabled_mode is not None:
        return
    if torch.cuda.is_available():
        raise InvalidInputError(
            f"CPU ranks were asked for, but torch sees {torch.cuda.device_count()} CUDA device(s): "
            "hide them (CUDA_VISIBLE_DEVICES=) or use --distributed-backend nccl"
        )
    left_out = frozenset(without)
    for shim in SHIMS:
        if shim.owner is not None and shim.name not in left_out:
            setattr(shim.owner, shim.attribute, shim.replacement)
    logging.getLogger(megatron_random.__name__).addFilter(_not_the_rng_warning)
    _enabled_mode = _CudaToCpu(frozenset(s.name for s in SHIMS if s.owner is None) - left_out)
    _enabled_mode.__enter__()
