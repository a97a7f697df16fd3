"""Indexing tasks on several processes or threads, results in the order of the tasks.

Parsing JSON holds Python's lock, so it runs in processes. They are started fresh, not forked: this process has threads
of torch, maybe a CUDA context, and connections to other ranks, which a forked child would keep open after this rank is
dead. A worker ends with its pipe, no matter how its parent ends. Looking into many files waits for the file system, so
that runs in threads.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dynamic_cp.errors import DataError

logger = logging.getLogger(__name__)

MAX_PROCESSES = 32
NUM_THREADS = 16
START = "import sys; sys.path[:0] = sys.argv[1:]; from megatron.trainer.data.scan import serve; serve()"


def num_usable_cpus() -> int:
    """Return the CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], num_processes: int, *, packages: bool = False
) -> Generator[Any, None, None]:
    """Yield function(*task) for each task; with one process, in this one. Close it: then the processes end.

    Args:
        packages: the processes find installed packages, too, and start slower.

    Raises:
        OSError, ScanError: of `function`.
        DataError: a worker that died.
    """
    workers = _start_workers(num_processes, packages) if num_processes > 1 else []
    if not workers:
        for task in tasks:
            yield function(*task)
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(task: tuple[Any, ...]) -> Any:
        worker = idle.get()
        try:
            return worker.call(function, task)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(len(workers), thread_name_prefix="indexing")
    try:
        yield from threads.map(run, tasks)
    finally:
        for worker in workers:
            worker.process.kill()  # at the end they have nothing to do; after an error what they do is not needed
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


def map_in_threads(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], num_threads: int = NUM_THREADS
) -> Generator[Any, None, None]:
    """Yield function(*task) for each task; a single task in this thread."""
    if len(tasks) <= 1:
        for task in tasks:
            yield function(*task)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="indexing") as threads:
        try:
            yield from threads.map(lambda task: function(*task), tasks)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _start_workers(number: int, packages: bool) -> list[_Worker]:
    """Return as many workers as the system lets start."""
    workers: list[_Worker] = []
    try:
        for _ in range(number):
            workers.append(_Worker(packages))
    except OSError as error:
        logger.warning("%d of %d processes for indexing could be started: %s", len(workers), number, error)
    return workers


class _Worker:
    def __init__(self, packages: bool) -> None:
        root = str(Path(__file__).resolve().parents[3])
        # Without site packages where the standard library is enough: that starts sooner.
        paths = [root, *filter(None, sys.path)] if packages else [root]
        self.process = subprocess.Popen(
            [sys.executable, "-I", *([] if packages else ["-S"]), "-c", START, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump((function, task), self.process.stdin)
            self.process.stdin.flush()
            succeeded, value = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = self.process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise DataError(
                f"a process that indexed {task[0]} ended with {how}: look for its last words above "
                "(SIGKILL often means that the machine is out of memory)"
            ) from error
        if not succeeded:
            raise value
        return value

    def close(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):  # of words that the dead worker never read
                pipe.close()
