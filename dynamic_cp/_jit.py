"""Compiles the planner's inner loops with numba where that is installed; without it they run, slower, as Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    import numba
except ImportError:
    numba = None

HAS_NUMBA = numba is not None

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled(function: AnyFunction) -> AnyFunction:
    """Return `function`, compiled at its first call and cached on disk; unchanged where there is no numba.

    No fast-math and no threads: the result is the same number on every run, with and without numba.
    """
    return function if numba is None else numba.njit(cache=True)(function)  # type: ignore[no-any-return]
