"""Some of the kills of tools/save_kills.py; the command tries many more, at random."""

from __future__ import annotations

import pytest

from tools.save_kills import Trial, run

pytestmark = pytest.mark.timeout(300)


def trial(victim: str, rank: int, signal: str, save: str, moment: str, **how: object) -> Trial:
    return Trial(
        victim=victim, rank=rank, signal=signal, save=save, moment=moment,
        **{"delay_s": 0.0, "beside": False, "launched": False, **how},
    )  # fmt: skip


TRIALS = [trial("rank", 1, "SIGKILL", "after a signal", "writes", beside=True, launched=True)]
MORE_TRIALS = [
    trial("planner", 0, "SIGSTOP", "middle", "names", beside=True),
    trial("rank", 0, "SIGSTOP", "middle", "renames", launched=True),
    trial("writer", 1, "SIGSTOP", "last", "writes", beside=True),
    trial("worker", 0, "SIGSTOP", "middle", "plans", delay_s=0.01),
]


@pytest.mark.nightly
@pytest.mark.parametrize("trials", [TRIALS, MORE_TRIALS], ids=["one", "more"])
def test_whoever_is_killed_or_stopped_while_saving_the_job_ends_or_goes_on_and_resumes_equal(
    trials, tmp_path, capfd, no_compile
):
    checks = run(trials, tmp_path)
    assert checks.wrong == [], capfd.readouterr().out
    num_ending = len([trial for trial in trials if trial.victim != "planner"])
    assert len(checks.end_seconds) == num_ending, "all but the planner's end their job"
    assert len([folder for folder in tmp_path.glob("trial_*") if (folder / "struck").exists()]) == len(trials)
