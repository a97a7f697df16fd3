"""Pools in traces, pictures and pages: every tick of every stage, with what it runs, when simulation says."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from dynamic_cp.decide.cli import main
from dynamic_cp.decide.report.drawing import svg_text
from dynamic_cp.decide.report.gantt import tick_gantt
from dynamic_cp.decide.report.theme import LIGHT
from dynamic_cp.decide.report.trace import tick_events
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.pool.search import PlannedTasks, plan_tasks
from tests.unit.pool.test_task_plans import batch_of, cost_model_of
from tests.unit.report.trace_format_check import check_events

JOB = ["--global-batch-size", "8", "--lanes", "4", "--tp", "8", "--pp", "2", "--vpp", "2", "--recompute", "full"]
JOB += ["--lengths", "prolong", "--max-seqlen", "32768", "--max-tokens-per-rank", "16384", "--policy", "dynamic,pool"]


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> PlannedTasks:
    return plan_tasks(batch_of(), cost_model_of(2, vp_size=request.param), num_microbatches=[6])


def test_a_trace_has_every_tick_of_every_lane_and_what_it_computes_for_others(pool: PlannedTasks) -> None:
    events = tick_events(pool, label="pool", first_process=3)
    counts = check_events(events)
    vp_size = pool.plan.topology.vp_size
    slices = [event for event in events if event["ph"] == "X"]
    assert counts["X"] == len(slices) == len(pool.spans) * 2 * 4
    runs = [event for event in slices if event["name"] != "serves"]
    assert len(runs) == 2 * 6 * vp_size * 2 * 4
    assert {(event["args"]["micro_batch"], event["args"]["chunk"]) for event in runs} == {
        (row, chunk) for row in range(6) for chunk in range(vp_size)
    }
    for event in slices:
        words = event["args"]
        idle = event["name"] == "serves"
        assert (words["tokens"] == 0) == idle
        assert not idle or words["queries"] == words["queries_of_others"]
    # Each chunk of each stage is computed once forward and once backward, somewhere.
    assert sum(event["args"]["queries"] for event in slices) == 2 * 2 * vp_size * pool.plan.num_tokens
    assert any(event["args"]["queries_of_others"] for event in runs)
    (end,) = [event for event in events if event["ph"] == "i"]
    assert end["ts"] == pytest.approx(pool.makespan_s * 1e6)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(end["ts"])
    few = tick_events(pool, lanes=range(1, 3))
    assert {event["tid"] for event in few if event["ph"] == "X"} == {1, 2}
    with pytest.raises(InvalidInputError, match=r"lanes 0 \.\. 4 are asked for, the plan has 0 \.\. 3"):
        tick_events(pool, lanes=range(5))


def test_a_picture_of_ticks_names_what_stages_run(pool: PlannedTasks) -> None:
    pytest.importorskip("matplotlib")
    svg = svg_text(partial(tick_gantt, [("pool", pool)]), LIGHT)
    shown = re.findall(r">(\d(?:\.\d)?)</text>", svg)
    if pool.plan.topology.vp_size > 1:
        assert {"0.5", "1.5"} < set(shown)
    else:
        assert set("012345") <= set(shown)
    assert f"6 micro-batches · {len(pool.spans)} ticks" in svg
    assert "only serves" in svg


@pytest.mark.nightly
def test_the_commands_draw_pools_beside_dynamic_cp(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    assert main(["trace", *JOB, "--output", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"{policy}: stage {stage}" for policy in ("dynamic", "pool") for stage in range(2)}
    assert main(["report", *JOB, "--output", str(page)]) == 0
    text = page.read_text()
    assert "What stages run in each tick of a pool" in text
    assert "Who computes what, and when" in text
