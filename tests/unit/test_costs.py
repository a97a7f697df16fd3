"""Names in tests/costs.json are names of tests and fixtures: one that was renamed would be quick for ever."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_name_is_a_test() -> None:
    costs_s = json.loads((ROOT / "tests" / "costs.json").read_text())
    assert len(costs_s) > 100
    for name, cost_s in costs_s.items():
        path, function = name.split("::")
        where = ROOT / path
        text = (where / "conftest.py" if where.is_dir() else where).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, flags=re.MULTILINE), f"{name}: `make costs` writes the file anew"
        assert cost_s > 0


SHARED = """
import time, pytest

def compute(seconds):
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass

@pytest.fixture(scope="module")
def inner():
    compute(0.3)

@pytest.fixture(scope="module")
def outer(inner):
    compute(0.2)

@pytest.fixture
def own():
    compute(0.1)

@pytest.mark.parametrize("case", [0, 1])
def test_first(outer, own, case):
    assert case
"""


def test_a_shared_set_up_counts_once_and_a_failure_keeps_nothing_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(SHARED)
    words = ["-p", "tests.conftest", "-c", str(tmp_path / "none.ini"), "--measure-costs", str(tmp_path / "costs.json")]
    (tmp_path / "none.ini").touch()
    command = [sys.executable, "-m", "pytest", "-q", *words, str(tmp_path / "test_shared.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    found = json.loads((tmp_path / "costs.json").read_text())
    assert found.pop("test_shared.py::test_first") < 0.3
    assert found == {"test_shared.py::inner": 0.3, "test_shared.py::outer": 0.2}
