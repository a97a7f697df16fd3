"""Some of the kills of tools/save_kills.py; the command tries many more, at random."""

from __future__ import annotations

import pytest

from tools.save_kills import Trial, run

pytestmark = pytest.mark.timeout(300)

TRIALS = [
    Trial(
        victim="rank", rank=1, signal="SIGKILL", save="after a signal", moment="writes", delay_s=0.0, beside=True,
        launched=True,
    ),
]  # fmt: skip
MORE_TRIALS = [
    Trial(
        victim="planner", rank=0, signal="SIGSTOP", save="middle", moment="names", delay_s=0.0, beside=True,
        launched=False,
    ),
    Trial(
        victim="rank", rank=0, signal="SIGSTOP", save="middle", moment="renames", delay_s=0.0, beside=False,
        launched=True,
    ),
    Trial(
        victim="writer", rank=1, signal="SIGSTOP", save="last", moment="writes", delay_s=0.0, beside=True,
        launched=False,
    ),
    Trial(
        victim="worker", rank=0, signal="SIGSTOP", save="middle", moment="plans", delay_s=0.01, beside=False,
        launched=False,
    ),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("trials", [TRIALS, pytest.param(MORE_TRIALS, marks=pytest.mark.nightly)], ids=["one", "more"])
def test_whoever_is_killed_or_stopped_while_saving_the_job_ends_or_goes_on_and_resumes_equal(
    trials, tmp_path, capfd, no_compile
):
    checks = run(trials, tmp_path)
    assert checks.wrong == [], capfd.readouterr().out
    num_ending = len([trial for trial in trials if trial.victim != "planner"])
    assert len(checks.end_seconds) == num_ending, "all but the planner's end their job"
    assert len([folder for folder in tmp_path.glob("trial_*") if (folder / "struck").exists()]) == len(trials)
