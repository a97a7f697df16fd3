"""The clock of every limit of the tests: it stands still while what a test started waits for a processor.

Beside other load a run takes many times the seconds that it takes alone, and a limit on a wall clock then says how busy
the machine is. For each thread Linux counts the time in which it could have run and did not. A second counts here
unless threads of the test waited for a processor in it; seconds in which they computed always count. So what hangs
meets its limit as soon as by any clock, and what is merely slow has as many seconds of computing as on an idle machine.
Where nobody counts (not Linux) it is the wall clock.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

_LOOK_EVERY_S = 0.5
"""Looking takes a millisecond for some ten processes; in between all time counts at first."""
_WAKE_EVERY_S = 2.0
"""What a process waited is forgotten with it: those that live shorter than this may count in full."""

Counts = dict[str, tuple[int, int]]
"""Thread -> nanoseconds that it computed, and that it waited for a processor."""


class Clock:
    """Seconds of a process and all that it started."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._looked_s, self._counted_s, self._said_s = time.monotonic(), 0.0, 0.0
        self._counts = counts_of(root)

    def now_s(self) -> float:
        """Return the seconds that count since this clock began."""
        if self._lock.acquire(blocking=False):  # not in a handler that interrupts this very function
            try:
                if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                    self._look()
                self._said_s = max(self._said_s, self._counted_s + time.monotonic() - self._looked_s)
            finally:
                self._lock.release()
        return self._said_s

    def _look(self) -> None:
        counts, now_s = counts_of(self._root), time.monotonic()
        computed_s, waited_s = (
            sum(count[which] - self._counts.get(thread, (0, 0))[which] for thread, count in counts.items()) / 1e9
            for which in (0, 1)
        )
        self._counted_s += seconds_that_count(now_s - self._looked_s, computed_s, waited_s)
        self._looked_s, self._counts = now_s, counts


def seconds_that_count(elapsed_s: float, computed_s: float, waited_s: float) -> float:
    """Return how many of the elapsed seconds count, in which threads computed and waited for processors, summed up."""
    return min(elapsed_s, max(computed_s, elapsed_s - waited_s))


def counts_of(root: int) -> Counts:
    """Return what the system counted for each thread of a process and of its descendants."""
    found: Counts = {}
    processes = [str(root)]
    for process in processes:  # grows as children are found
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                folder = f"/proc/{process}/task/{thread}"
                with contextlib.suppress(OSError):
                    computed_ns, waited_ns, _ = _words_of(f"{folder}/schedstat")
                    found[thread] = int(computed_ns), int(waited_ns)
                    processes += _words_of(f"{folder}/children")
    return found


def _words_of(path: str) -> list[str]:
    """Return the words of a short file, in a tenth of the time that a Path takes: there are hundreds of these files."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 14).decode().split()
    finally:
        os.close(file)


_clock = Clock(os.getpid())
now_s = _clock.now_s
"""The clock of the tests' process; ranks that are forked have its, whose processes are theirs and their peers'."""


def begin_anew() -> None:
    """Have a fork count for itself and what it starts: what its parent's other forks do is no part of its tests."""
    Clock.__init__(_clock, os.getpid())


def _unlock() -> None:
    """Have a fork look at the clock, though another thread of its parent may have done so when it was forked."""
    _clock._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def limit(seconds: float, when_over: Callable[[], None]) -> Callable[[], None]:
    """Have `when_over` called in the main thread once as many seconds counted; return what takes that back."""
    until_s = now_s() + seconds

    def look(*_: object) -> None:
        if now_s() >= until_s:
            cancel()
            when_over()

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _WAKE_EVERY_S, _WAKE_EVERY_S)
    return cancel


def install() -> None:
    """Have `subprocess` go by this clock: `run(..., timeout=60)` is 60 s of it."""
    assert subprocess._time is time.monotonic or subprocess._time is now_s  # type: ignore[attr-defined]
    subprocess._time = now_s  # type: ignore[attr-defined]
