"""Traces of measured iterations: operations that the ranks recorded, as events of the trace format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dynamic_cp.decide.report.run import lines_of
from dynamic_cp.decide.report.trace import Event, in_time, mark, name_events, slice_event
from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.pipeline.schedule import KINDS, Kind, Operation

_CLOCK_STEP_NS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """When one rank ran one operation.

    Attributes:
        iteration: of the run, from 1.
        stage, lane: where.
        micro_batch, kind, chunk: which operation, as in `schedule.Operation`.
        start_s: on a clock that all ranks share; where it starts does not matter.
        duration_s: until the device was done.
    """

    iteration: int
    stage: int
    lane: int
    micro_batch: int
    kind: Kind
    chunk: int
    start_s: float
    duration_s: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInputError(f"kind {self.kind!r} of a measured span is unknown: use F or B", kind=self.kind)
        if not 0 <= self.duration_s < float("inf") or not abs(self.start_s) < float("inf"):
            raise InvalidInputError(
                f"a measured span starts at {self.start_s} s and takes {self.duration_s} s: "
                "both must be finite and the duration at least 0",
                start_s=self.start_s,
                duration_s=self.duration_s,
            )


def read_spans(directory: str | Path, iterations: range | None = None) -> tuple[MeasuredSpan, ...]:
    """Return the spans that the ranks of a run wrote to `directory`/spans/rank*.jsonl.

    An iteration that is there twice (a run that resumed from an older checkpoint) counts as it was run last.

    Args:
        iterations: those to read; None = all.

    Raises:
        DataError: no such files, no such iterations, or a line that is no record; the message has its number.
    """
    paths = sorted(Path(directory).glob("spans/rank*.jsonl"))
    if not paths:
        raise DataError(f"{directory} has 0 files spans/rank*.jsonl: was the run started with --dynamic-cp-dump?")
    spans: list[MeasuredSpan] = []
    for path in paths:
        of_iteration: dict[int, list[MeasuredSpan]] = {}
        for number, line in enumerate(lines_of(path, "is it whole, and may you read it?"), 1):
            try:
                iteration, read = _spans_of_line(line)
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{path}:{number} is not a record of spans ({error}): remove the line") from error
            if iterations is None or iteration in iterations:
                of_iteration[iteration] = read
        spans += [span for read in of_iteration.values() for span in read]
    if not spans:
        wanted = "" if iterations is None else " of the iterations that are asked for"
        remedy = "did the run get to an iteration?" if iterations is None else "choose others"
        raise DataError(f"{directory} has 0 spans{wanted}: {remedy}")
    return tuple(spans)


def _spans_of_line(line: str) -> tuple[int, list[MeasuredSpan]]:
    record = json.loads(line)
    place = {name: int(record[name]) for name in ("iteration", "stage", "lane")}
    return place["iteration"], [
        MeasuredSpan(**place, chunk=chunk, micro_batch=index, kind=kind, start_s=start_s, duration_s=duration_s)
        for chunk, index, kind, start_s, duration_s in record["spans"]
    ]


def measured_trace_events(
    spans: Iterable[MeasuredSpan], *, label: str = "measured", first_process: int = 0
) -> list[Event]:
    """Return the events of measured iterations, one after the other as the clock says; the first starts at 0.

    Raises:
        InvalidInputError: no spans, or two that overlap on one rank by more than a microsecond (clocks have steps; a
            smaller overlap is taken off the earlier one).
    """
    of_place: dict[tuple[int, int], list[MeasuredSpan]] = defaultdict(list)
    for span in spans:
        of_place[span.stage, span.lane].append(span)
    if not of_place:
        raise InvalidInputError("0 measured spans are given, a trace needs at least 1: was the run traced?")
    zero_s = min(span.start_s for group in of_place.values() for span in group)
    lanes: dict[int, list[int]] = defaultdict(list)
    for stage, lane in sorted(of_place):
        lanes[stage].append(lane)
    events = name_events(label, first_process, lanes)
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
            "a rank runs one at a time: check the clock of the spans",
            overlap_s=overlap_ns / 1e9,
        )
