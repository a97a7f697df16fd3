"""Environment variables that a run on GPUs needs, set where the user has not: before torch and NCCL read them."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from megatron.dynamic_cp.flags.settings import PlanningSettings

ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The second one from torch 2.9, which warns of the first one."""
_GROWS = "expandable_segments:True"


def defaults(planning: PlanningSettings) -> dict[str, str]:
    """Return variable -> value that is set unless the user's environment has one; each one's reason is here."""
    return {
        # One queue per device, so that transfers start before the kernels they overlap with; megatron-core asks for it
        # only at a static CP size above 1.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Every micro-batch has another length: segments that grow keep the allocator's memory in one piece.
        **({} if any(name in os.environ for name in ALLOC_CONF) else {_allocator_variable(): _GROWS}),
        # NVLS reserves memory for each communicator; collectives of TP and gradients go without it, too.
        **({"NCCL_NVLS_ENABLE": "0"} if _has_many_groups(planning) else {}),
        # Data workers and writers of checkpoints are forked off ranks whose memory is registered for InfiniBand or EFA:
        # unless told so, their libraries let a fork (before Linux 5.12) take pages from under a transfer.
        "RDMAV_FORK_SAFE": "1",
        "FI_EFA_FORK_SAFE": "1",
    }


def set_defaults(planning: PlanningSettings) -> None:
    """Set what `defaults` has and the environment has not; before torch is imported.

    The way back is another value, which is kept, or an empty one: then the process has none. (libibverbs takes any
    value of RDMAV_FORK_SAFE for a yes.)
    """
    for name, value in defaults(planning).items():
        if not os.environ.setdefault(name, value):
            del os.environ[name]


def describe() -> str:
    """Return what the process has of these, whoever set it, as a line for the log, with advice about the allocator."""
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", *ALLOC_CONF, "NCCL_NVLS_ENABLE", "RDMAV_FORK_SAFE", "FI_EFA_FORK_SAFE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    advice = f"; {_GROWS} would keep the allocator's memory in one piece, as every micro-batch has its own length"
    is_advised = not any("expandable_segments" in found.get(name, "") for name in ALLOC_CONF)
    return "environment: " + ", ".join(f"{name}={value}" for name, value in found.items()) + advice * is_advised


def _allocator_variable() -> str:
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:  # its import will say so
        return ALLOC_CONF[1]
    return ALLOC_CONF[(int(major), int(minor)) >= (2, 9)]


def _has_many_groups(planning: PlanningSettings) -> bool:
    """Return whether a rank has CP groups of several sizes."""
    return planning.dynamic_cp and planning.largest_cp_size >= 2 * max(2, planning.min_cp_size)
