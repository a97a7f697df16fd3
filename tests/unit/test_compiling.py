"""Whoever waits for the compiler is told why, once, and only then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamic_cp import _jit
from dynamic_cp._jit import OneCompiler

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
TAKES = "compiling the planner, up to two minutes of one core"


def said(folder: Path, cache: Path | str, *more: str, before: str = "") -> str:
    (folder / "kernels.py").write_text(KERNELS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("import kernels", before + "import kernels"), str(cache), *more],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


@pytest.mark.nightly
def test_the_first_compilation_is_announced(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    assert said(tmp_path, cache) == f"{TAKES}, once: it is kept in {cache}\n"
    assert said(tmp_path, cache) == "", "it is on disk"
    # Others that compile at the same time need not say it, too.
    assert said(tmp_path, cache, "multiply") == ""
    for file in cache.rglob("*multiply*"):
        file.unlink()
    os.utime(cache / ".announced", (0, 0))
    assert said(tmp_path, cache, "multiply") == (
        "compiling more of the planner, once: this job needs loops that no job before it needed\n"
    )


@pytest.mark.nightly
def test_without_a_place_on_disk_every_start_says_so(tmp_path: Path) -> None:
    for _ in range(2):
        assert said(tmp_path, "-") == f"{TAKES}, at every start: no folder to keep it is writable\n"


def test_who_compiles_for_long_says_what(tmp_path: Path) -> None:
    more = "_jit._SPEAK_EVERY_S = -1.0\n"
    lines = said(tmp_path, tmp_path, "multiply", before=more).splitlines()
    assert lines[1:] == ["compiling the planner: 1 loops done, now kernels.multiply"]


SLOW = """
import sys, time
from pathlib import Path
from dynamic_cp import _jit

_jit._cache_folder = lambda: Path(sys.argv[1])
import kernels, numba

class Slow(numba.core.event.Listener):
    def on_start(self, event):
        print("compiles", event.data["dispatcher"].py_func.__name__, flush=True)
        time.sleep(1.0)  # long enough for the others to want the same

    def on_end(self, event):
        pass

numba.core.event.register("numba:compile", Slow())
assert kernels.twice(3) == 9
"""


@pytest.mark.nightly
def test_of_processes_that_start_together_one_compiles_and_literals_make_no_variants(tmp_path: Path) -> None:
    nested = "@compiled\ndef twice(a):\n    return add(a, 1) + add(a, 2) + multiply(add(a, a), 0)\n"
    (tmp_path / "kernels.py").write_text(KERNELS + nested)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", SLOW, str(tmp_path)]
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=100)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0, 0]
    assert sorted("".join(outputs).split()) == sorted(["compiles"] * 3 + ["twice", "add", "multiply"])


def test_who_dies_compiling_leaves_the_right_to_others(tmp_path: Path) -> None:
    first, second = OneCompiler(tmp_path), OneCompiler(tmp_path)
    assert not first.take()
    process = os.fork()
    if process == 0:
        os._exit(0)  # holds the same file open until it ends
    assert not first.take(), "it has it"
    first.give_back()
    assert not second.take(), "nobody had to be waited for"
    second.give_back()
    os.waitpid(process, 0)


def test_an_edit_of_a_constant_that_kernels_import_is_another_folder(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    kernel = tmp_path / "kernel.py"
    numbers, others = tmp_path / "room" / "numbers.py", tmp_path / "room" / "others.py"
    numbers.write_text("STEP = 1\n")
    others.write_text("def add(): ...\n")
    for text in (
        "from dynamic_cp.room.numbers import STEP\nfrom dynamic_cp.room.others import add\n@compiled\n",
        "from dynamic_cp.room.numbers import (\n    STEP,\n    Steps,\n)\n@compiled\n",
    ):
        kernel.write_text(text)
        assert _jit.sources_of_kernels(tmp_path) == [kernel, numbers]
    plain = tmp_path / "plain.py"
    plain.write_text("def add(): ...\n")
    kernel.write_text("from dynamic_cp import plain\nadd = inlined(plain.add)\n@compiled\n")
    assert _jit.sources_of_kernels(tmp_path) == [kernel, plain]
    kernel.write_text("from dynamic_cp.room.numbers import STEP\n")
    assert _jit.sources_of_kernels(tmp_path) == []
