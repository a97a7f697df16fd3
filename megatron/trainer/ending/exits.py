"""How a run ends: exit codes, signals, and one last line, whichever ranks are dead.

    0  trained to the end, or saved after SIGTERM, SIGINT, SIGUSR1
    1  something unexpected: every rank that saw it prints its traceback
    2  an error of the user (DynamicCPError): one line from rank 0

An error leads to `fail`, then everything is closed, `hang_up` releases waiting peers, and rank 0 gets time to speak
before another rank does. `closing` gives up on what does not close in time. A launcher sends SIGTERM to the other ranks
as soon as one has died; a failing rank still reports then. Imports no torch, because wrong flags are reported before
that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol, TypeVar

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.agreement import phase

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Time that a failing rank has after it was asked to end; a launcher kills it after 30 s.
TIME_TO_SPEAK_S = 5
# Time that other ranks give rank 0 to speak: a launcher ends all ranks once one has left with an error.
SPEAK_FIRST_S = 2.0
# Without a launcher, rank 0 hosts the job's store, in which the others still look for its error.
STAY_S = 1.0
# Time without a word from rank 0 after which a signalled rank gives up. Rank 0 speaks every second while others wait
# for it. If it has died, they would wait until the launcher kills them, 30 s after its signal.
GIVE_UP_S = 6.0
# Time that a failing rank may take to close something while peers wait; shorter once a launcher has asked it to end.
CLOSE_S, CLOSE_ONCE_ASKED_S = 20.0, 3.0
_LOOK_UP_S = 0.02
_SPOKEN = "dynamic_cp/last_words"
_FAILING = "dynamic_cp/failing"

is_asked_to_end = False
"""Whether this process has received a signal that ends a run."""
_is_failing = False


def listen() -> None:
    """Let SIGTERM end this process at once while it trains, and within TIME_TO_SPEAK_S once it fails."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def fail() -> None:
    """Remember an error to report. Before ranks are connected all have the same one, which rank 0 reports."""
    global _is_failing
    if not _is_failing:
        _is_failing = _distributed() is not None
        if is_asked_to_end:
            ask_to_end()


def ask_to_end() -> None:
    """Remember that a launcher or a user wants this process to end."""
    global is_asked_to_end
    is_asked_to_end = True
    if _is_failing:
        signal.alarm(TIME_TO_SPEAK_S)  # kills the process unless it has ended by then


def _on_sigterm(number: int, _frame: object) -> None:
    ask_to_end()
    if not _is_failing:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def hang_up() -> None:
    """Tell waiting peers that nothing more comes from this rank; otherwise those who wait for a waiting rank hear it
    last.

    Only for CPU ranks, because gloo has no call for it. What was sent before still arrives, and the job's store stays
    connected.
    """
    distributed = _distributed()
    if distributed is None or distributed.get_backend() != "gloo" or sys.platform != "linux":
        return
    store_port = int(os.environ.get("MASTER_PORT", "0"))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and store_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_WR)


def let_rank_zero_speak(seconds: float) -> None:
    """Wait for `seconds`, or until a launcher ends the job: by then rank 0 has spoken or is dead."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and not is_asked_to_end:
        time.sleep(_LOOK_UP_S)


def be_reachable(seconds: float) -> None:
    """Keep rank 0 alive for at most `seconds`, until all others have called this, too. They read its error in the job's
    store, which ends with rank 0 unless a launcher hosts it."""
    distributed = _distributed()
    if distributed is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with contextlib.suppress(RuntimeError):  # the store is gone
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
    """Return whether no rank has spoken yet; always True without torchrun, which shows all ranks' output as one."""
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


