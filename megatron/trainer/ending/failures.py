"""Turns errors of the device or the network into errors that say where, with how many tokens, and what to change.

The rank that sees one ends with exit code 2 (`exits`). Its launcher then ends the others, which wait for it in a
collective. Nothing is exchanged before, because the device has no memory for it or the network is gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import torch

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.agreement import phase, verify
from megatron.dynamic_cp.attention.mechanisms.transfers import ExchangeError
from megatron.trainer.ending import exits

# Share of --distributed-timeout-minutes after which a stalled rank reports it, before NCCL's watchdog ends the process.
# The watchdog knows the group but not the iteration.
REPORTED_AFTER = 0.8
_NO_MEMORY = "out of memory"


class OutOfDeviceMemoryError(DynamicCPError):
    """A micro-batch, or what is built at start-up, did not fit into the device's memory."""


class LostCollectiveError(DynamicCPError):
    """A transfer between ranks failed or timed out."""


@contextlib.contextmanager
def explained(timeout_minutes: float) -> Iterator[None]:
    """Raise errors of the device or the network as DynamicCPErrors; a RuntimeError that names no lost peer is a bug and
    stays. `timeout_minutes`: --distributed-timeout-minutes. Raises OutOfDeviceMemoryError: for torch's, and for NCCL's
    if the device has no memory for its buffers. Raises LostCollectiveError: for torch's, gloo's, and that of a failed
    exchange in a CP group."""
    in_words = partial(_in_words, timeout_minutes=timeout_minutes)
    with _reporting_stalls(60 * timeout_minutes), exits.explaining(in_words):
        try:
            yield
        except Exception as error:
            told = in_words(error)
            if told is error:
                raise
            raise told from error


def _in_words(error: BaseException, timeout_minutes: float) -> BaseException:
    is_of_network = isinstance(error, ExchangeError) or verify.is_lost_peer(error)
    if isinstance(error, torch.OutOfMemoryError) or (is_of_network and _NO_MEMORY in str(error)):
        return out_of_memory(error, phase.token_limit())
    return lost_collective(error, timeout_minutes) if is_of_network else error


def out_of_memory(error: BaseException, token_limit: int | None) -> OutOfDeviceMemoryError:
    """Return the error of a rank whose device has no memory left; `token_limit` is None before it is known."""
    running = phase.micro_batch()
    first, *rest = str(error).splitlines()
    what = ". ".join(first.split(". ")[:2]).rstrip(".")
    if _NO_MEMORY not in what:  # NCCL says so in its last line
        what = ": ".join([what, *(line for line in rest if _NO_MEMORY in line)][:2])
    if running is None:
        return OutOfDeviceMemoryError(
            f"{phase.current()}: {what}; use more ranks for the model (--tensor-model-parallel-size, "
            "--pipeline-model-parallel-size), or --use-distributed-optimizer"
        )
    return OutOfDeviceMemoryError(
        f"{phase.current()}, at or after {running.label}, with {running.num_tokens} tokens on this rank: {what}; lower "
        f"--max-seqlen-per-dp-cp-rank, which is {token_limit}, or recompute activations (--recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1)",
        label=running.label,
        num_tokens=running.num_tokens,
        token_limit=token_limit,
    )


def lost_collective(error: BaseException, timeout_minutes: float) -> LostCollectiveError:
    """Return the error of a rank whose exchange failed. Messages of NCCL and of our exchanges name the group."""
    running = phase.micro_batch()
    where = phase.current() + ("" if running is None else f", at or after {running.label}")
    what = verify.words_of(error)
    return LostCollectiveError(
        f"{where}: rank {os.environ.get('RANK', '0')}: {what}; another rank has probably ended, see the logs of all; "
        f"if one was only slow, raise --distributed-timeout-minutes, which is {timeout_minutes:g}; resume from the "
        "last checkpoint"
    )


@contextlib.contextmanager
def _reporting_stalls(timeout_s: float) -> Iterator[None]:
    """Report on stderr, once per place, that this rank has stalled."""
    done = threading.Event()
    began_s = time.monotonic()

    def seconds() -> float:
        """Return the seconds of this rank in its phase, without what the process did before this run."""
        return min(phase.seconds(), time.monotonic() - began_s)

    def watch() -> None:
        limit_s = REPORTED_AFTER * timeout_s
        while not done.wait(max(0.05, limit_s - seconds())):
            waited_s = seconds()
            if waited_s < limit_s:
                continue
            running = phase.micro_batch()
            where = phase.current() + ("" if running is None else f", at or after {running.label}")
            print(
                f"rank {os.environ.get('RANK', '0')} has been in {where} for {waited_s:.0f} s: does it wait for a rank "
                f"that has ended? Exchanges time out after {timeout_s:.0f} s (--distributed-timeout-minutes)",
                file=sys.stderr,
                flush=True,
            )
            while seconds() >= waited_s and not done.wait(0.1 * limit_s):
                pass

    threading.Thread(target=watch, name="dynamic-cp-stalls", daemon=True).start()
    try:
        yield
    finally:
        done.set()
