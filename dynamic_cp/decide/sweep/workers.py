"""Several processes that evaluate settings; they import nothing from the working folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.setting import Setting
from dynamic_cp.search.planner_process import die_with_parent

_Result = TypeVar("_Result")
_Function = Callable[[Setting, SweepJob], _Result]


class Run(Protocol):
    """Returns what a function gives of each setting, in order; `on_result` hears of each as soon as it is there."""

    def __call__(
        self, function: _Function[_Result], settings: Sequence[Setting], on_result: Callable[[Setting, _Result], None]
    ) -> list[_Result]: ...


@contextmanager
def workers(job: SweepJob, num_processes: int) -> Iterator[Run]:
    """Yield what calls functions of this package with a setting and `job`, here or in other processes."""
    if num_processes <= 1:

        def run_here(
            function: _Function[_Result], settings: Sequence[Setting], on_result: Callable[[Setting, _Result], None]
        ) -> list[_Result]:
            results = []
            for setting in settings:
                results.append(function(setting, job))
                on_result(setting, results[-1])
            return results

        yield run_here
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads that draw the progress
    with _nothing_from_the_working_folder():
        pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_start, initargs=(job, os.getpid()))

        def run(
            function: _Function[_Result], settings: Sequence[Setting], on_result: Callable[[Setting, _Result], None]
        ) -> list[_Result]:
            futures = {pool.submit(_call, function, setting): setting for setting in settings}
            for future in as_completed(futures):
                if future.exception() is None:
                    on_result(futures[future], future.result())
            return [future.result() for future in futures]

        try:
            with sigterm_as_an_exception():
                yield run
        except BaseException:
            for process in multiprocessing.active_children():  # what they compute is for nobody now
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def sigterm_as_an_exception() -> Iterator[None]:
    """Have SIGTERM unwind this process: those that it started end first, and their semaphores are given back."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in that one only
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _nothing_from_the_working_folder() -> Iterator[None]:
    """Have Python processes that are started meanwhile not look for modules there: it may be a folder of others' data.

    Limits: Python 3.10 looks there all the same, before it gets the path of this process.
    """
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_job: SweepJob | None = None
"""In a worker process: what it evaluates."""


def _start(job: SweepJob, parent: int) -> None:
    global _job
    die_with_parent(parent)  # killed, it would leave processes that wait forever
    _job = job


def _call(function: _Function[Any], setting: Setting) -> Any:
    assert _job is not None
    return function(setting, _job)
