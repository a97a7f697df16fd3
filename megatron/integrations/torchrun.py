"""Has torchrun end in one line where a run of this project has ended by an error of the user.

The error is a line that rank 0 has said. Behind it torchrun would write a traceback of its own and a summary of every
rank, 46 lines for 4 ranks. Where a rank has met something unexpected, or has been killed, torchrun writes all of that,
and so it does for jobs of other programs.

torchrun loads the entry points of the group `torchrun.handlers` when it starts, and calls each for a way in which nodes
meet. That of this project is torch's static one; what matters is that it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

_EXIT_CODE = 2
"""Of a rank that has told an error of the user (megatron.trainer.ending.exits)."""
_ENDED = (_EXIT_CODE, -15)
"""And of one that the launcher has ended since."""
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def end_in_a_line() -> Callable[[Any], Any]:
    """Have this process, a launcher, end in a line where an error of the user is why; return the static rendezvous."""
    sys.excepthook = partial(_say, sys.excepthook)

    def create(params: Any) -> Any:
        from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

        return create_rdzv_handler(params)

    return create


def _say(before: _Hook, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    told = in_a_line(error)
    if told is None:
        before(kind, error, traceback)
    else:
        print(told, file=sys.stderr, flush=True)


def in_a_line(error: BaseException) -> str | None:
    """Return what to say of a launcher's error; None: an error of the user is not all that is behind it."""
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "ChildFailedError" or not isinstance(failures, dict):
        return None
    told = [text for one in failures.values() if (text := _told(one)) is not None]
    if not told or any(one.exitcode not in _ENDED for one in failures.values()):
        return None
    ranks = sorted(rank for rank, one in failures.items() if one.exitcode == _EXIT_CODE)
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{getattr(error, 'name', 'the run')} ended with exit code {_EXIT_CODE} of {which}: {told[0]}"


def _told(failure: Any) -> str | None:
    """Return the error of the user that a rank has left in its file."""
    message = failure.message
    text = message.get("message") if isinstance(message, dict) else None
    is_ours = failure.exitcode == _EXIT_CODE and isinstance(text, str) and text.startswith("error")
    return text if is_ours else None
