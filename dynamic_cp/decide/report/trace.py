"""Traces of simulated and of measured iterations, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process is a pipeline stage, a thread a lane, a slice an operation. Arrows lead from a stage to the next (P2P) and
through the lanes of a CP group. A counter per stage follows the tokens in flight; a mark stands at the end. Source:
"Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.decide.files import write_whole
from dynamic_cp.decide.report.run import MeasuredSpan
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.pipeline.schedule import FORWARD, Operation
from dynamic_cp.pipeline.timeline import Span, Timeline, durations_ns
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.pool.tasks import SERVER, ticks_of
from dynamic_cp.types.placement import HOLDER

if TYPE_CHECKING:
    from dynamic_cp.pool.search import PlannedTasks  # compiled: most traces have no pool

Event = dict[str, Any]
"""One event of the format; times are microseconds."""

_CATEGORIES = {"F": "forward", "B": "backward"}
"""Kind of an operation -> category of its slice."""
_CLOCK_STEP_NS = 1000


def trace_events(
    timeline: Timeline,
    *,
    label: str = "",
    first_process: int = 0,
    lanes: range | None = None,
) -> list[Event]:
    """Return the events of a simulated iteration. InvalidInputError: lanes that are not there.

    Args:
        label: stands before the names of processes, to tell several timelines in one trace apart.
        first_process: process number of stage 0; give the second timeline the number of stages of the first.
        lanes: lanes to show; None = all. Arrows and counters are about these alone.
    """
    topology = timeline.plan.topology
    lanes = shown_lanes(lanes, topology.num_lanes)
    events = name_events(label, first_process, {stage: list(lanes) for stage in range(topology.pp_size)})
    spans = [
        span for span in timeline.spans if span.bucket.first_lane < lanes.stop and span.bucket.lanes.stop > lanes.start
    ]
    tokens = lane_tokens_of(timeline.plan)
    for span in spans:
        events += (_slice(span, lane, first_process, tokens) for lane in _shown(span, lanes))
    events += _group_arrows(spans, lanes, first_process)
    if topology.pp_size > 1:
        events += _stage_arrows(timeline, lanes, first_process)
    events += _tokens_in_flight(timeline, lanes, first_process, tokens)
    events += _end(timeline, label, lanes, first_process)
    return in_time(events)


def _shown(span: Span, lanes: range) -> range:
    return range(max(span.bucket.first_lane, lanes.start), min(span.bucket.lanes.stop, lanes.stop))


def _slice(span: Span, lane: int, first_process: int, tokens: Ints) -> Event:
    kind, micro_batch = span.operation.kind, span.operation.micro_batch
    bucket = span.bucket
    name = f"{kind}{micro_batch} cp{bucket.cp_size}" if bucket.samples else f"{kind}{micro_batch} padding"
    args = {
        "micro_batch": micro_batch,
        "chunk": span.operation.chunk,
        "cp_size": bucket.cp_size,
        "lanes": f"{bucket.first_lane}-{bucket.lanes.stop - 1}",
        "cp_comm_type": bucket.cp_comm_type,
        **({"placement": bucket.placement.describe()} if bucket.placement is not None else {}),
        "samples": len(bucket.samples),
        "tokens": bucket.num_tokens,
        "padded_tokens_per_rank": int(tokens[micro_batch, lane]),
    }
    return slice_event(name, kind, (span.start_ns, span.end_on_ns(lane)), (first_process + span.stage, lane), args)


def _group_arrows(spans: Sequence[Span], lanes: range, first_process: int) -> list[Event]:
    """Return an arrow through the lanes of each group; its points are inside the slices of these lanes."""
    events: list[Event] = []
    for number, span in enumerate(spans):
        shown = _shown(span, lanes)
        # Lanes may end one by one; the arrow moves forward in time and stays inside all slices.
        shortest_ns = min(span.end_on_ns(lane) for lane in shown) - span.start_ns
        if len(shown) < 2 or shortest_ns == 0:
            continue
        for index, lane in enumerate(shown):
            ts_us = (span.start_ns + shortest_ns * index / len(shown)) / 1e3
            phase = "s" if index == 0 else "f" if index == len(shown) - 1 else "t"
            events.append(
                _arrow(phase, "CP group", f"cp-{first_process}-{number}", ts_us, first_process + span.stage, lane)
            )
    return events


def _stage_arrows(timeline: Timeline, lanes: range, first_process: int) -> list[Event]:
    """Return an arrow for each input that comes from another stage, on the first shown lane of the bucket."""
    graph = timeline.graph
    starts_ns = timeline.ends_ns - durations_ns(timeline.grid, graph)
    events: list[Event] = []
    for index, sender in enumerate(graph.sender.tolist()):
        if sender < 0:
            continue
        for bucket in timeline.plan.micro_batches[int(graph.micro_batch[index])].buckets:
            lane = max(bucket.first_lane, lanes.start)
            if lane >= min(bucket.lanes.stop, lanes.stop):
                continue
            name = f"p2p-{first_process}-{index}-{lane}"
            # A slice does not contain its own end, so the arrow leaves from its middle.
            leaves_us = (starts_ns[sender, lane] + timeline.ends_ns[sender, lane]) / 2e3
            to = first_process + int(graph.stage[index])
            events.append(_arrow("s", "P2P", name, leaves_us, first_process + int(graph.stage[sender]), lane))
            events.append(_arrow("f", "P2P", name, starts_ns[index, lane] / 1e3, to, lane))
    return events


def _arrow(phase: str, name: str, identity: str, ts_us: float, process: int, lane: int) -> Event:
    event: Event = {
        "name": name, "cat": "arrow", "ph": phase, "id": identity, "ts": float(ts_us), "pid": process, "tid": lane
    }  # fmt: skip
    return {**event, "bp": "e"} if phase == "f" else event


def _tokens_in_flight(timeline: Timeline, lanes: range, first_process: int, tokens: Ints) -> list[Event]:
    """Return a counter per stage: tokens of the lane that holds most, each from the start of F to the end of B."""
    topology, graph = timeline.plan.topology, timeline.graph
    shown = slice(lanes.start, lanes.stop)
    durations = durations_ns(timeline.grid, graph)[:, shown]
    events: list[Event] = []
    for stage in range(topology.pp_size):
        here = graph.stage == stage
        forward = graph.kind[here] == FORWARD
        ends_ns = timeline.ends_ns[here][:, shown]
        times_ns = np.where(forward[:, None], ends_ns - durations[here], ends_ns)
        changes = np.where(forward[:, None], 1, -1) * tokens[graph.micro_batch[here]][:, shown]
        lane_of = np.broadcast_to(np.arange(len(lanes)), changes.shape)
        order = np.lexsort((changes.ravel(), times_ns.ravel()))
        alive = np.zeros(len(lanes), np.int64)
        flat_times, flat_changes, flat_lanes = (one.ravel()[order] for one in (times_ns, changes, lane_of))
        instants = np.flatnonzero(np.diff(flat_times, prepend=-1))
        for first, end in zip(instants, np.append(instants[1:], len(flat_times)), strict=True):
            np.add.at(alive, flat_lanes[first:end], flat_changes[first:end])
            events.append(
                {
                    "name": "tokens in flight (most on a lane)",
                    "ph": "C",
                    "ts": flat_times[first].item() / 1e3,
                    "pid": first_process + stage,
                    "args": {"tokens": int(alive.max())},
                }
            )
    return events


def _end(timeline: Timeline, label: str, lanes: range, first_process: int) -> list[Event]:
    """Return the gradient reduction on every lane and a mark at the end of the last operation."""
    end_ns, reduction_ns = timeline.makespan_ns, round(timeline.gradient_reduction_s * 1e9)
    args = {"makespan_s": timeline.makespan_s, "iteration_s": timeline.iteration_s, "policy": timeline.plan.policy}
    events = [mark(f"end of {label or timeline.plan.policy}", end_ns, first_process, args)]
    if reduction_ns:
        events += (
            slice_event(
                "gradient reduction (at most)", "reduction", (end_ns, end_ns + reduction_ns),
                (first_process + stage, lane), {},
            )
            for stage in range(timeline.plan.topology.pp_size)
            for lane in lanes
        )  # fmt: skip
    return events


def tick_events(
    planned: PlannedTasks, *, label: str = "", first_process: int = 0, lanes: range | None = None
) -> list[Event]:
    """Return the events of an iteration of a pool; arguments and errors as of `trace_events`.

    A slice is a tick on a lane, from its first layer, at which all stages meet, to the end of what the stage does
    behind its last layer. Its name is what the stage runs, as in "0F3" (model chunk 0, micro-batch 3), or "serves".
    """
    plan = planned.plan
    topology, name = plan.topology, label or plan.policy
    lanes = shown_lanes(lanes, topology.num_lanes)
    events = name_events(label, first_process, {stage: list(lanes) for stage in range(topology.pp_size)})
    for (tick, tasks), span, seconds in zip(ticks_of(plan), planned.spans, planned.seconds, strict=True):
        of_servers = (
            np.bincount(tasks.rows[rows, column], tasks.tokens[rows], plan.num_servers)
            for rows, column in (
                (slice(None), HOLDER),
                (slice(None), SERVER),
                (tasks.rows[:, HOLDER] != tasks.rows[:, SERVER], SERVER),
            )
        )
        held, computed, of_others = (one.astype(np.int64).tolist() for one in of_servers)
        for stage in range(topology.pp_size):
            unit = tick.unit(stage, topology.pp_size, topology.vp_size, plan.num_microbatches)
            runs = {} if unit is None else unit._asdict()
            for lane in lanes:
                server = stage * topology.num_lanes + lane
                args = {
                    "tick": str(tick),
                    **runs,
                    "tokens": held[server],
                    "queries": computed[server],
                    "queries_of_others": of_others[server],
                    "exposed_s": seconds.exposed_s,
                }
                what = "serves" if unit is None else str(Operation(tick.kind, *unit))
                times_ns = span.start_ns, span.stage_ends_ns[stage]
                events.append(slice_event(what, tick.kind, times_ns, (first_process + stage, lane), args))
    args = {"makespan_s": planned.makespan_s, "policy": plan.policy}
    events.append(mark(f"end of {name}", max(planned.spans[-1].stage_ends_ns), first_process, args))
    return in_time(events)


def measured_trace_events(spans: Iterable[MeasuredSpan], *, first_process: int = 0) -> list[Event]:
    """Return the events of measured iterations by the clock, from 0. InvalidInputError: no spans, or two that overlap
    on one rank by more than a microsecond (less is taken off the earlier one, as clocks have steps)."""
    of_place: dict[tuple[int, int], list[MeasuredSpan]] = defaultdict(list)
    for span in spans:
        of_place[span.stage, span.lane].append(span)
    if not of_place:
        raise InvalidInputError("0 measured spans are given, a trace needs at least 1: was the run traced?")
    zero_s = min(span.start_s for group in of_place.values() for span in group)
    lanes: dict[int, list[int]] = defaultdict(list)
    for stage, lane in sorted(of_place):
        lanes[stage].append(lane)
    events = name_events("measured", first_process, lanes)
    ends_ns: dict[int, int] = defaultdict(int)
    for (stage, lane), group in sorted(of_place.items()):
        group.sort(key=lambda span: (span.start_s, span.duration_s))
        starts_ns = [round((span.start_s - zero_s) * 1e9) for span in group]
        for index, span in enumerate(group):
            end_ns = starts_ns[index] + round(span.duration_s * 1e9)
            if index + 1 < len(group) and end_ns > starts_ns[index + 1]:
                _check_overlap(span, group[index + 1], end_ns - starts_ns[index + 1])
                end_ns = starts_ns[index + 1]
            ends_ns[span.iteration] = max(ends_ns[span.iteration], end_ns)
            args = {"iteration": span.iteration, "micro_batch": span.micro_batch, "chunk": span.chunk}
            name, times_ns = f"{span.kind}{span.micro_batch}", (starts_ns[index], end_ns)
            events.append(slice_event(name, span.kind, times_ns, (first_process + stage, lane), args))
    events += [mark(f"end of iteration {number}", end_ns, first_process, {}) for number, end_ns in ends_ns.items()]
    return in_time(events)


def _check_overlap(span: MeasuredSpan, following: MeasuredSpan, overlap_ns: int) -> None:
    if overlap_ns > _CLOCK_STEP_NS:
        first, second = (
            f"{Operation(one.kind, one.micro_batch, one.chunk)} of iteration {one.iteration}"
            for one in (span, following)
        )
        raise InvalidInputError(
            f"stage {span.stage}, lane {span.lane}: {first} and {second} overlap by {overlap_ns / 1e3:.1f} µs, "
            "a rank runs one at a time: check the clock of the spans"
        )


def write_trace(path: str | Path, events: Sequence[Event], *, about: Mapping[str, Any] | None = None) -> None:
    """Write `events` to `path`, compressed if it ends in .gz, and what the viewer shows `about` the trace. Equal events
    give equal bytes. InvalidInputError: the place cannot be written."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events)
    rest = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about or {})})[1:]
    content = f'{{"traceEvents":[\n{lines}\n],\n{rest}\n'.encode()
    if str(path).endswith(".gz"):
        buffer = io.BytesIO()
        # Without name and time in the file, equal events give equal bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as compressed:
            compressed.write(content)
        content = buffer.getvalue()
    write_whole(path, content)


