"""Has one process at a time compile: others that need the same wait for it, and find it on disk.

The workers of a search, or ranks that start together, run the same kernels in the same order. Without this each of them
compiles all, a minute and more of a core each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not on Windows: there each process compiles for itself
    fcntl = None  # type: ignore[assignment]

_LONGEST_WAIT_S = 300.0
"""Then a process compiles for itself: whoever has the right may have been stopped."""
_ASK_EVERY_S = 0.05


class OneCompiler:
    """The right to compile into a folder. Whoever dies with it gives it back.

    Args:
        folder: where compiled code is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f".compiling-{sys.implementation.cache_tag}"  # no Python reads what another compiled
        self._file: IO[bytes] | None = None
        self._depth = 0

    def watch(self, kernel: Any) -> None:
        """Have `kernel`, a numba dispatcher with a cache on disk, compile only with the right.

        Literals in calls from other kernels are compiled as what they are values of: there is one variant for all.
        """
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.types import unliteral

        compile_kernel = kernel.compile

        def compile_once(signature: Any) -> Any:
            arguments = tuple(map(unliteral, signature)) if isinstance(signature, tuple) else signature
            with global_compiler_lock:
                self._depth += 1
                try:
                    return compile_kernel(arguments)
                finally:
                    self._depth -= 1
                    if self._depth == 0:
                        self.give_back()

        kernel.compile = compile_once
        kernel._cache = _Cache(kernel._cache, self)

    def take(self) -> bool:
        """Take the right, unless this process has it already; return whether another process had it meanwhile."""
        if fcntl is None or self._file is not None:
            return False
        try:
            self._file = self._path.open("ab")
        except OSError:  # the folder is gone
            return False
        until_s, has_waited = time.monotonic() + _LONGEST_WAIT_S, False
        while time.monotonic() < until_s:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                has_waited = True
                time.sleep(_ASK_EVERY_S)
            except OSError:  # a file system without locks
                break
            else:
                return has_waited
        return has_waited

    def give_back(self) -> None:
        """Let others compile."""
        if self._file is not None:
            with self._file:  # a fork of this process may hold the file open, so closing it is not enough
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file = None


class _Cache:
    """A kernel's cache on disk, which takes the right to compile where it does not have what is wanted."""

    def __init__(self, cache: Any, right: OneCompiler) -> None:
        self._cache, self._right = cache, right

    def load_overload(self, *wanted: Any) -> Any:
        overload = self._cache.load_overload(*wanted)
        return self._cache.load_overload(*wanted) if overload is None and self._right.take() else overload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
