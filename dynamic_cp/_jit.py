"""Compiles the planner's inner loops with numba where that is installed; without it they run, slower, as Python.

Compiled code is kept on disk. Numba by itself notices an edit only in the file of the function, not in the files of
what it calls, and would go on planning with old prices; so the folder is named by a digest of all sources that hold
compiled functions. A constant that such a function reads must stand in one of these files.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

numba: Any
try:
    numba = importlib.import_module("numba")
except ImportError:
    numba = None

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled(function: AnyFunction) -> AnyFunction:
    """Return `function`, compiled at its first call and cached on disk; unchanged where there is no numba.

    No fast-math and no threads: the result is the same number on every run.
    """
    if numba is None:
        return function
    folder = _cache_folder()
    if folder is None:
        return cast(AnyFunction, numba.njit(function))
    given = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read while decorating only
    try:
        return cast(AnyFunction, numba.njit(cache=True)(function))
    finally:
        numba.config.CACHE_DIR = given


@lru_cache(maxsize=1)
def _cache_folder() -> Path | None:
    """Return a writable folder for compiled code of just these sources; None when there is none."""
    package = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        source = file.read_bytes()
        if b"@compiled" in source:
            digest.update(source)
    for parent in (package / "__pycache__", Path.home() / ".cache" / "dynamic-cp"):
        folder = parent / f"kernels-{digest.hexdigest()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
        except OSError:
            continue
        return folder
    return None
