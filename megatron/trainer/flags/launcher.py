"""What a launcher tells a rank through environment variables, checked before anything relies on it."""

from __future__ import annotations

import os
import socket

from dynamic_cp.errors import InvalidInputError

_OF_A_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_number(name: str, default: int, *, at_most: int | None = None) -> int:
    """Return the number in the environment variable `name`, `default` where it is not set.

    Raises:
        InvalidInputError: it holds something else.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or (at_most is not None and int(text) > at_most):
        limit = "" if at_most is None else f" up to {at_most}"
        raise InvalidInputError(
            f"the environment variable {name} is {text!r}, a number{limit} is needed: start the job with torchrun, or "
            "see what the job script sets it to"
        )
    return int(text)


def check_rendezvous(world_size: int) -> tuple[int, str, int]:
    """Return this rank, and address and port where the ranks meet; a single process needs no launcher.

    Raises:
        InvalidInputError: variables that torchrun sets are missing or contradict each other, or nothing resolves the
            address, which torch would try for minutes.
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
