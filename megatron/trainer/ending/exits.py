"""How a run ends: exit codes, signals, and a last line that one rank says, no matter which ranks are dead or left.

0  trained to the end, or saved after SIGTERM, SIGINT, SIGUSR1
1  something unexpected: every rank that saw it prints its traceback
2  an error of the user (DynamicCPError): one line from rank 0

    an error -> fail -> close everything -> hang up, so that no peer waits -> let rank 0 speak -> one line from who may

What does not close in time is left as it is (`closing`). A launcher ends the others (SIGTERM) as soon as it sees that a
rank has died; who is failing then still says why. Imports no torch: wrong flags are answered before that.
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
# A failing rank has this time after it was asked to end: a launcher kills it after 30 s.
TIME_TO_SPEAK_S = 5
# A launcher ends all ranks as soon as one has left with an error: the others give rank 0 this time to say why.
SPEAK_FIRST_S = 2.0
# Without a launcher rank 0 takes the job's store with it, where the others still look for its error.
STAY_S = 1.0
# A launcher signals the survivors of a rank that died and kills them 30 s later. If it was rank 0, they would wait for
# its word until then. Rank 0 speaks every second, whatever it is busy with while others wait for it.
GIVE_UP_S = 6.0
# What a failing rank may take to close something: peers wait for it. Less once a launcher has asked it to end, which
# it may outlive by TIME_TO_SPEAK_S only.
CLOSE_S, CLOSE_ONCE_ASKED_S = 20.0, 3.0
_LOOK_UP_S = 0.02
_SPOKEN = "dynamic_cp/last_words"
_FAILING = "dynamic_cp/failing"

is_asked_to_end = False
"""Whether this process has received a signal with which a run is ended."""
_is_failing = False


def listen() -> None:
    """From now on SIGTERM ends this process at once while it trains, and in TIME_TO_SPEAK_S once it fails."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)


def fail() -> None:
    """Remember that there is an error to be reported.

    Before the ranks are connected all have the same error and rank 0 says it, so a signal may end the others.
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


def global_rank() -> int:
    """Return this process's rank as the launcher set it (0 without a launcher, or where it is no number)."""
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
    """Say why this rank fails, unless another one has, and return its exit code.

    Args:
        then: what happened since, behind the error.
    """
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
    # Errors are the same on all ranks. A rank that still lives after the wait was the only one to see its error.
    if global_rank() != 0:
        let_rank_zero_speak(SPEAK_FIRST_S)
    rank = "" if global_rank() == 0 else f" (rank {global_rank()})"
    told = f"error{rank}: {error}{then}"
    _tell_launcher(told)
    if may_speak():
        print(told, file=sys.stderr, flush=True)
    return 2


def _tell_launcher(told: str) -> None:
    """Have torchrun end what it prints of this job with `told`, behind a traceback of its own.

    Source: the format of `torch.distributed.elastic.multiprocessing.errors.ProcessFailure`.
    """
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
    """Have the errors of the body told as `explain` returns them, also where something does not close."""
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
    """Close `thing` at the end. A failing rank that hangs in this says why it fails, and ends."""
    try:
        yield thing
    except BaseException as error:
        fail()  # from now on a signal means that there is little time
        with _in_time(_explain(error), type(thing).__name__):
            thing.close()
        raise
    thing.close()


@contextlib.contextmanager
def _in_time(error: BaseException, what: str) -> Iterator[None]:
    """End the process where the body takes longer than a failing rank may close something."""
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
    """End the process with `code`; with an error at once, because closing process groups could wait for dead ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


class ExitSignals:
    """Remembers the first exit signal and ignores what follows, except a SIGINT, which ends the process at once.

    A launcher passes on its own SIGTERM, so ranks that a scheduler signals as well get two of them.

    Attributes:
        received: name of the first signal, or None.
    """

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
    """Catch EXIT_SIGNALS while the body runs; after one, this rank waits for rank 0 only GIVE_UP_S longer."""
    from megatron.dynamic_cp.agreement.verify import stop_waiting_after  # here: it imports torch

    caught = ExitSignals(on_first=lambda: stop_waiting_after(GIVE_UP_S))
    for number in EXIT_SIGNALS:
        caught._previous[number] = signal.signal(number, caught._remember)
    try:
        yield caught
    except Exception:
        fail()  # before the handlers go: what closes now takes its time
        raise
    finally:
        caught._restore()
        stop_waiting_after(math.inf)
