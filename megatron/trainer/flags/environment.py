"""Environment variables: a launcher's, and defaults for runs on GPUs, set before torch and NCCL read them once; and
which messages of megatron-core and torch are hidden, as they are about packages and settings not used here."""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from importlib.metadata import PackageNotFoundError, version

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp.flags.settings import PlanningSettings

_OF_A_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch 2.9 and later read the second one, and warn of the first."""
_GROWS = "expandable_segments:True"


def defaults(planning: PlanningSettings) -> dict[str, str]:
    """Return variable -> value to set unless the user's environment has one, each with its reason."""
    return {
        # One queue per device starts transfers before the kernels that they overlap with. megatron-core requires it
        # only for a static CP size above 1.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Micro-batches differ in length; growing segments keep the allocator's memory in one piece.
        **({} if any(name in os.environ for name in ALLOC_CONF) else {_allocator_variable(): _GROWS}),
        # NVLS reserves memory for each communicator; collectives of TP and gradients work without it.
        **({"NCCL_NVLS_ENABLE": "0"} if _has_many_groups(planning) else {}),
        # Data workers and checkpoint writers are forked off ranks whose memory is registered for InfiniBand or EFA.
        # Without these, a fork (before Linux 5.12) can take pages from under a transfer.
        "RDMAV_FORK_SAFE": "1",
        "FI_EFA_FORK_SAFE": "1",
    }


def set_defaults(planning: PlanningSettings) -> None:
    """Set the variables of `defaults` that the environment lacks, before torch is imported. The user's values are kept;
    an empty one unsets the variable (libibverbs takes any RDMAV_FORK_SAFE for a yes)."""
    for name, value in defaults(planning).items():
        if not os.environ.setdefault(name, value):
            del os.environ[name]


def describe() -> str:
    """Return a log line with the process's values of these variables, and advice about the allocator."""
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", *ALLOC_CONF, "NCCL_NVLS_ENABLE", "RDMAV_FORK_SAFE", "FI_EFA_FORK_SAFE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    advice = f"; {_GROWS} would keep the allocator's memory in one piece, as every micro-batch has its own length"
    is_advised = not any("expandable_segments" in found.get(name, "") for name in ALLOC_CONF)
    return "environment: " + ", ".join(f"{name}={value}" for name, value in found.items()) + advice * is_advised


def _allocator_variable() -> str:
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:  # its import will report it
        return ALLOC_CONF[1]
    return ALLOC_CONF[(int(major), int(minor)) >= (2, 9)]


def _has_many_groups(planning: PlanningSettings) -> bool:
    """Return whether a rank has CP groups of several sizes."""
    return planning.dynamic_cp and planning.largest_cp_size >= 2 * max(2, planning.min_cp_size)


def environment_number(name: str, default: int, *, at_most: int | None = None) -> int:
    """Return the number in the environment variable `name`, or `default`; InvalidInputError if it is not a number."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or (at_most is not None and int(text) > at_most):
        limit = "" if at_most is None else f" up to {at_most}"
        raise InvalidInputError(
            f"the environment variable {name} is {text!r}, a number{limit} is needed: start the job with torchrun, or "
            "see what the job script sets it to"
        )
    return int(text)


def check_rendezvous(world_size: int) -> tuple[int, str, int]:
    """Return this rank, and the address and port where ranks meet; a single process needs no launcher.

    InvalidInputError if torchrun's variables are missing or contradict each other, or the address cannot be resolved,
    for which torch would try for minutes.
    """
    if world_size == 1:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
    missing = [name for name in _OF_A_RENDEZVOUS if name not in os.environ]
    if missing:
        raise InvalidInputError(f"{', '.join(missing)} not set for {world_size} ranks: start the job with torchrun")
    rank = environment_number("RANK", 0)
    if rank >= world_size:
        raise InvalidInputError(
            f"RANK is {rank}, WORLD_SIZE {world_size}: ranks count from 0; start the job with torchrun, or see what "
            "the job script sets them to"
        )
    address, port = os.environ["MASTER_ADDR"], environment_number("MASTER_PORT", 0, at_most=65535)
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(
            f"MASTER_ADDR is {address!r}, which the host of rank {rank} ({socket.gethostname()}) does not resolve "
            f"({error}): start one node with torchrun --local-addr localhost, several with --master-addr, the address "
            "of rank 0's host"
        ) from error
    return rank, address, port


MESSAGES = (
    *("Apex", "Transformer Engine", "cuda_graph_scope", "is deprecated", "deprecating ShardedTensor"),
    *("GPTModel IS DEPRECATED", "MimoModelConfig is experimental"),
    *("argument order of load has been changed", "assuming the intent is to load in a single process"),
)
_MESSAGE = re.compile("|".join(MESSAGES))


def ignore_warnings() -> None:
    warnings.filterwarnings("ignore", message=f"(?s).*({_MESSAGE.pattern})")


def is_for_users(record: logging.LogRecord) -> bool:
    """Return whether users should see a record: it is ours, or no message of the list."""
    return record.name.startswith(("megatron.trainer", "megatron.dynamic_cp")) or not _MESSAGE.search(
        record.getMessage()
    )
