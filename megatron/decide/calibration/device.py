"""The device that this process measures, and the other ranks."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.repairs import cpu_backend

_SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's device with its name for people, its rank, and the sizes of job and node."""

    device: torch.device
    name: str
    rank: int
    num_ranks: int
    ranks_per_node: int


def set_up(requested: str) -> Place:
    """Choose the device, join torchrun's ranks (or be a job of one) unless they have met already, and build
    megatron-core's groups. InvalidInputError if CUDA is asked for but missing, or ranks share a GPU.
    """
    built_for_device = torch.version.cuda is not None or torch.version.hip is not None
    num_devices = torch.cuda.device_count()
    if requested == "cuda" and num_devices == 0:
        raise InvalidInputError(
            f"--device cuda needs a GPU, torch {torch.__version__} sees 0: repair the driver, or use --device cpu"
        )
    if requested == "auto" and built_for_device and num_devices == 0:
        raise InvalidInputError(
            f"this torch ({torch.__version__}) is built for GPUs and sees 0: repair the driver, or measure the CPU "
            "with --device cpu"
        )
    on_gpu = requested != "cpu" and num_devices > 0
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        if local_rank >= num_devices:
            raise InvalidInputError(
                f"local rank {local_rank} has no GPU of its own, {num_devices} are there: "
                f"torchrun --local-addr localhost --nproc-per-node {num_devices}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        cpu_backend.enable()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        _join("nccl" if on_gpu else "gloo")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=1)
    torch.manual_seed(_SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED, force_reset_rng=True)
    num_ranks = dist.get_world_size()
    return Place(
        device=device,
        name=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        rank=dist.get_rank(),
        num_ranks=num_ranks,
        ranks_per_node=min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))),
    )


def cpu_name() -> str:
    name = platform.processor() or platform.machine() or "CPU"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux on x86: keep the general name
    return f"{name}, {num_cores()} cores"


def num_cores() -> int:
    """Return the cores that this process may use; the ranks of a node are assumed to share them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _join(backend: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
