"""Long work shows that it lives, what was ended shows what it has, and a sweep goes on from where it was ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamic_cp import __version__
from dynamic_cp.decide import cli
from dynamic_cp.decide.cli import plan, tables
from dynamic_cp.decide.cli.app import COMMANDS, TRAINING_COMMANDS
from dynamic_cp.decide.cli.plan import how_long
from dynamic_cp.decide.first_day import command as first_day
from dynamic_cp.decide.first_day.day import PARTS, Part, State
from dynamic_cp.decide.sweep import SweepJob, sweep
from dynamic_cp.decide.sweep import search as race
from dynamic_cp.decide.sweep.journal import Journal
from dynamic_cp.decide.sweep.search import SweepEndedError
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.serialize import dumps
from dynamic_cp.types import Topology
from tests.unit.command.test_sweep import JOB, SPACE
from tests.unit.support import plan_of

WORDS = (
    "sweep --lengths sft_short --global-batch-size 8 --batches 2 --gpus 8 --tp 4 --pp 1 --recompute none --jobs 1 "
    "--max-tokens-per-rank 2048,4096 --policy dynamic,balanced"
)


def test_without_a_terminal_a_line_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tables.FIRST_LINE_S <= 10, "a step count before work that takes longer"
    assert tables.EVERY_S <= 30
    monkeypatch.setattr(tables, "FIRST_LINE_S", 0.05)
    monkeypatch.setattr(tables, "EVERY_S", 0.05)
    with tables.progress("sweeping") as steps:
        steps(3, 8, "first batch")
        time.sleep(0.3)
        steps(7, 8, "first batch")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("dynamic-cp: sweeping: first batch, 3 of 8, ")
    assert lines[-1].startswith("dynamic-cp: sweeping: first batch, 7 of 8, ")
    assert 4 <= len(lines) <= 13
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "it ends with the work"


INSTANT, OF_RANKS = {"hardware", "completion"}, {"profile"}
READING = """lengths nowhere.txt
plan --lengths nowhere.txt --lanes 2
check plan.json --lengths nowhere.txt
simulate --lengths nowhere.txt --lanes 2
sweep --lengths nowhere.txt --gpus 2
trace --run nowhere --output trace.json
report --run nowhere --output report.html
doctor --quick
first-day --output day --ranks 2
weights import nowhere --output new""".splitlines()
"""Commands that soon end, most while they read their input."""


def test_every_command_shows_that_it_lives_from_its_input_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {words.split()[0] for words in READING} | INSTANT | OF_RANKS == {*COMMANDS, *TRAINING_COMMANDS}
    (tmp_path / "plan.json").write_text(dumps(plan_of([[(0, 1)]], Topology(num_lanes=1))))
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    monkeypatch.setattr(tables, "_lines", lambda what: nullcontext(shown.append(what) or tables.say_nothing))
    monkeypatch.setattr(first_day, "_gpus", list)
    monkeypatch.setattr(Part, "run", lambda part, timeout_s: State(inputs="", seconds=1.0, why="nothing ran"))
    for words in READING:
        shown.clear()
        assert cli.main(words.split()) == (0 if "doctor" in words else 2)
        assert len(shown) == (len(PARTS) if "first-day" in words else 1), words


@pytest.mark.parametrize(
    ("lanes", "samples", "plans", "says"),
    [
        (
            1 << 20,
            1024,
            21,
            "up to 21 plans of 1048576 lanes and 1024 samples will take about 7 minutes of a core; with",
        ),
        (4096, 32768, 1, ""),
    ],
)
def test_a_plan_for_very_many_lanes_says_how_long_it_will_take(lanes: int, samples: int, plans: int, says: str) -> None:
    text = how_long(Topology(num_lanes=lanes), samples, plans)
    assert text.startswith(says)
    assert bool(text) == bool(says)


def test_plans_of_a_limit_from_memory_are_as_many_as_allowed_cp_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(plan, "how_long", lambda topology, samples, num_plans: told.append(num_plans) or "")
    job = ["plan", "--lengths", "github", "--global-batch-size", "8", "--max-seqlen", "2048", "--lanes", "8"]
    assert cli.main([*job, "--max-dynamic-cp-size", "2"]) == 0
    assert cli.main([*job, "--max-tokens-per-rank", "2048"]) == 0
    assert told == [2, 1]


def test_a_sweep_says_what_is_tried_and_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    sweep(
        SPACE, JOB, policies=("dynamic", "balanced"), progress=lambda done, total, text: said.append(text),
        with_other_prices=False,
    )  # fmt: skip
    assert said[0] == "memory of layouts"
    assert "lower bounds (0 settings planned)" in said
    assert any("settings planned, best so far " in text and "(balanced)" in text for text in said)


def interrupt_after(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the planning of a setting be interrupted once `number` of them were planned."""
    planned, evaluate = [0], race.evaluate_first

    def evaluate_first(setting: Any, job: SweepJob) -> Any:
        if planned[0] == number:
            raise KeyboardInterrupt
        planned[0] += 1
        return evaluate(setting, job)

    monkeypatch.setattr(race, "evaluate_first", evaluate_first)


