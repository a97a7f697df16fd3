"""Chains of transfers that go on beside what is computed: once the first one is there, the second one begins.

Between them something is copied or added up, which nobody but this rank can do. On CPU ranks a thread does it, for all
chains of the process, in their order. It is a daemon: a process that ends does not wait for it. On a GPU the whole
chain is queued at once on a stream of its own, where waiting for NCCL holds up that stream alone.

Ranks begin their chains at the same steps of a tick. A chain waits for messages that others send at its step, outside
chains or in theirs, and for the chains before it; so the earliest one of all ranks never waits for a later one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch

Work = Callable[[], Any]
"""Waits for a transfer and begins the next one. Returns what the device may still read or write when it returns."""


class Chain(Protocol):
    """A chain that has begun."""

    def wait(self) -> None:
        """Wait until its second transfer has begun; raise what kept it from that."""


def begin(work: Work, device: torch.device) -> Chain:
    """Begin a chain behind those before it, and behind what this thread has queued on `device` so far."""
    if device.type == "cuda":
        return _OnStream(work, _stream_of(device))
    chain = _InThread(work)
    _thread().put(chain)
    return chain


class _InThread:
    """A chain on a CPU rank."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def run(self) -> None:
        """Do the work; an error is kept for who waits."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # which has the buffers of a layer
        self._is_done.set()

    def wait(self) -> None:
        """See Chain.wait."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class _OnStream:
    """A chain on a GPU.

    What its work returns was made on another stream, whose allocator must not have the memory back before that stream
    has waited for this one. What is made here goes back to this stream, whose next chain waits for all that was queued
    elsewhere before it uses it again.
    """

    def __init__(self, work: Work, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._kept = work()
        self._end = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        """See Chain.wait; it is the current stream that waits."""
        torch.cuda.current_stream(self._device).wait_event(self._end)
        self._kept = None


_threads: list[SimpleQueue[_InThread]] = []
_streams: dict[torch.device, torch.cuda.Stream] = {}


def _thread() -> SimpleQueue[_InThread]:
    """Return what the thread of this process takes its chains from."""
    if not _threads:
        _threads.append(SimpleQueue())
        threading.Thread(target=_run, args=(_threads[0],), name="chains of transfers", daemon=True).start()
    return _threads[0]


def _run(chains: SimpleQueue[_InThread]) -> None:
    with torch.no_grad():  # a thread has its own mode
        while True:
            chains.get().run()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


# A forked process has no thread but the one that forked.
os.register_at_fork(after_in_child=_threads.clear)
