"""How a run ends: exit codes, who speaks, and signals.

0  trained to the end, or saved after SIGTERM, SIGINT, SIGUSR1
1  something unexpected: every rank that saw it prints its traceback
2  an error of the user (DynamicCPError): one line from rank 0
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.agreement import phase
from megatron.trainer.ending import last_words

# A launcher ends all ranks as soon as one has left with an error: the others give rank 0 this time to say why.
SPEAK_FIRST_S = 2.0
# A launcher signals the survivors of a rank that died and kills them 30 s later. If it was rank 0, they would wait for
# its word until then. Rank 0 speaks every second, whatever it is busy with while others wait for it.
GIVE_UP_S = 6.0
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def global_rank() -> int:
    """Return this process's rank as the launcher set it (0 without a launcher, or where it is no number)."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def exit_code_of(run: Callable[[], None]) -> int:
    """Run `run` and return the exit code of its outcome, after reporting an error on stderr."""
    last_words.listen()
    try:
        run()
    except DynamicCPError as error:
        last_words.fail()
        last_words.hang_up()
        # Errors are the same on all ranks. A rank that still lives after the wait was the only one to see its error.
        if global_rank() != 0:
            last_words.let_rank_zero_speak(SPEAK_FIRST_S)
        if last_words.may_speak():
            rank = "" if global_rank() == 0 else f" (rank {global_rank()})"
            print(f"error{rank}: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        last_words.fail()
        last_words.hang_up()
        said = f"rank {global_rank()} failed ({phase.current()}):\n{traceback.format_exc()}"
        print(said, file=sys.stderr, flush=True)
        return 1
    return 0


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
        last_words.is_asked_to_end = True
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
        last_words.fail()  # before the handlers go: what closes now takes its time
        raise
    finally:
        caught._restore()
        stop_waiting_after(math.inf)
