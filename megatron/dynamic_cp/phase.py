"""What this rank is doing, in words: for errors that come from outside, a lost rank or a store that does not answer."""

from __future__ import annotations

_current = "starting up"


def enter(phase: str) -> None:
    """Say what begins now, such as "iteration 5, saving"."""
    global _current
    _current = phase


def current() -> str:
    """Return what was entered last."""
    return _current
