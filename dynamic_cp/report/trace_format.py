"""The trace event format: what slices of all kinds share, and the file.

Source: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.report.files import write_whole

Event = dict[str, Any]
"""One event of the format; times are microseconds."""

CATEGORIES = {"F": "forward", "B": "backward"}
"""Kind of an operation -> category of its slice."""


def write_trace(path: str | Path, events: Sequence[Event], *, about: Mapping[str, Any] | None = None) -> None:
    """Write `events` as a JSON object to `path`, compressed if it ends in .gz; the same bytes for the same events.

    Args:
        about: what the viewer shows as information on the trace, such as command and inputs.

    Raises:
        InvalidInputError: the place cannot be written.
    """
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events)
    rest = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about or {})})[1:]
    content = f'{{"traceEvents":[\n{lines}\n],\n{rest}\n'.encode()
    if str(path).endswith(".gz"):
        buffer = io.BytesIO()
        # Name and time stay out of the file: they would make it different bytes.
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
    """Return `lanes`, or all where None is given.

    Raises:
        InvalidInputError: lanes that are not there.
    """
    if lanes is None:
        return range(num_lanes)
    if not lanes or lanes.step != 1 or lanes[0] < 0 or lanes[-1] >= num_lanes:
        raise InvalidInputError(
            f"lanes {lanes.start} .. {lanes.stop - 1} are asked for, the plan has 0 .. {num_lanes - 1}: "
            "give a range inside",
            num_lanes=num_lanes,
        )
    return lanes


def mark(name: str, at_ns: int, process: int, args: Mapping[str, Any]) -> Event:
    return {
        "name": name, "cat": "end", "ph": "i", "s": "g", "ts": at_ns / 1e3, "pid": process, "tid": 0, "args": dict(args)
    }  # fmt: skip


def in_time(events: Sequence[Event]) -> list[Event]:
    """Return metadata first, then everything by time; what starts an arrow stands before what ends it."""
    return sorted(events, key=lambda event: (event["ph"] != "M", event["ts"]))
