"""Whoever waits for the compiler is told why, once, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

KERNELS = """
from dynamic_cp._jit import compiled

@compiled
def add(a, b):
    return a + b

@compiled
def multiply(a, b):
    return a * b
"""
PROGRAM = """
import sys
from pathlib import Path
from dynamic_cp import _jit

cache = None if sys.argv[1] == "-" else Path(sys.argv[1])
_jit._cache_folder = lambda: cache
import kernels, numba

numba.njit(lambda a: a + 1)(3)  # another package's
assert kernels.add(2, 3) == 5
assert "multiply" not in sys.argv or kernels.multiply(2.0, 3.0) == 6
"""
FIRST = "compiling the planner once, about 30 s\n"


def said(folder: Path, cache: Path | str, *more: str) -> str:
    (folder / "kernels.py").write_text(KERNELS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache), *more],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def test_the_first_compilation_is_announced(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    assert said(tmp_path, cache) == FIRST
    assert said(tmp_path, cache) == "", "it is on disk"
    # Others that compile at the same time need not say it, too.
    assert said(tmp_path, cache, "multiply") == ""
    for file in cache.rglob("*multiply*"):
        file.unlink()
    os.utime(cache / ".announced", (0, 0))
    assert said(tmp_path, cache, "multiply") == "compiling more of the planner once, some seconds\n"


def test_without_a_place_on_disk_every_start_says_so(tmp_path: Path) -> None:
    for _ in range(2):
        assert (
            said(tmp_path, "-")
            == "compiling the planner, about 30 s at every start: no folder to keep it is writable\n"
        )