def test_a_sweep_that_was_ended_goes_on_and_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "sweep.jsonl")
    given: dict[str, Any] = {"policies": ("dynamic", "balanced"), "with_other_prices": False}
    whole = sweep(SPACE, JOB, **given)
    with monkeypatch.context() as patched:
        interrupt_after(5, patched)
        journal = Journal(path, JOB, __version__)
        with pytest.raises(SweepEndedError) as ended:
            sweep(SPACE, JOB, journal=journal, **given)
        journal.close()
    assert isinstance(ended.value.cause, KeyboardInterrupt)
    assert {name: len(point.batches_s) for name, point in ended.value.best.items()} == {"balanced": 1}
    with open(path, "ab") as file:
        file.write(b'{"of": "cut')  # as by a kill while it writes
    kept = Journal(path, JOB, __version__)
    before = len(kept)
    assert before > 5

    def least_s(setting: Any, job: SweepJob) -> float:
        raise AssertionError("bounds were kept")

    monkeypatch.setattr(race, "least_s", least_s)
    assert sweep(SPACE, JOB, journal=kept, **given) == whole
    kept.close()
    again = Journal(path, JOB, __version__)
    assert len(again) > before
    again.close()


def test_a_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "sweep.jsonl")
    Journal(path, JOB, "1").close()
    with pytest.raises(InvalidInputError, match=r"is of another job \(.*give the options that it was begun with"):
        Journal(path, replace(JOB, max_seqlen=9001), "1")
    with pytest.raises(InvalidInputError, match=r"is of another version \(1, this is 2\)"):
        Journal(path, JOB, "2")
    for text, says in (("812\n90\n", "line 1 is none of a sweep"), ("812", "is no file of a sweep")):
        Path(path).write_text(text, encoding="utf-8")
        with pytest.raises(InvalidInputError, match=says):
            Journal(path, JOB, "1")
        assert Path(path).read_text(encoding="utf-8") == text, "it is left as it was"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_an_ended_command_prints_what_it_has_and_the_next_goes_on(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search is slowed down so that the signal meets it."""
    path = tmp_path / "sweep.jsonl"
    slow = (
        "import sys, time\n"
        "from dynamic_cp.decide.sweep import search\n"
        "evaluate = search.evaluate_first\n"
        "def evaluate_first(setting, job):\n"
        "    point = evaluate(setting, job)\n"
        "    time.sleep(0.5)\n"
        "    return point\n"
        "search.evaluate_first = evaluate_first\n"
        "from dynamic_cp.decide import cli\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = [*WORDS.split(), "--resume", str(path)]
    running = subprocess.Popen(
        [sys.executable, "-c", slow, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "COLUMNS": "200"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip  # what runs in the background of a shell ignores SIGINT
    while not path.exists() or "evaluate_first" not in path.read_text(encoding="utf-8"):
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], err
    assert "Traceback" not in err
    assert "Ended before all settings were tried" in out
    assert "balanced" in out
    assert "1 of 2" in out, "batches that were planned"
    assert "torchrun --local-addr localhost --nproc-per-node 8 pretrain_gpt.py" in out
    assert f"the same command goes on from {path}" in " ".join(out.split())
    num_kept = len(path.read_text(encoding="utf-8").splitlines())
    assert num_kept >= 2

    results = []
    for more in (["--resume", str(path)], []):
        target = tmp_path / f"{len(more)}.json"
        assert cli.main([*WORDS.split(), *more, "--json", str(target)]) == 0
        capsys.readouterr()
        results.append(json.loads(target.read_text(encoding="utf-8")))
    assert results[0] == results[1]
    assert len(path.read_text(encoding="utf-8").splitlines()) > num_kept
