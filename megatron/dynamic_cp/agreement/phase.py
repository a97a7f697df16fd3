"""What this rank is doing, for errors with causes outside: a lost rank, a silent store, a device out of memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class MicroBatch(NamedTuple):
    """The micro-batch begun last: its place in the run and its padded tokens on this rank."""

    label: str
    num_tokens: int


_current = "starting up"
_micro_batch: MicroBatch | None = None
_token_limit: int | None = None
_since_s = time.monotonic()


def enter(phase: str) -> None:
    """Set the phase that begins now, such as "iteration 5, saving"."""
    global _current, _micro_batch, _since_s
    _current, _micro_batch, _since_s = phase, None, time.monotonic()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Enter `phase` for the body, then restore the phase before; after an error `phase` stays."""
    before = _current
    enter(phase)
    yield
    enter(before)


def enter_micro_batch(label: str, num_tokens: int) -> None:
    """Record that the forward pass of a micro-batch begins, with its padded tokens on this rank."""
    global _micro_batch, _since_s
    _micro_batch, _since_s = MicroBatch(label, num_tokens), time.monotonic()


def limit_tokens(limit: int) -> None:
    """Record the limit of padded tokens that a rank may have in one micro-batch."""
    global _token_limit
    _token_limit = limit


def token_limit() -> int | None:
    """Return the token limit, None before it is known."""
    return _token_limit


def current() -> str:
    return _current


def micro_batch() -> MicroBatch | None:
    """Return the micro-batch begun last in this phase, None before the first."""
    return _micro_batch


def seconds() -> float:
    """Return the seconds since a phase or micro-batch was last entered."""
    return time.monotonic() - _since_s
