"""`--workers N`: one process imports and collects, N forks of it run the tests, a file at a time.

Each process that pytest-xdist starts imports torch and megatron-core and collects for itself: 18 s of computing.
A fork has that from its parent. Workers take the next file from a counter that they share and send their reports back.
A worker that dies fails the test it was at, and another one goes on with the rest of that file.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from itertools import groupby, zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_FORK = multiprocessing.get_context("fork")


class _Worker(NamedTuple):
    """A forked process, what it says, and the items that it has taken and not yet run, in their order."""

    process: Any
    said: Connection
    held: list[int]


def run_on_workers(
    session: pytest.Session, num_workers: int, tell: Callable[[], Any], hear: Callable[[Any], None]
) -> None:
    """Run all tests of a session.

    Args:
        tell: called in each worker once it is done, for something that `hear` gets in this process.
    """
    items = session.items
    files = [[*of] for _, of in groupby(range(len(items)), key=lambda index: items[index].path)]
    taken = _FORK.Value("i", 0)
    workers: list[_Worker] = []

    def start(held: list[int]) -> None:
        """Fork a worker that first runs the items that are held."""
        ear, mouth = _FORK.Pipe(duplex=False)
        folder = f"worker{len(started)}"
        started.append(folder)
        process = _FORK.Process(target=_work, args=(session, files, taken, held, mouth, folder, tell))
        process.start()
        mouth.close()  # or its end would not be noticed
        workers.append(_Worker(process, ear, held))

    started: list[str] = []
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, made once
    try:
        for _ in range(min(num_workers, len(files))):
            start([])
        while workers:
            for ear in wait([one.said for one in workers]):
                (worker,) = (one for one in workers if one.said is ear)
                try:
                    kind, value = worker.said.recv()
                except EOFError:
                    workers.remove(worker)
                    worker.process.join()
                    if worker.held or worker.process.exitcode:
                        _fail(session, worker)
                        start(worker.held[1:])
                    continue
                if kind == "took":
                    worker.held.extend(value)
                elif kind == "ran":
                    worker.held.remove(value)
                elif kind == "report":
                    report = session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
                    session.config.hook.pytest_runtest_logreport(report=report)
                else:
                    hear(value)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()


def _fail(session: pytest.Session, worker: _Worker) -> None:
    """Report the test at which a worker died as failed."""
    why = f"the process that ran this test ended with status {worker.process.exitcode}"
    if not worker.held:
        raise RuntimeError(f"{why}, after its last test")
    item = session.items[worker.held[0]]
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _work(
    session: pytest.Session,
    files: list[list[int]],
    taken: Any,
    held: list[int],
    mouth: Connection,
    folder: str,
    tell: Callable[[], Any],
) -> None:
    """Be a worker."""
    status = 1
    try:
        _be_quiet(session.config, folder)
        session.config.pluginmanager.register(_Sender(session.config, mouth))
        for file in _files(files, taken, held, mouth):
            for index, following in zip_longest(file, file[1:]):
                after = _Nothing(session) if following is None else session.items[following]
                item = session.items[index]
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                mouth.send(("ran", index))
        session._setupstate.teardown_exact(None)
        mouth.send(("told", tell()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        mouth.close()
        os._exit(status)  # what the parent would do at its end is not done here


def _files(files: list[list[int]], taken: Any, held: list[int], mouth: Connection) -> Iterator[list[int]]:
    """Yield the items of a file that is to be run now."""
    yield held
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(files):
            return
        mouth.send(("took", files[number]))
        yield files[number]


class _Nothing(NamedTuple):
    """What comes after the last test of a file: nothing that has its fixtures, but those of the session stay."""

    session: pytest.Session

    def listchain(self) -> list[Any]:
        return [self.session]


def _be_quiet(config: pytest.Config, folder: str) -> None:
    """Have a fork write to files and folders of its own, and nothing to the terminal."""
    plugins = config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115
    if capture.is_globally_capturing() or capture._global_capturing is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / folder
    factory._basetemp.mkdir()


class _Sender:
    """Sends what a worker reports to its parent."""

    def __init__(self, config: pytest.Config, mouth: Connection) -> None:
        self._config, self._mouth = config, mouth

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._mouth.send(("report", data))
