"""NVIDIA's Table 1: the two arms are launched as published, and their logs are summed up.

`table1/` holds the logs of one run of the job on 2 CPU ranks: GBS 8, samples of up to 512 tokens, 4 iterations.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "table1.py"
LOGS = Path(__file__).parent / "table1"


def show(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "show", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_means_leave_the_first_iteration_out() -> None:
    done = show(LOGS)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["github_bal", "static"], ["github_bal", "dynamic"]]
    elapsed = {}
    for arm, row in zip(("static", "dynamic"), rows, strict=True):
        fields = [
            line.split(" | ")
            for line in (LOGS / f"github_bal-{arm}.log").read_text().splitlines()
            if "elapsed time" in line
        ]
        assert len(fields) == 4
        elapsed[arm] = sum(float(one[2].rpartition(" ")[2]) for one in fields[1:]) / 3
        assert float(row[3]) == pytest.approx(elapsed[arm], abs=0.06)
        assert float(row[2]) == pytest.approx(sum(float(one[3].rpartition(" ")[2]) for one in fields[1:]) / 3, abs=6e-5)
        assert row[4] == "3"
    assert rows[0][5] == "1.00x"
    assert float(rows[1][5][:-1]) == pytest.approx(elapsed["static"] / elapsed["dynamic"], abs=0.006)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("| tokens: ", "| tokens: 1", 1), "the tokens of the iterations are"),
        (lambda text: text[: text.index(" iteration        2/")], "has 1 iteration lines"),
        (lambda text: text.replace("iteration        2/", "iteration        7/"), "([1, 7, 3, 4])"),
    ],
)
def test_logs_that_cannot_be_compared_are_refused(tmp_path: Path, change, said: str) -> None:
    shutil.copytree(LOGS, tmp_path / "logs")
    log = tmp_path / "logs" / "github_bal-dynamic.log"
    log.write_text(change(log.read_text(encoding="utf-8")), encoding="utf-8")
    done = show(tmp_path / "logs")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
