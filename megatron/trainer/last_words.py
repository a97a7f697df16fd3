"""The last line of a run that fails: one rank says it, at once, whoever is dead and however many are left.

    an error -> hang up, so that no peer waits -> let rank 0 speak -> one line from who may

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
_LOOK_UP_S = 0.02

is_asked_to_end = False
"""Whether this process has received a signal with which a run is ended."""


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
    # Before the ranks are connected all find the same error, and rank 0 is there to say it: a signal ends this one.
    catches = _distributed() is not None and threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _remember) if catches else None
    while time.monotonic() < deadline_s and not is_asked_to_end:
        time.sleep(_LOOK_UP_S)
    if catches:
        signal.signal(signal.SIGTERM, previous)


def may_speak() -> bool:
    """Return whether nobody has spoken yet; always true where no launcher shows what all ranks say as one text."""
    distributed = _distributed()
    if distributed is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        return bool(distributed.distributed_c10d._get_default_store().add(_SPOKEN, 1) == 1)
    except RuntimeError:  # what a store raises that is gone
        return True


def _remember(*_: object) -> None:
    global is_asked_to_end
    is_asked_to_end = True


def _distributed() -> Any:
    """Return torch.distributed once this process has joined the job, else None."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_initialized() else None
