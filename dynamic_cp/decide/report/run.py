"""Reads what a training run wrote: its iterations, facts about its job, and when ranks ran which operation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.pipeline.schedule import KINDS, Kind

FILE_NAME = "iterations.jsonl"
ABOUT_NAME = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One iteration of a training run. None: the run did not say.

    Attributes:
        iteration: its number, from 1.
        predicted_s, measured_s: what the plan was expected to take, and what the iteration took.
        loss: mean per token.
        cp_histogram: CP size -> number of buckets with samples.
        padding: share of padding in all tokens that are computed.
        imbalance: max / mean of the lanes' busy seconds, as planned.
        planner_s, exposed_s: seconds of planning, and those of them for which training waited.
        tokens: true tokens of the global batch.
        peak_bytes: most that torch's allocator on rank 0 has given out so far; on GPUs.
        share_of_others: share of the cores that other processes took from the ranks; on CPUs.
    """

    iteration: int
    predicted_s: float
    measured_s: float
    loss: float | None = None
    num_microbatches: int | None = None
    cp_histogram: Mapping[int, int] = field(default_factory=dict)
    padding: float | None = None
    imbalance: float | None = None
    planner_s: float | None = None
    exposed_s: float | None = None
    tokens: int | None = None
    peak_bytes: int | None = None
    share_of_others: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("predicted_s", self.predicted_s), ("measured_s", self.measured_s)):
            if not 0 < value < math.inf:
                raise DataError(
                    f"iteration {self.iteration}: {name} is {value}, a number of seconds > 0 is needed: check the run"
                )

    @property
    def measured_over_predicted(self) -> float:
        """measured_s / predicted_s: 1 = as predicted, 2 = twice as long."""
        return self.measured_s / self.predicted_s


def read_run(directory: str | Path) -> tuple[RunRecord, ...]:
    """Return the records of a run's dump by iteration, without fields that `RunRecord` does not have. An iteration that
    is there twice (a run that resumed from an older checkpoint) counts as it was run last. DataError: no such file, no
    iterations, or a line that is no record; the message has its number."""
    path = Path(directory) / FILE_NAME
    lines = lines_of(path, "was the run started with --dynamic-cp-dump?")
    records: dict[int, RunRecord] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            record = _record(f"{path}:{number}", line)
            records[record.iteration] = record
    if not records:
        raise DataError(f"{path} holds 0 iterations, at least 1 is needed: did the run get that far?")
    return tuple(records[iteration] for iteration in sorted(records))


def lines_of(path: Path, remedy: str) -> list[str]:
    """Return the lines of a file that a run wrote; DataError: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}: {remedy}") from error


def read_about(directory: str | Path) -> dict[str, str]:
    """Return what a run's dump says of its job, name -> value; {} for an older dump, which says nothing. DataError: the
    file is there and cannot be read."""
    path = Path(directory) / ABOUT_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}: remove the file") from error
    arguments = data.get("arguments") if isinstance(data, dict) else None
    if not isinstance(arguments, dict):
        raise DataError(f"{path} has no arguments: what wrote it? Remove the file")
    about = {}
    sizes = [arguments.get(f"{name}_size") for name in ("world", "tensor_model_parallel", "pipeline_model_parallel")]
    world_size, tp_size, pp_size = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
    if tp_size and pp_size:
        about["lanes"] = str(world_size // (tp_size * pp_size))
    policy = "dynamic" if arguments.get("dynamic_cp") else arguments.get("static_cp_policy")
    about |= {} if policy is None else {"policy": str(policy)}
    shown = {
        name: value
        for name, value in arguments.items()
        if value is not None and value is not False and value not in ([], "")
    }
    return about | {f"--{name.replace('_', '-')}": str(value) for name, value in sorted(shown.items())}


def _record(where: str, line: str) -> RunRecord:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not a JSON object ({error}): was the file cut? Remove the line") from error
    if not isinstance(data, dict):
        raise DataError(f"{where} is not a JSON object but {type(data).__name__}: write one object per iteration")
    values: dict[str, Any] = {}
    for entry in fields(RunRecord):
        value = data.get(entry.name)
        if value is None:
            if entry.default is MISSING and entry.default_factory is MISSING:
                raise DataError(f"{where} has no {entry.name}: an iteration needs iteration, predicted_s, measured_s")
            continue
        values[entry.name] = (
            _histogram(where, value) if entry.name == "cp_histogram" else _number(where, entry.name, value)
        )
    return RunRecord(**values)


def _number(where: str, name: str, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: {name} is {value!r}, a number is needed: check what wrote it")
    if name in ("iteration", "num_microbatches", "tokens", "peak_bytes") and int(value) != value:
        raise DataError(f"{where}: {name} is {value!r}, a whole number is needed: check what wrote it")
    return value


def _histogram(where: str, value: Any) -> dict[int, int]:
    """Return CP size -> buckets; JSON objects have strings as keys."""
    try:
        return {int(cp_size): int(count) for cp_size, count in sorted(value.items(), key=lambda one: int(one[0]))}
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{where}: cp_histogram is {value!r}, it must be CP size -> number of buckets") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """When one rank ran one operation (`schedule.Operation`): `start_s` is on a clock that all ranks share, with any
    origin; `duration_s` lasts until the device was done. Iterations count from 1."""

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
            raise InvalidInputError(f"kind {self.kind!r} of a measured span is unknown: use F or B")
        if not 0 <= self.duration_s < float("inf") or not abs(self.start_s) < float("inf"):
            raise InvalidInputError(
                f"a measured span starts at {self.start_s} s and takes {self.duration_s} s: "
                "both must be finite and the duration at least 0"
            )


def read_spans(directory: str | Path, iterations: range | None = None) -> tuple[MeasuredSpan, ...]:
    """Return the spans that the ranks of a run wrote to `directory`/spans/rank*.jsonl, of `iterations` (None = all). An
    iteration that is there twice (a run that resumed from an older checkpoint) counts as it was run last. DataError: no
    such files, no such iterations, or a line that is no record; the message has its number."""
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
