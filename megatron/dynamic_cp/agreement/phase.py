"""What this rank is doing, in words: for errors that come from outside, a lost rank, a store that does not answer, a
device out of memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class MicroBatch(NamedTuple):
    """The micro-batch begun last: its place in the run and its tokens on this rank."""

    label: str
    num_tokens: int


_current = "starting up"
_micro_batch: MicroBatch | None = None
_token_limit: int | None = None
_since_s = time.monotonic()


def enter(phase: str) -> None:
    """Say what begins now, such as "iteration 5, saving"."""
    global _current, _micro_batch, _since_s
    _current, _micro_batch, _since_s = phase, None, time.monotonic()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Enter `phase` for the body and go back to the one before; an error of the body leaves it entered."""
    before = _current
    enter(phase)
    yield
    enter(before)


def enter_micro_batch(label: str, num_tokens: int) -> None:
    """Say that the forward pass of a micro-batch begins, with its padded tokens on this rank."""
    global _micro_batch, _since_s
    _micro_batch, _since_s = MicroBatch(label, num_tokens), time.monotonic()


def limit_tokens(limit: int) -> None:
    """Say how many padded tokens a rank of this run may have in a micro-batch."""
    global _token_limit
    _token_limit = limit


def token_limit() -> int | None:
    """Return the limit, None before it was found."""
    return _token_limit


def current() -> str:
    """Return the phase that was entered last."""
    return _current


def micro_batch() -> MicroBatch | None:
    """Return the micro-batch begun last in this phase."""
    return _micro_batch


def seconds() -> float:
    """Return how long ago something was entered last."""
    return time.monotonic() - _since_s
