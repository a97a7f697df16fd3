"""A small process beside each rank that kills stopped processes (SIGSTOP), so that no rank waits for them for ever.

A stopped rank keeps its connections, and its stopped writer, worker or planner blocks it. Peers cannot tell that from
slowness and would wait for minutes; a killed process is handled like any death. Debuggers' stops are left alone. If the
whole job is suspended (SLURM, Ctrl-Z), so is this process: it counts only seconds in which it runs. It needs /proc
(Linux), imports only the standard library, and ends a second after its rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_LOOK_EVERY_S = 1.0


class StopGuard:
    """The process as its rank sees it; none with `limit_s` 0. A process of the rank may be stopped for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if limit_s > 0 and sys.platform == "linux":
            # -I -S: only its own file and the standard library, which takes 10 ms to start.
            words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit_s)]
            try:
                self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            except OSError as error:  # a failure of this rank alone: training goes on
                _say(f"no process could be started that kills stopped ones: the others would wait for them ({error})")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def watch(rank: int, limit_s: float) -> None:
    """Kill process `rank` or a child of it once it was stopped for `limit_s`; return when `rank` has ended."""
    seen_stopped_s: dict[int, float] = {}
    while os.getppid() == rank:
        time.sleep(_LOOK_EVERY_S)
        stopped = [pid for pid in (rank, *_children(rank)) if _state(pid) == "T"]
        seen_stopped_s = {pid: seen_stopped_s.get(pid, 0.0) + _LOOK_EVERY_S for pid in stopped}
        for pid, seen_s in seen_stopped_s.items():
            if seen_s >= limit_s:
                _say(
                    f"its process {pid} ({_name(pid, rank)}) was stopped for {limit_s:g} s: killed, as the others "
                    "would wait for it (--stopped-process-timeout)"
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _say(text: str) -> None:
    """Print; logging is not set up yet, or not at all in the process."""
    print(f"rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)


def _children(rank: int) -> list[int]:
    return [int(pid) for children in Path(f"/proc/{rank}/task").glob("*/children") for pid in _read(children).split()]


def _state(pid: int) -> str:
    """Return the letter of a process's state, "" if it is gone. Its name, in brackets, may contain anything."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2][1:2]


def _name(pid: int, rank: int) -> str:
    return "the rank itself" if pid == rank else _read(Path(f"/proc/{pid}/comm")).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to a whole group: the rank finishes its step
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))


if __name__ == "__main__":
    main()
