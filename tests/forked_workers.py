"""`--workers N`: one process imports and collects, N forks of it run the tests, a file at a time.

Importing torch and megatron-core and collecting takes 18 s of computing. A fork has that from its parent, which gives
it one file after the other and gets its reports back. A worker that dies fails the test it was at, and another one
goes on with the rest of that file.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from itertools import count, groupby, zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import patience

_FORK = multiprocessing.get_context("fork")


_LOOK_EVERY_S = 1.0
"""A dead worker is noticed by the end of its pipe, or, where something that it started keeps that open, this late."""
_GRACE_S = 10.0
"""For what a test that is interrupted has to end."""


class _Worker(NamedTuple):
    """A forked process, a pipe to it, and the items that it has got and not yet run, in their order."""

    process: Any
    pipe: Connection
    held: list[int]


def run_on_workers(
    session: pytest.Session, num_workers: int, tell: Callable[[], Any], hear: Callable[[Any], None]
) -> None:
    """Run all tests of a session; `tell` says in each worker, once it is done, what `hear` gets here, once all are
    done. Raises: pytest.Session.Failed (--maxfail), Interrupted, RuntimeError where a worker died at no test."""
    items = session.items
    files = [[*of] for _, of in groupby(range(len(items)), key=lambda index: items[index].path)]
    left, told = iter(files), []
    workers: list[_Worker] = []
    numbers = count()

    def start(first: list[int] | None) -> None:
        """Fork a worker that first runs these items, if there are any."""
        ours, theirs = _FORK.Pipe()
        others = [ours, *(worker.pipe for worker in workers)]
        process = _FORK.Process(target=_work, args=(session, theirs, others, f"worker{next(numbers)}", tell))
        process.start()
        theirs.close()  # or its end would not be noticed
        workers.append(_Worker(process, ours, []))
        if first:
            give(workers[-1], first)

    def give(worker: _Worker, file: list[int] | None) -> None:
        worker.held.extend(file or ())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: what it holds is told as failed
            worker.pipe.send(file)

    def take(worker: _Worker) -> None:
        kind, value = worker.pipe.recv()
        if kind == "ran":
            worker.held.remove(value)
            if not worker.held:
                give(worker, next(left, None))
        elif kind == "report":
            report = session.config.hook.pytest_report_from_serializable(config=session.config, data=value)
            session.config.hook.pytest_runtest_logreport(report=report)
        elif kind == "warned":
            text, filename, lineno, said = value
            message = warnings.WarningMessage(text, Warning, filename, lineno)
            session.config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **said})
        else:
            told.append(value)

    def bury(worker: _Worker) -> None:
        """Go on without a worker that ended."""
        workers.remove(worker)
        worker.process.join()
        worker.pipe.close()
        if worker.held or worker.process.exitcode:
            _fail(session, worker)
            start(worker.held[1:] or next(left, None))

    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, made once
    try:
        for _ in range(min(num_workers, len(files))):
            start(next(left))
        while workers:
            ready = wait([worker.pipe for worker in workers], timeout=_LOOK_EVERY_S)
            for worker in [*workers]:
                try:
                    if worker.pipe in ready:
                        take(worker)
                    elif not worker.process.is_alive() and not worker.pipe.poll():
                        bury(worker)
                except (EOFError, OSError):  # its end, or half of what it said
                    bury(worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        _end([worker.process for worker in workers])
        for one in told:
            hear(one)


def _end(processes: list[Any]) -> None:
    """End workers and what their tests started: they are interrupted, as by a user, and killed if that does nothing."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    for process in processes:
        process.join(_GRACE_S)
        process.kill()
        process.join()


def _fail(session: pytest.Session, worker: _Worker) -> None:
    """Report the test at which a worker died as failed."""
    why = f"the process that ran this test ended with status {worker.process.exitcode}"
    if not worker.held:
        raise RuntimeError(f"{why}, after its last test")
    item = session.items[worker.held[0]]
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _work(
    session: pytest.Session, pipe: Connection, others: list[Connection], folder: str, tell: Callable[[], Any]
) -> None:
    status = 1
    try:
        for other in others:  # or the end of the parent would not be noticed
            other.close()
        patience.begin_anew()
        _be_quiet(session.config, folder)
        session.config.pluginmanager.register(_Sender(session.config, pipe))
        while (file := pipe.recv()) is not None:
            for index, following in zip_longest(file, file[1:]):
                after = _Nothing(session) if following is None else session.items[following]
                item = session.items[index]
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                pipe.send(("ran", index))
        session._setupstate.teardown_exact(None)
        pipe.send(("told", tell()))
        status = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the parent stops, or is no more
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        pipe.close()
        os._exit(status)  # what the parent would do at its end is not done here


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

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        one, said = warning_message, {"when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warned", (f"{one.category.__name__}: {one.message}", one.filename, one.lineno, said)))
