"""How tests run: workers report back or fail one test alone, and limits leave out waits for a core."""

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os, sys, pytest
from tests.forked_workers import run_on_workers

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    run_on_workers(session, 2, lambda: "done", lambda said: print("told", said))
    return True

@pytest.fixture(scope="session", autouse=True)
def ends():
    yield
    print(f"session over in {os.getpid()}", file=sys.__stderr__)
"""
FILE = """
import os, time, warnings, pytest
from tests import patience

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
        if os.fork():
            os._exit(7)
        while not os.path.exists("RELEASED"):  # it has what the worker had open
            time.sleep(0.05)
        os._exit(0)
def test_warns(): warnings.warn("take care of NAME")
def test_clock_is_of_this_process(): assert patience._clock._root == os.getpid()
def test_after_a_death(made): assert made.is_dir()
@pytest.mark.skip(reason="not now")
def test_skipped(): pass
"""


def start(folder: Path, files: dict[str, str], *words: str) -> subprocess.Popen[str]:
    """Run the files; what pytest says goes to a file, which a process that outlives it may keep open."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    words = ("-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", "/dev/null", *words)
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *words, str(folder)], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip


def end(running: subprocess.Popen[str], folder: Path) -> str:
    running.wait(timeout=120)
    return (folder / "said").read_text()


def test_each_test_runs_once_and_a_death_fails_one_test(tmp_path: Path) -> None:
    """Though a process lives on that the dead worker has forked."""
    released = tmp_path / "released"
    text = FILE.replace("RELEASED", str(released))
    try:
        out = end(start(tmp_path, {name: text.replace("NAME", name) for name in "abc"}), tmp_path)
    finally:
        released.touch()
    assert "4 failed, 17 passed, 3 skipped" in out, out
    failed = set(re.findall(r"^FAILED .*test_(\w)\.py::(\w+)", out, re.MULTILINE))
    assert failed == {*((name, "test_fails") for name in "abc"), ("b", "test_dies")}
    assert "the process that ran this test ended with status 7" in out
    assert all(f"said by {name}" in out and f"UserWarning: take care of {name}" in out for name in "abc")
    ended = re.findall(r"session over in (\d+)", out)
    assert len(ended) == len(set(ended)) == out.count("told done") == 2


@pytest.mark.parametrize(
    ("computed_s", "waited_s", "counted_s"),
    [
        (0.0, 0.0, 10.0),  # it hangs, or sleeps
        (10.0, 0.0, 10.0),
        (1.0, 9.0, 1.0),  # one of ten on a core
        (2.0, 38.0, 2.0),  # four ranks, which all starve
        (20.0, 20.0, 10.0),  # four ranks on two cores of their own
        (0.5, 0.5, 9.5),  # it mostly sleeps
    ],
)
def test_seconds_count_unless_a_core_was_waited_for(computed_s: float, waited_s: float, counted_s: float) -> None:
    assert patience.seconds_that_count(10.0, computed_s, waited_s) == counted_s


def test_what_hangs_meets_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise TimeoutError

    monkeypatch.setattr(patience, "_WAKE_EVERY_S", 0.05)
    patience.limit(0.1, end)
    with pytest.raises(TimeoutError):
        time.sleep(60)
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["sleep", "60"], timeout=0.1)
