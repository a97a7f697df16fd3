"""Ranks in network namespaces of their own: fast between ranks of a node, through a throttled "NIC" per rank beyond it.

Every rank has two virtual cables to a hub: `fast`, not throttled, for its own node, and `nic` (token bucket) for the
others. The hub forwards. Linux, root, iproute2 with tc; everything ends with the processes, nothing is left behind.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

_CLONE_NEWNET = 0x40000000
_HUB = "10.8.0.1"


class EmulationError(RuntimeError):
    """This machine does not let us emulate nodes; says why."""


def run(
    function: Callable[..., Any], num_ranks: int, ranks_per_node: int, rate: str, *args: Any, timeout_s: float
) -> list[Any]:
    """Return [function(rank, *args)] of forked processes, each in a namespace of its own.

    Args:
        rate: of each rank's NIC, in tc's words ("200mbit").

    Raises:
        EmulationError: a namespace, cable or throttle could not be made, or a rank did not answer.
    """
    _new_namespace()
    _ip("link set lo up", f"addr add {_HUB}/32 dev lo")
    with open("/proc/sys/net/ipv4/ip_forward", "w") as file:
        file.write("1")
    context = get_context("fork")
    processes, pipes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, function, rank, num_ranks, ranks_per_node, rate, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
            _answer(rank, pipe, 60)
            for cable in ("fast", "nic"):
                _ip(
                    f"link add {cable}{rank} type veth peer name {cable} netns {process.pid}",
                    f"link set {cable}{rank} up",
                )
            _ip(f"route add {_address(rank)}/32 dev fast{rank}")
            pipe.send("go")
        return [_answer(rank, pipe, timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def run_anyway(
    measure: Callable[..., Any], num_ranks: int, ranks_per_node: int, rate: str, *args: Any, timeout_s: float = 540
) -> tuple[list[Any], bool]:
    """Return [measure(rank, folder, *args, is_emulated)] of forked processes, and whether nodes were emulated. If they
    cannot be, a message says why, and links are not throttled. The ranks meet in the folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(measure, num_ranks, ranks_per_node, rate, folder, *args, True, timeout_s=timeout_s), True
        except EmulationError as error:
            print(f"nodes are not emulated: {error}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(num_ranks) as pool:
        waiting = [pool.apply_async(measure, (rank, folder, *args, False)) for rank in range(num_ranks)]
        return [one.get(timeout=timeout_s) for one in waiting], False


def sent_by_nic() -> int:
    """Return the bytes that left this rank's NIC so far, packet headers and acknowledgements included."""
    with open("/proc/thread-self/net/dev") as file:
        (line,) = [line for line in file if line.strip().startswith("nic:")]
    return int(line.split(":")[1].split()[8])


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    ranks_per_node: int,
    rate: str,
    args: tuple[Any, ...],
) -> None:
    try:
        _new_namespace()
        pipe.send((True, "ready"))
        pipe.recv()
        _ip(
            "link set lo up",
            f"addr add {_address(rank)}/32 dev fast",
            "link set fast up",
            "link set nic up",
            f"route add {_HUB}/32 dev fast",
        )
        _command(f"tc qdisc add dev nic root tbf rate {rate} burst 256kb latency 1s")
        for peer in set(range(num_ranks)) - {rank}:
            cable = "fast" if peer // ranks_per_node == rank // ranks_per_node else "nic"
            _ip(f"route add {_address(peer)}/32 via {_HUB} dev {cable} onlink")
        os.environ["GLOO_SOCKET_IFNAME"] = "fast"  # whose address peers connect to; routes choose the cable
        pipe.send((True, function(rank, *args)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
    finally:
        pipe.close()
        os._exit(0)


def _answer(rank: int, pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise EmulationError(f"rank {rank}: nothing after {timeout_s} s")
    try:
        succeeded, value = pipe.recv()
    except EOFError:
        raise EmulationError(f"rank {rank} died") from None
    if not succeeded:
        raise EmulationError(f"rank {rank}: {value}")
    return value


def _address(rank: int) -> str:
    return f"10.9.0.{rank + 1}"


def _new_namespace() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise EmulationError(f"no network namespace: {os.strerror(ctypes.get_errno())} (needs root on Linux)")


def _ip(*commands: str) -> None:
    for command in commands:
        _command(f"ip {command}")


def _command(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise EmulationError(f"{command}: {error}") from error
    if done.returncode:
        raise EmulationError(f"{command}: {done.stderr.strip()}")
