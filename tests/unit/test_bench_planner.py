"""`make bench-planner`: it runs, its JSON is whole, its tables are up to date."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.planner import h100
from benchmarks.planner.__main__ import DOCS, SECTIONS, main
from benchmarks.planner.frozen import frozen_cases, frozen_problem, lengths_of
from benchmarks.planner.report import inserted


@pytest.mark.nightly
def test_quick_run(tmp_path):
    pytest.importorskip("pulp", reason="the FlexSP peer needs it")
    main(["--quick", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "planner.json").read_text())
    assert set(found) == set(SECTIONS)
    for section in SECTIONS:
        assert set(found[section]["measured"]) == {"date", "cpu", "cores", "versions"}

    rows = found["frozen"]["cases"]
    assert [row["pp"] for row in rows] == [4, 1] or [row["pp"] for row in rows] == [1, 4]
    for row in rows:
        assert row["bound_s"] <= min(row["fast_s"], row["thorough_s"])
        others = [row[f"{name}_s"] for name in ("static", "balanced", "megatron_dev", "megatron_0161")]
        assert max(row["fast_s"], row["thorough_s"]) <= min(seconds for seconds in others if seconds)
        assert row["fast_ms"] > 0
    assert len(found["frozen"]["tiny"]) == 3
    assert {"figure", "goal", "reached", "unit", "is_met"} == set(found["frozen"]["goals"][0])

    (row,) = found["h100"]["cases"]
    assert row["bound_s"] <= row["fast_s"] <= min(row[f"{name}_s"] for name in ("static", "balanced", "megatron_dev"))
    assert row["busy"] + row["pipeline_bubble"] + row["cp_wait"] + row["dp_wait"] == pytest.approx(1)
    assert row["pipeline_bubble"] > 0

    rows = found["exchanges"]["cases"]
    assert [row["heads"] for row in rows] == ["MHA", "GQA"]
    for row in rows:
        assert row["all_bound_s"] <= min(row["all_s"], row["all_thorough_s"]) <= row["ring_s"]
    (row,) = found["exchanges"]["chosen"]
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["all_s"] < row["ring_s"]

    rows = found["published"]["cases"]
    assert len(rows) == 2
    for row in rows:
        others = [row[f"{name}_tflops"] for name in ("static", "balanced", "megatron-dev")]
        assert max(others) <= row["dynamic_tflops"] < 990, "more than the device's peak"

    for row in found["growth"]["curves"]:
        assert all(milliseconds > 0 for _, _, milliseconds in row["points"])
    (row,) = found["compared"]["cases"]
    assert row["bound_s"] <= min(row["fast_s"], row["wlb_s"], row["flexsp_s"])

    document = (tmp_path / "figures" / "planner.md").read_text()
    assert "| case | seed |" in document
    assert document.count("Measured 20") == len(SECTIONS)


def test_lengths_of_all_frozen_cases():
    cases = frozen_cases()
    assert len(cases) == 49
    for case in cases:
        lengths = lengths_of(case)  # checks the sum
        assert len(lengths) == case["num_samples"]
        assert 64 <= lengths.min() <= lengths.max() <= case["max_seqlen"]


def test_settings_fit_into_the_memory_of_the_device():
    names = [h100.problem_of(setting).name for setting in h100.SETTINGS]  # refuses a limit that does not fit
    assert len(names) == len(set(names)) >= 30


@pytest.mark.nightly
def test_the_tables_are_those_of_todays_planner():
    """Plans depend on nothing but their inputs: a planner that plans otherwise than the tables say shows in seconds.

    Refactorings that plan the same need no new tables. Milliseconds are not compared.
    """
    recorded = json.loads((DOCS / "planner.json").read_text(encoding="utf-8"))
    fast_s = {f"{row['case']} seed {row['seed']}": row["fast_s"] for row in recorded["frozen"]["cases"]}
    fast_s |= {row["name"]: row["fast_s"] for row in recorded["h100"]["cases"]}
    problems = {
        f"{case['case']} seed 0": frozen_problem(case["case"], case, lengths_of(case))
        for case in frozen_cases()
        if case["seed"] == 0
    }
    problems |= {setting.name: h100.problem_of(setting) for setting in h100.SETTINGS}
    stale = []
    for name, problem in problems.items():
        if len(problem.seqlens) <= 2048:
            now_s = problem.seconds(problem.planned().plan)
            if not math.isclose(now_s, fast_s.get(name, math.inf), rel_tol=1e-6):
                stale.append(f"{name}: {fast_s.get(name)} -> {now_s} s")
    assert len(problems) > 50
    assert not stale, "docs/figures/planner.md is older than the planner, run `make bench-planner`: " + "; ".join(stale)


def test_a_table_needs_its_place():
    assert inserted("a <!-- begin x -->old<!-- end x --> b", {"x": "new"}) == (
        "a <!-- begin x -->\nnew\n<!-- end x --> b"
    )
    with pytest.raises(ValueError, match="0 places for table 'y'"):
        inserted("nothing", {"y": "new"})
