"""Compiles the planner's inner loops with numba if it is installed; without numba they run as Python, slower.

Compiled code is kept on disk. Numba's own cache misses edits in files of called functions and would plan with old
prices, so the folder is named by a digest of all sources that hold compiled functions, or constants (in capitals) and
plain functions that these take. One process at a time compiles, and others find the result on disk: workers of a
search, or ranks that start together, would otherwise each compile the same kernels, a minute and more of a core.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

try:
    import fcntl
except ImportError:  # not on Windows: there each process compiles for itself
    fcntl = None  # type: ignore[assignment]

_LONGEST_WAIT_S = 300.0
"""After this a process compiles for itself: the one with the right may have been stopped."""
_ASK_EVERY_S = 0.05


class OneCompiler:
    """The right to compile into `folder`, where compiled code is kept. A process that dies with it gives it back."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f".compiling-{sys.implementation.cache_tag}"  # no Python reads what another compiled
        self._file: IO[bytes] | None = None
        self._depth = 0

    def watch(self, kernel: Any) -> None:
        """Have `kernel`, a numba dispatcher with a cache on disk, compile only with the right. Literals in calls from
        other kernels are compiled as their types: there is one variant for all."""
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
    """A kernel's cache on disk, which takes the right to compile when it lacks what is wanted."""

    def __init__(self, cache: Any, right: OneCompiler) -> None:
        self._cache, self._right = cache, right

    def load_overload(self, *wanted: Any) -> Any:
        overload = self._cache.load_overload(*wanted)
        return self._cache.load_overload(*wanted) if overload is None and self._right.take() else overload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


logger = logging.getLogger(__name__)

numba: Any
try:
    numba = importlib.import_module("numba")
except ImportError as error:
    numba = None
    logger.warning("numba is missing (%s): planning runs as Python, far slower; pip install numba", error)
if numba is not None and numba.config.DISABLE_JIT:  # njit returns functions as they are: nothing to cache or to watch
    numba = None
    logger.warning("numba is disabled (NUMBA_DISABLE_JIT): planning runs as Python, far slower")

_KEPT_FOLDERS = 4
_ANNOUNCED_S = 120.0
"""For this time only one process of the machine announces that it compiles, though others may, too."""
_SPEAK_EVERY_S = 15.0
_TAKES = "up to two minutes of one core"
"""Compilation time of a job that needs much of the planner: windows, masks, a pipeline and experts took 75 to 95 s."""
_kernels: set[int] = set()
"""Ids of numba's dispatchers of our functions, which live as long as the process."""

_IMPORTS = re.compile(r"^from dynamic_cp\.([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_MODULES = re.compile(r"^from dynamic_cp([\w.]*) import (\w+)$", re.MULTILINE)
_PLAIN = re.compile(r"(?:compiled|inlined)\((\w+)\.\w+\)")
_CONSTANT = re.compile(r"[A-Z][A-Z0-9_]+")

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled(function: AnyFunction) -> AnyFunction:
    """Return `function`, compiled at its first call and cached on disk; unchanged if numba is missing or disabled. No
    fast-math and no threads: the result is the same number on every run."""
    if numba is None:
        return function
    _listen()
    folder = _cache_folder()
    given = numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)  # read while decorating only
    try:
        kernel = numba.njit(cache=folder is not None)(function)
    finally:
        numba.config.CACHE_DIR = given
    _kernels.add(id(kernel))
    right = _right_to_compile()
    if right is not None:
        right.watch(kernel)
    return cast(AnyFunction, kernel)


@lru_cache(maxsize=1)
def _right_to_compile() -> OneCompiler | None:
    folder = _cache_folder()
    return None if folder is None else OneCompiler(folder)