def name_events(label: str, first_process: int, lanes: Mapping[int, Sequence[int]]) -> list[Event]:
    """Return the metadata that names and orders processes and threads."""
    events: list[Event] = []
    prefix = f"{label}: " if label else ""
    for stage, shown in lanes.items():
        about = {"ph": "M", "ts": 0, "pid": first_process + stage}
        events.append({**about, "tid": shown[0], "name": "process_name", "args": {"name": f"{prefix}stage {stage}"}})
        order = {"sort_index": first_process + stage}
        events.append({**about, "tid": shown[0], "name": "process_sort_index", "args": order})
        for lane in shown:
            events.append({**about, "tid": lane, "name": "thread_name", "args": {"name": f"lane {lane}"}})
            events.append({**about, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}})
    return events


def shown_lanes(lanes: range | None, num_lanes: int) -> range:
    """Return `lanes`, or all where None is given; InvalidInputError: lanes that are not there."""
    if lanes is None:
        return range(num_lanes)
    if not lanes or lanes.step != 1 or lanes[0] < 0 or lanes[-1] >= num_lanes:
        raise InvalidInputError(
            f"lanes {lanes.start} .. {lanes.stop - 1} are asked for, the plan has 0 .. {num_lanes - 1}: "
            "give a range inside"
        )
    return lanes


def slice_event(
    name: str, kind: str, span_ns: tuple[int, int], place: tuple[int, int], args: Mapping[str, Any]
) -> Event:
    """Return a slice from a start to an end in a (process, thread); `kind`: of an operation, or another category."""
    start_ns, end_ns = span_ns
    return {
        "name": name,
        "cat": _CATEGORIES.get(kind, kind),
        "ph": "X",
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "pid": place[0],
        "tid": place[1],
        "args": dict(args),
    }


def mark(name: str, at_ns: int, process: int, args: Mapping[str, Any]) -> Event:
    return {
        "name": name, "cat": "end", "ph": "i", "s": "g", "ts": at_ns / 1e3, "pid": process, "tid": 0, "args": dict(args)
    }  # fmt: skip


def in_time(events: Sequence[Event]) -> list[Event]:
    """Return metadata first, then everything by time; the sort is stable, so an arrow's start stays before its end."""
    return sorted(events, key=lambda event: (event["ph"] != "M", event["ts"]))
