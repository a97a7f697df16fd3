"""Some of the kills of tools/save_kills.py; the command tries many more, at random."""

from __future__ import annotations

import pytest

from tools.save_kills import Trial, run

pytestmark = pytest.mark.timeout(300)

TRIALS = [
    Trial(
        victim="rank", rank=0, signal="SIGSTOP", save="middle", moment="renames", delay_s=0.0, beside=False,
        launched=True,
    ),
    Trial(
        victim="rank", rank=1, signal="SIGKILL", save="after a signal", moment="writes", delay_s=0.0, beside=True,
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
    Trial(
        victim="planner", rank=0, signal="SIGSTOP", save="middle", moment="names", delay_s=0.0, beside=True,
        launched=False,
    ),
]  # fmt: skip


def test_whoever_is_killed_or_stopped_while_saving_the_job_ends_or_goes_on_and_resumes_equal(
    tmp_path, capfd, no_compile
):
    checks = run(TRIALS, tmp_path)
    assert checks.wrong == [], capfd.readouterr().out
    assert len(checks.end_seconds) == 4, "all but the planner's end their job"
    assert len([folder for folder in tmp_path.glob("trial_*") if (folder / "struck").exists()]) == len(TRIALS)
