"""Traces: legal by the format, the same facts as timeline or measured spans; every tick of pools, in pages, too."""

import gzip
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.decide.cli import main
from dynamic_cp.decide.report.drawing import svg_text
from dynamic_cp.decide.report.gantt import tick_gantt
from dynamic_cp.decide.report.run import MeasuredSpan, read_spans
from dynamic_cp.decide.report.theme import LIGHT
from dynamic_cp.decide.report.trace import measured_trace_events, tick_events, trace_events, write_trace
from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.pipeline.schedule import peak_in_flight_tokens
from dynamic_cp.plans.padding import lane_tokens, lane_tokens_of
from dynamic_cp.pool.search import PlannedTasks, plan_tasks
from tests.unit.pool.test_task_plans import batch_of, cost_model_of
from tests.unit.report.support import comparison, timelines
from tests.unit.report.trace_format_check import check_events

SMALL_CASES = ("usual", "one", "pp8-vp2", "mostly-empty", "many-micro-batches")


def slices_of(timeline):
    """Return (span, (stage, lane), (start, duration in us)) of every operation on every lane."""
    return [
        (one, (one.stage, lane), (one.start_ns / 1e3, (one.end_on_ns(lane) - one.start_ns) / 1e3))
        for one in timeline.spans
        for lane in one.bucket.lanes
    ]


def one_of(events, **wanted):
    (found,) = [event for event in events if wanted.items() <= event.items()]
    return found


def span(start_s, duration_s, **changes):
    values = {"iteration": 1, "stage": 0, "lane": 0, "micro_batch": 0, "kind": "F", "chunk": 0} | changes
    return MeasuredSpan(start_s=start_s, duration_s=duration_s, **values)


@pytest.mark.parametrize("case", SMALL_CASES)
def test_simulated_traces_are_legal_and_hold_every_operation(case):
    for policy, timeline in timelines(case):
        events = trace_events(timeline)
        counts = check_events(events)
        topology = timeline.plan.topology
        operations = 2 * timeline.plan.num_microbatches * topology.vp_size * topology.pp_size * topology.num_lanes
        reduction = topology.pp_size * topology.num_lanes if timeline.gradient_reduction_s else 0
        assert counts["X"] == operations + reduction
        assert counts["M"] == 2 * topology.pp_size * (topology.num_lanes + 1)
        end = one_of(events, ph="i")
        assert end["name"] == f"end of {policy}"
        assert end["ts"] == timeline.makespan_ns / 1e3
        busy_ns = sum(1e3 * event["dur"] for event in events if event["ph"] == "X" and event["cat"] != "reduction")
        assert busy_ns == pytest.approx(timeline.split.busy_ns.sum())


def test_lanes_can_be_chosen():
    (_, (_, timeline)) = timelines("usual")
    events = trace_events(timeline, lanes=range(3, 6))
    check_events(events)
    assert {event["tid"] for event in events if event["ph"] in "Xsf"} == {3, 4, 5}


def test_slices_are_the_spans_of_the_timeline():
    (_, (_, timeline)) = timelines("usual")
    wanted = {(*place, str(span.operation)[1:], *times_us) for span, place, times_us in slices_of(timeline)}
    found = {
        (event["pid"], event["tid"], event["name"].split()[0], event["ts"], event["dur"])
        for event in trace_events(timeline)
        if event["ph"] == "X" and event["cat"] in ("forward", "backward")
    }
    assert len(found) > 50
    assert found == wanted


@pytest.mark.parametrize("case", ["usual", "pp8-vp2"])
def test_arrows_follow_pipeline_and_groups(case):
    (_, (_, timeline)) = timelines(case)
    topology = timeline.plan.topology
    events = trace_events(timeline)
    p2p = [event for event in events if event["name"] == "P2P"]
    buckets = sum(1 for _ in timeline.plan.buckets)
    hops = topology.pp_size * topology.vp_size - 1
    assert len(p2p) == 2 * 2 * hops * buckets
    starts = {event["id"]: event for event in p2p if event["ph"] == "s"}
    for end in (event for event in p2p if event["ph"] == "f"):
        start = starts[end["id"]]
        assert start["pid"] != end["pid"]
        assert start["tid"] == end["tid"]
        assert start["ts"] < end["ts"]
    grouped = [bucket for bucket in timeline.plan.buckets if bucket.cp_size > 1]
    assert grouped
    points = sum(bucket.cp_size for bucket in grouped) * 2 * topology.vp_size * topology.pp_size
    assert sum(event["name"] == "CP group" for event in events) == points


@pytest.mark.parametrize("case", SMALL_CASES)
def test_counters_reach_the_peak_of_tokens_in_flight_and_end_at_zero(case):
    for _, timeline in timelines(case):
        events = [event for event in trace_events(timeline) if event["ph"] == "C"]
        plan = timeline.plan
        peaks = peak_in_flight_tokens(lane_tokens_of(plan), plan.topology.pp_size, plan.topology.vp_size)
        for stage, peak in enumerate(peaks.max(axis=1)):
            values = [event["args"]["tokens"] for event in events if event["pid"] == stage]
            assert max(values) == peak > 0
            assert values[-1] == 0