def global_rank() -> int:
    """Return this process's rank from the launcher; 0 without one or if it is not a number."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def exit_code_of(run: Callable[[], None]) -> int:
    """Run `run` and return the exit code of its outcome, after reporting an error on stderr."""
    listen()
    try:
        run()
    except Exception as error:
        return _report(error)
    return 0


def _report(error: BaseException, then: str = "") -> int:
    """Report why this rank fails, unless another rank has, and return its exit code. `then` goes behind the error."""
    fail()
    hang_up()
    if global_rank() != 0:
        be_reachable(STAY_S)
    code = _say(error, then)
    if global_rank() == 0:
        be_reachable(STAY_S)
    return code


def _say(error: BaseException, then: str) -> int:
    if not isinstance(error, DynamicCPError):
        told = "".join(traceback.format_exception(error))
        _tell_launcher(f"rank {global_rank()} failed: {error!r}{then}")
        print(f"rank {global_rank()} failed ({phase.current()}):\n{told}{then}", file=sys.stderr, flush=True)
        return 1
    # Errors are the same on all ranks. A rank that is alive after the wait is the only one with its error.
    if global_rank() != 0:
        let_rank_zero_speak(SPEAK_FIRST_S)
    rank = "" if global_rank() == 0 else f" (rank {global_rank()})"
    told = f"error{rank}: {error}{then}"
    _tell_launcher(told)
    if may_speak():
        print(told, file=sys.stderr, flush=True)
    return 2


def _tell_launcher(told: str) -> None:
    """Make torchrun end its output for this job with `told`, behind its own traceback. Source: the format of
    `torch.distributed.elastic.multiprocessing.errors.ProcessFailure`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {"message": told, "extraInfo": {"py_callstack": told, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


Explain = Callable[[BaseException], BaseException]


def _as_it_is(error: BaseException) -> BaseException:
    return error


_explain: Explain = _as_it_is


@contextlib.contextmanager
def explaining(explain: Explain) -> Iterator[None]:
    """Report errors of the body as `explain` returns them, also if something does not close."""
    global _explain
    before, _explain = _explain, explain
    try:
        yield
    finally:
        _explain = before


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


@contextlib.contextmanager
def closing(thing: T) -> Iterator[T]:
    """Close `thing` at the end. If that hangs on a failing rank, the rank reports its error and ends."""
    try:
        yield thing
    except BaseException as error:
        fail()  # from now on a signal leaves little time
        with _in_time(_explain(error), type(thing).__name__):
            thing.close()
        raise
    thing.close()


@contextlib.contextmanager
def _in_time(error: BaseException, what: str) -> Iterator[None]:
    """End the process if the body takes longer than a failing rank may take to close something."""
    closed = threading.Event()

    def watch() -> None:
        limit_s, ends_s = CLOSE_S, time.monotonic() + CLOSE_S
        while not closed.wait(_LOOK_UP_S):
            if is_asked_to_end and limit_s == CLOSE_S:
                limit_s = CLOSE_ONCE_ASKED_S
                ends_s = min(ends_s, time.monotonic() + limit_s)
            if time.monotonic() > ends_s:
                leave(_report(error, f"; then {what} did not close within {limit_s:g} s"))

    threading.Thread(target=watch, name="dynamic-cp-closing", daemon=True).start()
    try:
        yield
    finally:
        closed.set()


def leave(code: int) -> None:
    """End the process. With an error it ends at once, because closing process groups could wait for dead ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


class ExitSignals:
    """Remembers the first exit signal in `received` and ignores later ones, except a SIGINT, which ends the process at
    once. A launcher passes on its SIGTERM, so ranks that a scheduler signals as well get two."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.received: str | None = None
        self._on_first = on_first
        self._previous: dict[int, object] = {}

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        ask_to_end()
        if self.received is None:
            self.received = signal.Signals(number).name
            self._on_first()
        elif number == signal.SIGINT:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()


@contextlib.contextmanager
def exit_signals() -> Iterator[ExitSignals]:
    """Catch EXIT_SIGNALS while the body runs. After one, this rank waits for rank 0 at most GIVE_UP_S."""
    from megatron.dynamic_cp.agreement.verify import stop_waiting_after  # late, because it imports torch

    caught = ExitSignals(on_first=lambda: stop_waiting_after(GIVE_UP_S))
    for number in EXIT_SIGNALS:
        caught._previous[number] = signal.signal(number, caught._remember)
    try:
        yield caught
    except Exception:
        fail()  # before the handlers go: closing takes time
        raise
    finally:
        caught._restore()
        stop_waiting_after(math.inf)
