"""Packs the micro-batches of coming steps in worker processes, while the current one is computed.

    submit(step's plan) -> queue -> DataLoader worker: reads, pads, shards -> shared (or page-locked) memory -> take()

Workers are torch DataLoader workers over a data set that waits for plans, so shared memory, page-locking and a worker's
death are torch's to handle.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dynamic_cp.errors import DataError, DynamicCPError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.search.planner_process import die_with_parent
from megatron.dynamic_cp.data.micro_batches import PackedStep, ReadSample, pack_step
from megatron.dynamic_cp.measuring import span

_LOOK_UP_S = 0.5
_OF_BUS_ERROR = (
    "a bus error: a file that it has mapped (.bin, .idx or an index) became shorter under way, or /dev/shm is "
    "full; restart and leave the data and their index alone, or make room there"
)


class Packer:
    """Packs one lane's steps in the order of submission; most arguments are as of `pack_step`. With `num_workers` 0 it
    packs inside `take`. `pin_memory` returns page-locked memory, for copies to a GPU."""

    def __init__(
        self,
        read_sample: ReadSample | None,
        *,
        num_depths: int = 0,
        stage: int = 0,
        vp_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._pack = functools.partial(
            pack_step, read_sample=read_sample, num_depths=num_depths, stage=stage, vp_size=vp_size
        )
        self._plans: deque[LanePlan] = deque()
        self._pin_memory = pin_memory
        self._queues: list[Any] = []
        self._packed: Iterator[PackedStep | DynamicCPError] | None = None
        self._num_submitted = 0
        self._workers: set[multiprocessing.process.BaseProcess] = set()
        if num_workers > 0 and read_sample is not None:
            context = multiprocessing.get_context("fork")  # the index of the data is shared, not copied
            keep_what_forks_inherit()
            self._queues = [context.Queue() for _ in range(num_workers)]
            others = set(multiprocessing.active_children())
            with _own_child_signal():
                self._packed = iter(
                    DataLoader(
                        _Packing(self._queues, self._pack),
                        batch_size=None,
                        num_workers=num_workers,
                        multiprocessing_context=context,
                        pin_memory=pin_memory,
                        worker_init_fn=functools.partial(_prepare_worker, os.getpid()),
                        generator=torch.Generator(),  # else it would draw from the generator that dropout uses
                    )
                )
            self._workers = set(multiprocessing.active_children()) - others

    def submit(self, plan: LanePlan) -> None:
        """Queue the next step for packing, always from the same thread."""
        if self._packed is None:
            self._plans.append(plan)
        else:
            self._queues[self._num_submitted % len(self._queues)].put(plan)  # DataLoader asks its workers in turn
            self._num_submitted += 1

    def take(self) -> PackedStep:
        """Return the oldest step not yet taken. Raises DynamicCPError: a sample could not be read, or a worker died."""
        if self._packed is None:
            with span("packing"):
                packed = self._pack(self._plans.popleft())
            return packed.pin_memory() if self._pin_memory else packed
        try:
            self._raise_of_ended_workers()
            outcome = next(self._packed)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # DataLoader raises RuntimeError for a dead worker; the others come while a worker hands a pack over.
            what = error if isinstance(error, RuntimeError) else f"DataLoader worker ended as it sent a pack ({error})"
            remedy = (
                _OF_BUS_ERROR
                if any(worker.exitcode == -signal.SIGBUS for worker in self._workers)
                else "out of memory or killed? Lower --num-workers (0 reads inside the training process)"
            )
            raise DataError(f"{what}: {remedy}") from error
        if isinstance(outcome, DynamicCPError):
            raise outcome
        return outcome

    def _raise_of_ended_workers(self) -> None:
        """Raise if a worker has died, before DataLoader waits for its pack: it looks only every 5 s."""
        for worker in self._workers:
            if (code := worker.exitcode) is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"exited unexpectedly with code {code}"
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}")

    def close(self) -> None:
        """End the workers, even in the middle of work; what was submitted and not taken is dropped."""
        for plans in self._queues:
            plans.put(None)
        self._packed = None  # DataLoader's iterator ends its workers when it is freed
        for worker in self._workers:
            if worker.is_alive():  # in the middle of a read that does not end
                worker.kill()
        self._workers.clear()  # each holds two file descriptors
        for plans in self._queues:
            plans.cancel_join_thread()  # nobody reads the plans that are still in it
            plans.close()
        self._queues = []


class _Packing(IterableDataset):
    """What a worker does: wait for a plan, pack it."""

    def __init__(self, queues: list[Any], pack: Callable[[LanePlan], PackedStep]) -> None:
        self._queues = queues
        self._pack = pack
        self._parent = os.getpid()

    def __iter__(self) -> Iterator[PackedStep | DynamicCPError]:
        info = get_worker_info()
        assert info is not None, "only workers iterate"
        while (plan := self._next(self._queues[info.id])) is not None:
            try:
                outcome: PackedStep | DynamicCPError = self._pack(plan)
            except DynamicCPError as error:
                outcome = error
            except Exception as error:
                traceback.print_exc()
                outcome = DynamicCPError(f"{type(error).__name__}: {error}; the rank's log has the traceback")
            yield outcome

    def _next(self, plans: Any) -> LanePlan | None:
        while os.getppid() == self._parent:
            try:
                plan: LanePlan | None = plans.get(timeout=_LOOK_UP_S)
                return plan
            except queue.Empty:
                continue
        return None


@functools.cache
def keep_what_forks_inherit() -> None:
    """Exempt inherited objects from garbage collection in forked children: freeing a CUDA event would kill them."""
    os.register_at_fork(after_in_child=gc.freeze)


@contextlib.contextmanager
def _own_child_signal() -> Iterator[None]:
    """Undo DataLoader's SIGCHLD handler, which may raise inside a collective; `take` notices a dead worker anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def _prepare_worker(parent: int, _: int) -> None:
    """Ignore signals, which the rank handles after its step; die with the rank, whose connections a fork holds open."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
