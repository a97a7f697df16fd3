"""Task plans as JSON, as text and as a digest: `loads(dumps(plan)) == plan == parse_plan(format_plan(plan))`.

Loading checks the form only; whether the plan is legal is for `legal.check_task_plan` to say.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.disaggregation.plan import HomedBatch, Scope, TaskPlan
from dynamic_cp.disaggregation.tasks import Tasks, parse_tasks
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.json_text import parse_json
from dynamic_cp.plans.serialize import (
    Fields,
    checked,
    sample_from_list,
    sample_to_list,
    topology_from_dict,
    topology_to_dict,
)

SCHEMA_VERSION = 1
_NAMES = ("schema_version", "policy", "scope", "max_tokens_per_rank", "tile_tokens", "topology", "micro_batches")
_SIDES = ("forward", "backward")
_HOMES = re.compile(r"(\d+(?:\.\d+){3}(?:,\d+(?:\.\d+){3})*)?")


def task_plan_to_dict(plan: TaskPlan) -> dict[str, Any]:
    """Return `plan` as what JSON can hold."""
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": plan.policy,
        "scope": plan.scope,
        "max_tokens_per_rank": plan.max_tokens_per_rank,
        "tile_tokens": plan.tile_tokens,
        "topology": topology_to_dict(plan.topology),
        "micro_batches": [
            {"samples": [sample_to_list(sample) for sample in batch.samples], "homes": _table(batch.homes)}
            for batch in plan.micro_batches
        ],
        **{side: [str(tasks) for tasks in getattr(plan, side)] for side in _SIDES},
    }


def task_plan_from_dict(data: object) -> TaskPlan:
    """Return the plan that `task_plan_to_dict` made `data` from; InvalidInputError names what is wrong."""
    plan = Fields(data, "task plan", (*_NAMES, *_SIDES))
    version = plan.get("schema_version", int)
    if version != SCHEMA_VERSION:
        raise InvalidInputError(
            f"the task plan has schema_version {version}, this program reads {SCHEMA_VERSION}: use the version of "
            "dynamic_cp that wrote it",
            schema_version=version,
        )
    return TaskPlan(
        topology=topology_from_dict(plan.get("topology", dict)),
        max_tokens_per_rank=plan.get("max_tokens_per_rank", int),
        tile_tokens=plan.get("tile_tokens", int),
        scope=cast(Scope, plan.get("scope", str)),
        micro_batches=tuple(
            _batch(one, f"micro_batches[{index}]") for index, one in enumerate(plan.get("micro_batches", list))
        ),
        forward=_tasks(plan.get("forward", list), "forward"),
        backward=_tasks(plan.get("backward", list), "backward"),
        policy=plan.get("policy", str),
    )


def dumps(plan: TaskPlan) -> str:
    """Return `plan` as canonical JSON: equal plans give equal text."""
    return json.dumps(task_plan_to_dict(plan), sort_keys=True, separators=(",", ":"))


def loads(text: str | bytes) -> TaskPlan:
    """Return the plan that `dumps` wrote; InvalidInputError when `text` is none."""
    return task_plan_from_dict(parse_json("the task plan", text, "give what `dumps` wrote"))


def digest(plan: TaskPlan) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of `plan`: ranks compare it instead of the plan."""
    return hashlib.sha256(dumps(plan).encode()).hexdigest()


def format_plan(plan: TaskPlan) -> str:
    """Return `plan` as text: a line of settings, one per micro-batch with homes and samples, one per tick or its like.

    Example:

        tasks v1 policy=pool scope=pool max_tokens_per_rank=64 tile_tokens=128 num_lanes=2 tp_size=1 pp_size=2 ...
        0 | 0.0.40.0,0.40.64.1 | 7:64
        F0 | 0.0.40.0.0.0,0.40.64.1.3.0
    """
    settings = {
        "policy": plan.policy,
        "scope": plan.scope,
        "max_tokens_per_rank": plan.max_tokens_per_rank,
        "tile_tokens": plan.tile_tokens,
        **topology_to_dict(plan.topology),
    }
    lines = [f"tasks v{SCHEMA_VERSION} " + " ".join(f"{name}={value}" for name, value in settings.items())]
    for index, batch in enumerate(plan.micro_batches):
        samples = " ".join(f"{sample.sample_id}:{sample.seqlen}" for sample in batch.samples)
        lines.append(f"{index} | {_table(batch.homes)} | {samples}")
    for letter, side in zip("FB", (plan.forward, plan.backward), strict=True):
        lines += [f"{letter}{index} | {tasks}" for index, tasks in enumerate(side)]
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> TaskPlan:
    """Return the plan that `format_plan` printed; InvalidInputError names the line that is none."""
    header, *rows = text.strip().splitlines() or [""]
    match = re.fullmatch(r"tasks v(\d+)((?: \w+=\S*)*)", header)
    if match is None:
        raise InvalidInputError(f"line 1 is {header[:60]!r}: a task plan starts with 'tasks v{SCHEMA_VERSION} policy='")
    words: dict[str, str] = dict(cast("tuple[str, str]", item.split("=", 1)) for item in match[2].split())
    typed: dict[str, Any] = {
        name: value == "True" if value in ("True", "False") else int(value) if value.isdecimal() else value
        for name, value in words.items()
    }
    data: dict[str, Any] = {name: typed.pop(name, None) for name in _NAMES[1:5]}
    batches: list[Any] = []
    sides: dict[str, list[Any]] = {"F": [], "B": []}
    for number, row in enumerate(rows, 2):
        cells = [cell.strip() for cell in row.split("|")]
        found = re.fullmatch(r"([FB]?)(\d+)", cells[0])
        place = sides[found[1]] if found and found[1] else batches
        if found is None or len(cells) != (2 if found[1] else 3) or int(found[2]) != len(place):
            raise InvalidInputError(
                f"line {number} is {row[:60]!r}: '0 | homes | 7:64' for each micro-batch and 'F0 | tasks' are needed"
            )
        if found[1]:
            place.append(cells[1])
        else:
            samples = [list(map(int, re.findall(r"-?\d+", one))) for one in cells[2].split()]
            place.append({"samples": samples, "homes": cells[1]})
    both = {name: sides[letter] for letter, name in zip("FB", _SIDES, strict=True)}
    return task_plan_from_dict(
        {"schema_version": int(match[1]), **data, "topology": typed, "micro_batches": batches, **both}
    )


def _table(rows: NDArray[np.int32]) -> str:
    return ",".join(".".join(map(str, row)) for row in rows.tolist())


def _batch(data: object, where: str) -> HomedBatch:
    batch = Fields(data, where, ("samples", "homes"))
    text = batch.get("homes", str)
    if _HOMES.fullmatch(text) is None:
        raise InvalidInputError(f"{where}.homes is {text[:40]!r}: write sample.start.stop.lane,... with whole numbers")
    rows = [list(map(int, row.split("."))) for row in text.split(",")] if text else []
    if max((max(row) for row in rows), default=0) > np.iinfo(np.int32).max:
        raise InvalidInputError(f"{where}.homes has a number above {2**31 - 1}, the largest that is possible")
    samples = batch.get("samples", list)
    return HomedBatch(
        samples=tuple(sample_from_list(one, f"{where}.samples[{index}]") for index, one in enumerate(samples)),
        homes=np.array(rows, np.int32).reshape(-1, 4),
    )


def _tasks(data: list[object], where: str) -> tuple[Tasks, ...]:
    return tuple(parse_tasks(checked(one, str, f"{where}[{index}]")) for index, one in enumerate(data))
