"""A short soak; the long one is a command, tools/soak.py."""

import json

import pytest

from tools import soak

pytestmark = pytest.mark.slow


def test_a_run_with_random_kills_trains_what_an_undisturbed_one_trains(capsys):
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
