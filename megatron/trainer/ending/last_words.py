"""The last line of a run that fails: one rank says it, immediately, no matter which ranks are dead or left.

    an error -> fail -> close everything -> hang up, so that no peer waits -> let rank 0 speak -> one line from who may

What does not close in time is left as it is (`exits.closing`).

A launcher ends the others (SIGTERM) as soon as it sees that a rank has died. Who is failing then still says why.

Imports no torch: wrong flags are answered before that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time
from typing import Any

_SPOKEN = "dynamic_cp/last_words"
_FAILING = "dynamic_cp/failing"
_LOOK_UP_S = 0.02
TIME_TO_SPEAK_S = 5
"""Seconds that a failing rank has after it was asked to end: a launcher kills it after 30."""

is_asked_to_end = False
"""Whether this process has received a signal with which a run is ended."""
_is_failing = False


def listen() -> None:
    """From now on SIGTERM ends this process at once while it trains, and in TIME_TO_SPEAK_S once it fails."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def fail() -> None:
    """Remember that there is an error to be reported.

    Before the ranks are connected all find the same error, and rank 0 is there to say it: a signal ends the others.
    """
    global _is_failing
    if not _is_failing:
        _is_failing = _distributed() is not None
        if is_asked_to_end:
            ask_to_end()


def ask_to_end() -> None:
    """Remember that a launcher, or somebody, wants this process to end."""
    global is_asked_to_end
    is_asked_to_end = True
    if _is_failing:
        signal.alarm(TIME_TO_SPEAK_S)  # ends the process unless it has ended by itself


def _on_sigterm(number: int, _frame: object) -> None:
    ask_to_end()
    if not _is_failing:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def hang_up() -> None:
    """Tell peers that nothing more comes from here: who waits for a rank that waits would be the last to hear.

    On CPU ranks, where gloo has no word for it. What was sent before arrives, and the job's store stays connected.
    """
    distributed = _distributed()
    if distributed is None or distributed.get_backend() != "gloo" or sys.platform != "linux":
        return
    store_port = int(os.environ.get("MASTER_PORT", "0"))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, or connected to nobody
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_WR)


def let_rank_zero_speak(seconds: float) -> None:
    """Wait for `seconds`, or until a launcher ends the job: rank 0 has spoken then, or is dead."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and not is_asked_to_end:
        time.sleep(_LOOK_UP_S)


def be_reachable(seconds: float) -> None:
    """Have rank 0 stay until the others know its error, for `seconds` at most; they say so here.

    They read it in the job's store, which rank 0 takes with it unless a launcher has it.
    """
    distributed = _distributed()
    if distributed is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with contextlib.suppress(RuntimeError):  # what a store raises that is gone
        store = distributed.distributed_c10d._get_default_store()
        if distributed.get_rank() != 0:
            store.add(_FAILING, 1)
            return
        deadline_s = time.monotonic() + seconds
        while store.add(_FAILING, 0) < distributed.get_world_size() - 1 and time.monotonic() < deadline_s:
            if is_asked_to_end:
                return
            time.sleep(_LOOK_UP_S)


def may_speak() -> bool:
    """Return whether nobody has spoken yet; always true where no launcher shows what all ranks say as one text."""
    distributed = _distributed()
    if distributed is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        return bool(distributed.distributed_c10d._get_default_store().add(_SPOKEN, 1) == 1)
    except RuntimeError:  # what a store raises that is gone
        return True


def _distributed() -> Any:
    """Return torch.distributed once this process has joined the job, else None."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_initialized() else None
