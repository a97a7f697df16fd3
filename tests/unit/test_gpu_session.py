"""The commands for thirty minutes of a GPU: each part starts, ends within its limit, and leaves its log."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_session import __main__ as session
from benchmarks.gpu_session.parts import COMMAND_S, COMMANDS, HERE, OUTPUT, Part
from dynamic_cp.plans import serialize

ROOT = Path(__file__).parents[2]
PARTS = [(command, name) for command, parts in COMMANDS.items() for name in parts]


def python(code: str, limit_s: int = 60, **more: object) -> Part:
    return Part((sys.executable, "-c", code), limit_s, **more)  # type: ignore[arg-type]


def test_parts_run_one_after_the_other_whatever_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One ends well, one fails, one hangs with a child that holds its log, one cannot be started."""
    hangs = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
    parts = {
        "well": python(f"open('{OUTPUT}/result', 'w').write('here'); print('done')"),
        "fails": python("print('so far'); raise SystemExit('no such kernel')"),
        "hangs": python(f"{hangs}print('waits', flush=True); time.sleep(99)", limit_s=3),
        "missing": Part(("/no/such/program",), 9),
        "last": python("print('after all')"),
    }
    started = time.monotonic()
    assert not session.run(parts, tmp_path)
    assert time.monotonic() - started < 60
    found = json.loads((tmp_path / "parts.json").read_text())
    status = {name: one["status"] for name, one in found.items()}
    assert status == {"well": "ok", "fails": "exit 1", "hangs": "out of time", "missing": "exit 127", "last": "ok"}
    assert (tmp_path / "result").read_text() == "here"
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in parts}
    assert logs["fails"].splitlines() == ["so far", "no such kernel"]
    assert logs["hangs"].strip() == "waits"
    assert "No such file" in logs["missing"]
    printed = capsys.readouterr().out
    assert "no such kernel" in printed
    assert "hangs: out of time after" in printed


def test_a_part_can_be_repeated_and_others_keep_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "gain", {"one": python("print(1)"), "two": python("raise SystemExit(3)")})
    assert session.main(["gain", "--output", str(tmp_path)]) == 2
    assert session.main(["gain", "--output", str(tmp_path), "--only", "one"]) == 0
    assert set(json.loads((tmp_path / "parts.json").read_text())) == {"one", "two"}
    with pytest.raises(SystemExit):
        session.main(["gain", "--output", str(tmp_path), "--only", "three"])


def test_a_command_takes_ten_minutes_at_most() -> None:
    for command, parts in COMMANDS.items():
        assert 60 < sum(part.limit_s for part in parts.values()) <= COMMAND_S, command


@pytest.mark.parametrize(("command", "name"), PARTS)
def test_what_a_part_runs_is_there(command: str, name: str) -> None:
    words = COMMANDS[command][name].words
    assert words[0] == sys.executable
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    for word in words[3:]:
        for path in word.rpartition("=")[2].split(","):
            if path.endswith(".py") or str(HERE) in path:
                assert (ROOT / path).is_file(), path


def test_plans_of_the_gain_are_read() -> None:
    for path in (HERE / "plans").glob("*.json"):
        assert serialize.loads(path.read_text(encoding="utf-8")).num_tokens > 0


def test_hooks_change_kernels_of_their_part_only(tmp_path: Path) -> None:
    """The variables do nothing without the folder of the hooks."""
    asks = (
        "import megatron.dynamic_cp.attention.linear.kernels as k; "
        "print(k.choose_linear_kernel('cuda', None).name, k.why_not('cuda', None))"
    )
    changed = python(asks, hooks=("SESSION_PORTABLE",))
    assert session.run_part(changed, tmp_path, tmp_path / "log", None)[1].split()[-2:] == ["portable", "None"]
    status, log = session.run_part(python(asks), tmp_path, tmp_path / "log", None)
    assert status == "exit 1"
    assert "AttributeError" in log


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "name"), [one for one in PARTS if "pytest" in COMMANDS[one[0]][one[1]].words])
def test_expressions_choose_tests(command: str, name: str) -> None:
    words = [*COMMANDS[command][name].words, "--collect-only"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
def test_scripts_run_on_a_cpu(tmp_path: Path) -> None:
    plans = [str(HERE / "plans" / f"tiny-{which}.json") for which in ("static", "dynamic")]
    lanes = f"--device cpu --shrink 4 --repeats 1 --output {tmp_path}/gain.json tiny={','.join(plans)}"
    times = f"--device cpu --tokens 64 --samples 2 --output {tmp_path}/times.json"
    for module, words in (("lanes", lanes), ("linear_times", times)):
        command = [sys.executable, "-m", f"benchmarks.gpu_session.{module}", *words.split()]
        assert subprocess.run(command, cwd=ROOT, timeout=280).returncode == 0
    assert json.loads((tmp_path / "gain.json").read_text())["plans"]["tiny"]["gain_predicted"] > 1
    assert len(json.loads((tmp_path / "times.json").read_text())) == 14
