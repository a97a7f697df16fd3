"""How a launcher ends: one error of the user is one line and few behind it; what is a bug keeps its tracebacks."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.integrations import torchrun
from tests.trainer.commandline import NO_COMPILE, command_line

ROOT = Path(__file__).parents[2]
MOST_LINES = 6
SMALL = "--num-layers 2 --num-workers 0 --mock-data"

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs torchrun as where the package is installed: with this tree's entry points."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", str(folder)],
        cwd=ROOT, check=True, capture_output=True, timeout=120,
    )  # fmt: skip

    def run(*words: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "localhost"]
        return subprocess.run(
            [*command, "--nproc-per-node", str(ranks), *words],
            capture_output=True, text=True, timeout=240, cwd=folder, check=False,
            env={**os.environ, **NO_COMPILE, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--tensor-model-parallel-size 3", id="before the ranks meet"),
        pytest.param(
            "--dynamic-cp --max-seqlen-per-dp-cp-rank 128 --load nowhere/at/all --exit-on-missing-checkpoint",
            id="after they met",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_few_lines_stand_behind_an_error(launch: Launch, words: str) -> None:
    done = launch(str(ROOT / "pretrain_gpt.py"), *command_line(SMALL, words))
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    (first,) = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    behind = lines[first + 1 :]
    assert 1 <= len(behind) <= MOST_LINES, done.stderr
    assert "Traceback" not in done.stderr
    assert "pretrain_gpt.py ended with exit code 2 of rank" in behind[-1]
    assert behind[-1].endswith(lines[first].removeprefix("error: ")), "a log of the launcher alone has the error, too"


BUG = """
import sys
from megatron.trainer.ending.exits import exit_code_of, leave

def run():
    raise RuntimeError("a bug")

leave(exit_code_of(run))
"""


def test_a_bug_keeps_its_tracebacks(launch: Launch, tmp_path: Path) -> None:
    script = tmp_path / "bug.py"
    script.write_text(BUG, encoding="utf-8")
    done = launch(str(script), ranks=1)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") >= 2, "of the rank and of the launcher"
    assert 'raise RuntimeError("a bug")' in done.stderr
    assert "ChildFailedError" in done.stderr


def failure(code: int, text: str | None) -> Any:
    message: Any = "Signal" if text is None else {"message": text, "extraInfo": {}}
    return SimpleNamespace(exitcode=code, message=message)


class ChildFailedError(Exception):
    """As torch's."""

    def __init__(self, failures: dict[int, Any]) -> None:
        super().__init__("FAILED")
        self.name, self.failures = "pretrain_gpt.py", failures


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ({0: failure(2, "error: no"), 3: failure(2, "error (rank 3): no")}, "code 2 of ranks 0, 3: error: no"),
        ({1: failure(-15, None), 2: failure(2, "error (rank 2): no")}, "code 2 of rank 2: error (rank 2): no"),
        ({0: failure(2, "error: no"), 1: failure(1, "rank 1 failed: RuntimeError()")}, None),
        ({0: failure(2, "error: no"), 1: failure(-9, None)}, None),
        ({0: failure(2, "ValueError: of another program")}, None),
        ({0: failure(2, None)}, None),
    ],
)
def test_only_errors_of_the_user_end_in_a_line(
    failures: dict[int, Any], told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: before.append(error))
    assert callable(torchrun.end_in_a_line())
    error = ChildFailedError(failures)
    sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert (said == "") == (told is None) == (before == [error])
    assert told is None or said.endswith(f"{told}\n")
    other = RuntimeError("no launcher's")
    sys.excepthook(type(other), other, None)
    assert before[-1] is other
