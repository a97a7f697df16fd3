"""Suggests names that are close to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'github'?)` with the nearest of `known`, or nothing where none is near."""
    near = difflib.get_close_matches(name, tuple(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