def test_lanes_of_placed_buckets_have_times_and_tokens_of_their_own():
    (outcome,) = comparison(1, "m", ("dynamic", "balanced"), "blocks").policies[0].batches
    plan, events = outcome.planned.plan, trace_events(outcome.timeline)
    check_events(events)
    placed = {i: b for i, row in enumerate(plan.micro_batches) for b in row.buckets if b.placement is not None}
    assert placed
    for index, bucket in placed.items():
        slices = {e["tid"]: e for e in events if e["ph"] == "X" and e["name"] == f"F{index} cp8" and e["pid"] == 0}
        assert sorted(slices) == list(bucket.lanes)
        assert {e["args"]["placement"] for e in slices.values()} == {bucket.placement.describe()}
        held = [slices[lane]["args"]["padded_tokens_per_rank"] for lane in bucket.lanes]
        assert held == list(lane_tokens(bucket))
        assert len(set(held)) > 1
        assert len({e["dur"] for e in slices.values()}) > 1


def test_two_timelines_and_measured_spans_stand_side_by_side():
    ((_, static), (_, dynamic)) = timelines("usual")
    events = trace_events(static, label="static") + trace_events(dynamic, label="dynamic", first_process=2)
    events += measured_trace_events([span(0, 1)], first_process=4)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["static: stage 0", "static: stage 1", "dynamic: stage 0", "dynamic: stage 1", "measured: stage 0"]
    check_events(sorted(events, key=lambda event: (event["ph"] != "M", event["ts"])))


def test_written_traces_parse_back_and_are_the_same_bytes(tmp_path):
    (_, (_, timeline)) = timelines("usual")
    events = trace_events(timeline)
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, events, about={"command": 'dynamic-cp trace --label "x"'})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    plain = (tmp_path / "a.json").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == plain
    assert len((tmp_path / "a.json.gz").read_bytes()) < len(plain) / 4
    trace = json.loads(plain)
    assert trace["traceEvents"] == events
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {"command": 'dynamic-cp trace --label "x"'}
    check_events(trace["traceEvents"])


def test_measured_iterations_are_slices_on_the_clock_of_the_run():
    spans = [
        span(100.5, 0.25, kind="B"),
        span(100.0, 0.5),
        span(100.1, 0.5, lane=3, stage=1),
        span(101.0, 0.5, iteration=2, micro_batch=7, chunk=1),
    ]
    events = measured_trace_events(spans)
    counts = check_events(events)
    assert counts["X"] == 4
    first = one_of(events, name="F0", ts=0.0)
    assert (first["dur"], first["pid"], first["tid"]) == (5e5, 0, 0)
    assert first["args"] == {"iteration": 1, "micro_batch": 0, "chunk": 0}
    assert one_of(events, name="F7")["ts"] == 1e6
    assert one_of(events, name="end of iteration 1")["ts"] == 7.5e5
    assert one_of(events, name="end of iteration 2")["ts"] == 1.5e6
    assert measured_trace_events(spans[::-1]) == events


def test_measured_spans_may_overlap_by_a_step_of_the_clock_only():
    touching = [span(1e9, 0.1 + 4e-7), span(1e9 + 0.1, 0.2, kind="B")]
    check_events(measured_trace_events(touching))
    with pytest.raises(InvalidInputError, match=r"lane 0: 0F0 of iteration 1 and 0B0 .*overlap by 100000\.0 µs"):
        measured_trace_events([span(0, 0.2), span(0.1, 0.2, kind="B")])


def test_a_simulated_iteration_that_was_measured_exactly_has_the_same_slices():
    (_, (_, timeline)) = timelines("pp8-vp2")
    spans = [
        span(
            7 + start_us / 1e6, duration_us / 1e6, stage=stage, lane=lane, kind=str(one.operation)[1],
            micro_batch=one.operation.micro_batch, chunk=one.operation.chunk,
        )
        for one, (stage, lane), (start_us, duration_us) in slices_of(timeline)
    ]  # fmt: skip
    events = measured_trace_events(spans)
    check_events(events)
    found = sorted((event["pid"], event["tid"], event["ts"]) for event in events if event["ph"] == "X")
    wanted = sorted((*place, start_us) for _, place, (start_us, _) in slices_of(timeline))
    assert len(found) == len(wanted) > 500
    assert np.allclose(np.array(found), np.array(wanted), atol=0.01)


def test_no_spans_and_impossible_spans_are_refused():
    with pytest.raises(InvalidInputError, match="0 measured spans"):
        measured_trace_events([])
    with pytest.raises(InvalidInputError, match="kind 'W'"):
        span(0, 1, kind="W")
    for start_s, duration_s in ((0, -1), (0, float("inf")), (float("nan"), 1)):
        with pytest.raises(InvalidInputError, match="must be finite"):
            span(start_s, duration_s)


def test_timelines_without_a_reduction_end_with_their_last_operation():
    (_, (_, timeline)) = timelines("usual")
    events = trace_events(replace(timeline, gradient_reduction_s=0.0))
    assert all(event["cat"] != "reduction" for event in events if event["ph"] == "X")


def test_spans_that_cannot_be_read_are_an_error_of_data(tmp_path):
    (tmp_path / "spans").mkdir()
    path = tmp_path / "spans" / "rank0.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read .*rank0\.jsonl"):
        read_spans(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        read_spans(tmp_path)
    path.rmdir()
    path.write_text("")
    with pytest.raises(DataError, match="0 spans: did the run get to an iteration"):
        read_spans(tmp_path)


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
