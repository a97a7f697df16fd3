"""A short soak, each night; the long one is a command, tools/soak.py."""

import argparse
import json
from pathlib import Path

import pytest

from tools import soak


@pytest.mark.parametrize(
    ("fds", "wrong"),
    [
        ([90, *[100] * 38, 99], []),  # 99: the other rank has left
        ([90, *[100] * 29, *[101] * 10], ["rank 0: fds 100 -> 101"]),
        ([*range(100, 140)], ["rank 0: fds 120 -> 138"]),
    ],
)
def test_what_is_held_at_the_end_is_what_was_held_before(fds, wrong):
    watch = soak.Soak(options=argparse.Namespace(steps=40, max_slope_mb=1.0), folder=Path())
    held = {"rss_mb": 500.0, "planner_rss_mb": None, "threads": 70, "children": 1}
    soak.growth(watch, [{step: held | {"fds": fds[step - 1]} for step in range(1, 41)}])
    assert watch.wrong == wrong


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_planners")
def test_a_run_with_random_kills_trains_what_an_undisturbed_one_trains(capsys, no_compile):
    # Memory says nothing after so few steps.
    words = ["--steps", "40", "--kills", "5", "--ranks", "2", "--save-interval", "5", "--max-slope-mb", "1000"]
    code = soak.main(words)
    said = capsys.readouterr().out
    assert code == 0, said
    found = json.loads(said[said.index("{") :])
    assert [kill.split()[0] for kill in found["kills"]] == ["rank", "rank", "planner", "rank", "worker"]
    assert found["resumes"] == 4
    assert found["step_records_compared"] >= 2 * 40
    assert found["final_loss"][0] == found["final_loss"][1]
