"""CPU ranks (--distributed-backend gloo) for a checkout: repairs of what Megatron-LM's training code assumes about
CUDA. `megatron.dynamic_cp.repairs.cpu_backend` does the same for megatron-core."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.repairs import cpu_backend, patches, releases
from megatron.dynamic_cp.repairs.cpu_backend import Shim

SHIMS: tuple[Shim, ...] = (
    Shim(
        name="stream_context",
        reason="get_model wraps the model in DDP on a side stream",
        owner=torch.cuda,
        attribute="stream",
        replacement=lambda _stream: contextlib.nullcontext(),
    ),
)


def enable(timeout_minutes: float) -> None:
    """Install all shims and repairs and start the gloo job; Megatron-LM then finds it started."""
    cpu_backend.enable()
    patches.repair_optimizer_checkpoint()
    patches.repair_expert_routing()
    for shim in SHIMS:
        setattr(shim.owner, shim.attribute, shim.replacement)
    torch.set_num_threads(1)  # ranks of one machine share its cores
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(minutes=timeout_minutes))


def with_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` told that there is one device: only then does Megatron-LM build its groups and seeds."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        original = torch.cuda.device_count
        torch.cuda.device_count = lambda: 1
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.device_count = original

    return wrapped


def keep_random_states(loader: Any) -> None:
    """Give a DataLoader (and nothing else) a generator of its own, so that it draws no seed from the one of dropout.

    On a device these are two generators anyway. On CPU only TP rank 0 reads, so its dropout would differ from that of
    other TP ranks, and that of a resumed run from the first one's.
    """
    if isinstance(loader, DataLoader):
        loader.generator = torch.Generator()


def load_dataset_helpers() -> None:
    """Let the checkout's `megatron.core.datasets` use the compiled helpers of the installed megatron-core; raise
    InvalidInputError if neither has them. Megatron-LM would compile them into the checkout and look for CUDA's
    compiler."""
    name = "megatron.core.datasets.helpers_cpp"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    installed = next(
        (
            Path(str(file.locate()))
            for file in metadata.files("megatron-core") or ()
            if file.name.startswith("helpers_cpp") and file.suffix == ".so"
        ),
        None,
    )
    if installed is None:
        raise InvalidInputError(
            "the compiled helpers_cpp of megatron.core.datasets is neither in the checkout nor in an installed "
            f"megatron-core: pip install megatron-core=={releases.newest().version}, or run make in "
            "megatron/core/datasets"
        )
    spec = importlib.util.spec_from_file_location(name, installed)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
