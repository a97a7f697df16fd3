"""Runs tasks of indexing in processes or threads, yields their results in order, and shows progress.

Parsing and tokenizing hold Python's lock, so they run in processes. These are not forked: a forked child would inherit
torch's threads, maybe a CUDA context, and connections to other ranks, which it would keep open after this rank's death.
A worker ends with its pipe, however its parent ends. Looking up many files waits for the file system, so that runs in
threads.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from dynamic_cp.errors import DataError, DynamicCPError

logger = logging.getLogger(__name__)

MAX_PROCESSES = 32
NUM_THREADS = 16
TASKS_PER_PROCESS = 2
START = "import sys; sys.path[:0] = sys.argv[1:]; from megatron.trainer.data.workers import serve; serve()"
BAR_AFTER_S = 1.0
LINE_EVERY_S = 5.0
TICK_EVERY_S = 0.5
WIDTH = 30  # of the text before a bar


def num_usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(
    function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], num_processes: int
) -> Generator[Any, None, None]:
    """Yield function(*task) for each task; one process means this one. Close the generator to end the processes.

    Only few tasks are taken in advance, so that neither they nor their results fill the memory. Raises OSErrors and
    DynamicCPErrors of `function`, and DataError if a worker died.
    """
    workers = _start_workers(num_processes) if num_processes > 1 else []
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
    waiting: deque[Any] = deque()
    try:
        for task in tasks:
            waiting.append(threads.submit(run, task))
            if len(waiting) >= TASKS_PER_PROCESS * len(workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for worker in workers:
            worker.process.kill()  # at the end they are idle; after an error their work is not needed
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


def map_in_threads(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Generator[Any, None, None]:
    """Yield function(*task) for each task; a single task runs in this thread."""
    if len(tasks) <= 1:
        for task in tasks:
            yield function(*task)
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="indexing") as threads:
        try:
            yield from threads.map(lambda task: function(*task), tasks)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _start_workers(number: int) -> list[_Worker]:
    """Return up to `number` workers, as many as the system can start."""
    workers: list[_Worker] = []
    try:
        for _ in range(number):
            workers.append(_Worker())
    except OSError as error:
        logger.warning("%d of %d processes for indexing could be started: %s", len(workers), number, error)
    return workers


class _Worker:
    def __init__(self) -> None:
        paths = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
            with suppress(OSError):  # a dead worker never read what is buffered
                pipe.close()


def serve() -> None:
    """Run tasks from stdin until it ends: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    tasks, results = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            function, task = pickle.load(tasks)
        except EOFError:
            return
        try:
            result = (True, function(*task))
        except (OSError, DynamicCPError) as error:
            result = (False, error)
        try:
            pickle.dump(result, results)
            results.flush()
        except BrokenPipeError:
            os._exit(0)  # the parent has ended


class Progress:
    """Reports progress on a terminal or in the log; a context manager.

    The line begins with `what`; `total` is the amount in `unit`, "bytes" or the plural of what is counted. `on_tick` is
    called about twice a second while there is progress.
    """

    def __init__(self, what: str, total: int, unit: str, on_tick: Callable[[], None] | None = None) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._on_tick = on_tick
        self._done = 0
        self._started_s = self._line_s = self._tick_s = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: int) -> None:
        self._done += amount
        now_s = time.monotonic()
        if now_s - self._tick_s < TICK_EVERY_S:
            return
        self._tick_s = now_s
        if self._on_tick is not None:
            self._on_tick()
        if sys.stderr.isatty():
            self._show_bar(now_s)
        elif now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            share = self._done / max(1, self._total)
            logger.info(
                "%s: %.0f %% of %d %s, %.0f s to go",
                self._what,
                100 * share,
                self._total,
                self._unit,
                (now_s - self._started_s) * (1 - share) / share if share else 0,
            )

    def _show_bar(self, now_s: float) -> None:
        if self._bar is None:
            if now_s - self._started_s < BAR_AFTER_S:
                return
            self._bar = _make_bar(self._unit == "bytes")
            what = self._what if len(self._what) <= WIDTH else "…" + self._what[-WIDTH:]
            self._bar.add_task(what, total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done, refresh=True)


def _make_bar(counts_bytes: bool) -> Any:
    from rich import progress  # late, because short tasks show no bar and need no rich
    from rich.console import Console

    amounts = (
        [progress.DownloadColumn(), progress.TransferSpeedColumn()] if counts_bytes else [progress.MofNCompleteColumn()]
    )
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *amounts,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # no thread, because the process may fork
    )