@lru_cache(maxsize=1)
def _listen() -> None:
    """Announce when numba really compiles our functions in this process, and again while that takes long."""
    Listener: Any = numba.core.event.Listener

    class Announcer(Listener):  # type: ignore[misc]
        is_speaker, num_compiled, spoke_s = False, 0, 0.0

        def on_start(self, event: Any) -> None:
            if id(event.data["dispatcher"]) not in _kernels:
                return
            if not self.num_compiled:
                self.is_speaker, self.spoke_s = _announce(), time.monotonic()
            elif self.is_speaker and time.monotonic() - self.spoke_s > _SPEAK_EVERY_S:
                self.spoke_s = time.monotonic()
                logger.warning("compiling the planner: %d loops done, now %s", self.num_compiled, _name_in(event))
            self.num_compiled += 1

        def on_end(self, event: Any) -> None:
            pass

    numba.core.event.register("numba:compile", Announcer())


def _name_in(event: Any) -> str:
    function = event.data["dispatcher"].py_func
    return f"{function.__module__}.{function.__qualname__}"


def _announce() -> bool:
    """Log that the compiler is at work, as nothing else is seen then; return whether this process logged it."""
    folder = _cache_folder()
    if folder is None:
        logger.warning("compiling the planner, %s, at every start: no folder to keep it is writable", _TAKES)
    elif _is_announced(folder):
        return False
    elif any(folder.rglob("*.nbi")):
        logger.warning("compiling more of the planner, once: this job needs loops that no job before it needed")
    else:
        logger.warning("compiling the planner, %s, once: it is kept in %s", _TAKES, folder)
    return True


def _is_announced(folder: Path) -> bool:
    """Return whether another process has announced it just now; from now on this one has."""
    marker = folder / ".announced"
    try:
        marker.touch(exist_ok=False)  # of many processes that start together one succeeds
    except FileExistsError:
        with contextlib.suppress(OSError):
            if time.time() - marker.stat().st_mtime < _ANNOUNCED_S:
                return True
            marker.touch()
    except OSError:
        pass  # its folder is gone: the announcement is repeated
    return False


def inlined(function: AnyFunction) -> AnyFunction:
    """Return `function`, compiled into each compiled function that calls it, for the innermost loops: a call passes
    every array in seven words or more, which can take longer than the work."""
    return function if numba is None else cast(AnyFunction, numba.njit(inline="always")(function))


@lru_cache(maxsize=1)
def _cache_folder() -> Path | None:
    """Return a writable folder for compiled code of just these sources; None if there is none."""
    package = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sources_of_kernels(package):
        digest.update(file.read_bytes())
    name = f"kernels-{digest.hexdigest()}"
    try:
        return _writable(package / "__pycache__", name)
    except OSError:
        pass
    try:
        return _writable(Path.home() / ".cache" / "dynamic-cp", name)
    except (OSError, RuntimeError):  # no home
        return None


def sources_of_kernels(package: Path) -> list[Path]:
    """Return the files of `package` with compiled functions, and with what these need: constants, tuples, functions."""
    sources = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    kernels = {file: text for file, text in sources.items() if "@compiled" in text or "@inlined" in text}
    imported = {
        (package.joinpath(*module.split(".")).with_suffix(".py"), name)
        for text in kernels.values()
        for module, names in _IMPORTS.findall(text)
        for name in re.findall(r"\w+", names)
    }
    values = {
        file
        for file, name in imported
        if _CONSTANT.fullmatch(name) or f"class {name}(NamedTuple)" in sources.get(file, "")
    }
    plain = {
        package.joinpath(*room.split("."), f"{module}.py")
        for text in kernels.values()
        for room, module in _MODULES.findall(text)
        if module in _PLAIN.findall(text)
    }
    return sorted({*kernels, *values, *plain} & sources.keys())


def _writable(parent: Path, name: str) -> Path:
    """Return the folder `name` in `parent`; if it is new, make it and remove all but the newest few others."""
    folder = parent / name
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(parent.glob("kernels-*"), key=lambda other: other.stat().st_mtime)
        for old in others[:-_KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
    (folder / ".writable").touch()
    return folder
