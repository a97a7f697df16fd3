"""Device, process groups and seeds."""

from __future__ import annotations

import io
import logging
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dynamic_cp.errors import DynamicCPError, InvalidInputError
from megatron.dynamic_cp.agreement import verify
from megatron.dynamic_cp.repairs import cpu_backend, patches
from megatron.trainer.flags import environment
from megatron.trainer.flags.environment import check_rendezvous, environment_number
from megatron.trainer.flags.settings import Settings


def choose_backend(requested: str | None, *, num_devices: int, built_for_device: bool) -> str:
    """Return "nccl" or "gloo" (CPU ranks). InvalidInputError if devices are missing, because training never falls back
    to the CPU by itself.

    Args:
        requested: --distributed-backend.
        num_devices: CUDA devices that torch sees.
        built_for_device: whether this torch can use CUDA at all.
    """
    if requested == "gloo" or (requested is None and not built_for_device):
        return "gloo"
    if num_devices == 0:
        raise InvalidInputError(
            f"--distributed-backend {requested or 'nccl'} needs CUDA devices, torch {torch.__version__} sees 0: "
            "repair the driver, or train on CPU ranks with --distributed-backend gloo"
        )
    return "nccl"


def device_of(local_rank: int, *, num_devices: int) -> torch.device:
    """Return the CUDA device of rank `local_rank` of this node. InvalidInputError if there is none: only such ranks
    raise it, before they join the job, and the launcher ends the others."""
    if local_rank >= num_devices:
        raise InvalidInputError(
            f"rank {local_rank} of this node has no GPU, torch sees {num_devices} here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): start at most {num_devices} "
            "ranks a node (--nproc-per-node, --ntasks-per-node), or let each see its GPU"
        )
    return torch.device("cuda", local_rank)


def initialize(settings: Settings) -> torch.device:
    """Set up device, process groups of the job and of megatron-core, and seeds; return this rank's device. An existing
    default process group (of a host application or a test) is used as it is."""
    planning, topology = settings.planning, settings.planning.topology
    built_for_device = torch.version.cuda is not None or torch.version.hip is not None
    backend = choose_backend(
        settings.parallel.distributed_backend, num_devices=torch.cuda.device_count(), built_for_device=built_for_device
    )
    if backend == "gloo":
        cpu_backend.enable()
        # Ranks of one machine share its cores; with several threads each they would wait for one another.
        torch.set_num_threads(environment_number("OMP_NUM_THREADS", 1))
        device = torch.device("cpu")
    else:
        check_device_queues(topology.tp_size, planning.largest_cp_size)
        device = device_of(environment_number("LOCAL_RANK", 0), num_devices=torch.cuda.device_count())
        torch.cuda.set_device(device)
        choose_precision(bf16=settings.model.bf16)
    patches.repair_optimizer_checkpoint()
    timeout = timedelta(seconds=planning.exchange_timeout_s)
    if not dist.is_initialized():
        join(backend, topology.world_size, timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp_size,
        pipeline_model_parallel_size=topology.pp_size,
        virtual_pipeline_model_parallel_size=topology.vp_size if topology.vp_size > 1 else None,
        expert_model_parallel_size=topology.ep_size,
        expert_tensor_parallel_size=1,
        context_parallel_size=1,  # lanes are data-parallel ranks; each micro-batch has its own CP group
        distributed_timeout_minutes=max(1, round(planning.exchange_timeout_s / 60)),
    )
    seed(settings.training.seed)
    return device


def join(backend: str, world_size: int, timeout: timedelta) -> None:
    """Meet the other ranks of the job where the launcher says. InvalidInputError if its variables are incomplete or (on
    rank 0) the port is taken, DynamicCPError if rank 0 or others do not come in time."""
    rank, address, port = check_rendezvous(world_size)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise InvalidInputError(
                f"port {port} (MASTER_PORT) on rank 0's host {address} is in use by another program: end the job that "
                "has it, or choose a free one (torchrun --standalone, or --master-port)"
            ) from error
        raise DynamicCPError(
            f"rank {rank} of {world_size} did not meet the others at {address}:{port} (MASTER_ADDR, MASTER_PORT) "
            f"within {timeout.total_seconds():g} s ({verify.words_of(error)}): were all ranks started, is rank 0 "
            "there, and no other program at that port? If ranks start late, raise --distributed-timeout-minutes"
        ) from error


def choose_precision(*, bf16: bool) -> None:
    """Multiply float32 matrices without TF32 if the run's precision is float32, whatever the environment says."""
    if not bf16:
        torch.backends.cuda.matmul.allow_tf32 = False


def check_device_queues(tp_size: int, max_cp_size: int) -> None:
    """Raise InvalidInputError if CUDA_DEVICE_MAX_CONNECTIONS is not 1 although TP or CP is used. Transfers could then
    start after the kernels that they should overlap with. Megatron-LM requires it for a static CP size above 1; here
    the largest CP size of a micro-batch decides."""
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if max(tp_size, max_cp_size) > 1 and value != "1":
        raise InvalidInputError(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {value}, 1 is needed with TP {tp_size} and CP sizes up to {max_cp_size}: "
            "export CUDA_DEVICE_MAX_CONNECTIONS=1"
        )


def seed(base: int, lane: int = 0) -> None:
    """Seed all generators: differently per pipeline stage, and per tensor-parallel rank as megatron-core wants it.
    `lane` is 0 while weights are made, which all lanes share; later it gives each lane its own dropout."""
    value = base + 100 * parallel_state.get_pipeline_model_parallel_rank() + 10_000 * lane
    torch.manual_seed(value)
    tensor_parallel.model_parallel_cuda_manual_seed(value, force_reset_rng=True)


def set_up_logging() -> None:
    """Send log records to stdout: all of rank 0, warnings of the others."""
    rank = dist.get_rank()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr: file names may not be valid text
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(environment.is_for_users)
    # megatron-core logs every setting at INFO.
    for name in ("megatron.core", "torch"):
        logging.getLogger(name).setLevel(logging.WARNING)


def shut_down() -> None:
    dist.barrier()
    dist.destroy_process_group()
