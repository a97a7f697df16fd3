"""Two kills of real jobs; the figures of docs/runtime.md come from more, with tools/kill_times.py."""

import json
import re

import pytest

from tools import kill_times


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
