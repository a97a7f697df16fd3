"""Tests on forked workers: each runs once, reports come back, and a worker that dies fails its test alone."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.forked_workers import run_on_workers

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    run_on_workers(session, 2, lambda: "done", lambda said: print("told", said))
    return True
"""
FILE = """
import os, time, pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    yield tmp_path_factory.mktemp("x")

def test_first(made, tmp_path): (tmp_path / "a").write_text("a")
def test_says(capfd):
    os.system("echo heard")
    assert capfd.readouterr().out == "heard\\n"
def test_fails():
    print("said by NAME")
    assert 1 == 2
def test_dies():
    if "NAME" == "b":
        os._exit(7)
def test_after_a_death(made): assert made.is_dir()
@pytest.mark.skip(reason="not now")
def test_skipped(): pass
"""


def start(folder: Path, files: dict[str, str]) -> subprocess.Popen[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder), "-c", "/dev/null", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_each_test_runs_once_and_a_death_fails_one_test(tmp_path: Path) -> None:
    out, _ = start(tmp_path, {name: FILE.replace("NAME", name) for name in "abc"}).communicate(timeout=120)
    assert "4 failed, 11 passed, 3 skipped" in out, out
    failed = set(re.findall(r"^FAILED .*test_(\w)\.py::(\w+)", out, re.MULTILINE))
    assert failed == {*((name, "test_fails") for name in "abc"), ("b", "test_dies")}
    assert "the process that ran this test ended with status 7" in out
    assert all(f"said by {name}" in out for name in "abc")
    assert out.count("told done") >= 2


def test_an_interrupt_ends_all_workers(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    text = f"""
        import os, pathlib, time
        def test_waits():
            with open({str(begun)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(600)
    """
    running = start(tmp_path, dict.fromkeys("ab", text))
    while not begun.exists() or begun.read_text().count("\n") < 2:
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 2, out
    for pid in begun.read_text().split():
        assert not Path(f"/proc/{pid}").exists()
