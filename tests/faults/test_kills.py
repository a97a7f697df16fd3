"""What the tools do that kill real jobs: a few kills at night; the commands try many more, at random."""

import argparse
import json
import re
from pathlib import Path

import pytest

from tools import kill_times, soak
from tools.save_kills import Trial, run

# --- tools.save_kills


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
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trials", [TRIALS, MORE_TRIALS], ids=["one", "more"])
def test_whoever_is_killed_or_stopped_while_saving_the_job_ends_or_goes_on_and_resumes_equal(
    trials, tmp_path, capfd, no_compile
):
    checks = run(trials, tmp_path)
    assert checks.wrong == [], capfd.readouterr().out
    num_ending = len([trial for trial in trials if trial.victim != "planner"])
    assert len(checks.end_seconds) == num_ending, "all but the planner's end their job"
    assert len([folder for folder in tmp_path.glob("trial_*") if (folder / "struck").exists()]) == len(trials)


# --- tools.kill_times: the figures of docs/design.md come from more


@pytest.mark.nightly
def test_real_jobs_end_soon_after_a_kill_and_say_so_in_one_line(capfd, no_compile):
    code = kill_times.main(["--kills", "2", "--start-s", "0.5", "--seed", "2"])
    said = capfd.readouterr().out
    assert code == 0, said
    starting, training, *rest = said.splitlines()
    first, second, found = json.loads(starting), json.loads(training), json.loads("\n".join(rest))
    assert (first["launcher"], first["iteration"]) == ("torchrun", 0)
    assert second["launcher"] == "none"
    assert second["iteration"] >= 3
    (line,) = second["said"]
    assert int(re.search(r"iteration (\d+)", line)[1]) >= second["iteration"]
    ends_s = {one["launcher"]: one["last_rank_ended_after_s"] for one in (first, second)}
    assert found["last_rank_ended_after_s"] == {launcher: [end_s, end_s] for launcher, end_s in ends_s.items()}
    assert max(ends_s.values()) < kill_times.LIMIT_S


# --- tools.soak


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
