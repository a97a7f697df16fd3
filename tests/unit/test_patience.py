"""Limits count seconds in which a test computed, or had nothing to compute: not those in which it waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests import patience


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


SPIN = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="only Linux counts who waits for a core")
def test_what_children_compute_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        computed_ns, _ = patience.counts_of(os.getpid())[str(child.pid)]
        child.kill()
    assert computed_ns > 0.9e8


def test_what_hangs_meets_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise TimeoutError

    monkeypatch.setattr(patience, "_WAKE_EVERY_S", 0.05)
    patience.limit(0.1, end)
    with pytest.raises(TimeoutError):
        time.sleep(60)
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["sleep", "60"], timeout=0.1)
