"""Compiles the planner's inner loops with numba where that is installed; without it they run, slower, as Python.

Compiled code is kept on disk. Numba by itself notices an edit only in the file of the function, not in the files of
what it calls, and would go on planning with old prices; so the folder is named by a digest of all sources that hold
compiled functions. A constant that such a function reads must stand in one of these files.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

numba: Any
try:
    numba = importlib.import_module("numba")
except ImportError as error:
    numba = None
    logging.getLogger(__name__).warning(
        "numba is missing (%s): planning runs as Python, far slower; pip install numba", error
    )

_KEPT_FOLDERS = 4

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
    name = f"kernels-{digest.hexdigest()}"
    try:
        return _writable(package / "__pycache__", name)
    except OSError:
        pass
    try:
        return _writable(Path.home() / ".cache" / "dynamic-cp", name)
    except (OSError, RuntimeError):  # no home
        return None


def _writable(parent: Path, name: str) -> Path:
    """Return the folder `name` in `parent`, made if it is new: then all but the newest few others go."""
    folder = parent / name
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(parent.glob("kernels-*"), key=lambda other: other.stat().st_mtime)
        for old in others[:-_KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
    (folder / ".writable").touch()
    return folder
