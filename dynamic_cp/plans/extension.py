"""Kinds of plans: what a plan may have beside micro-batches, each kind behind one value of functions. Code that works
with plans calls what `kind_of(plan)` returns, and never asks which kind it is. A kind lies in a package of its own,
imported only when it is used. `megatron.dynamic_cp.data.micro_batches` runs its steps."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dynamic_cp.types import Bucket, Plan, PlanExtension, PlannedBatch, PlanOptions, Problem, Sample


class PlanKind(NamedTuple):
    """The functions of a kind of plan.

    Attributes:
        check, why_illegal: IllegalPlanError if a plan breaks the kind's own rules; why the lanes of a bucket cannot run
            it, in place of its mechanism, or None.
        to_dict, from_dict: the extension of a plan to JSON and back; InvalidInputError: it is none.
        settings, lines: the extension's settings in the first line of a plan's text, and its lines behind those of
            micro-batches; `placements` as in `serialize.format_plan`.
        parse: takes the extension's settings out of those of a text; returns the other lines, and its JSON.
        encode: [lane] texts for `LanePlan.extension`.
        why_no_timeline: why the simulator of Megatron-Core's schedules cannot simulate such a plan.
        peak: memory of every stage, from a `MemoryModel` and a plan.
        peak_at, least_at: the most memory that any plan of a token limit needs; the least, with words.
        plan: plans a batch of a job whose options ask for this kind, or allow it if it is faster.
    """

    check: Callable[[Plan], None]
    why_illegal: Callable[[Bucket, Plan], str | None]
    to_dict: Callable[[Plan], dict[str, Any]]
    from_dict: Callable[[object], PlanExtension]
    settings: Callable[[Plan], dict[str, int]]
    lines: Callable[[Plan, bool], Iterable[str]]
    parse: Callable[[dict[str, Any], list[str]], tuple[list[str], dict[str, Any]]]
    encode: Callable[[Plan], Sequence[tuple[str, ...]]]
    why_no_timeline: Callable[[Plan], str]
    peak: Callable[[Any, Plan], tuple[Any, ...]]
    peak_at: Callable[[Any, int], tuple[Any, ...]]
    least_at: Callable[[Any, int], tuple[str, tuple[Any, ...]]]
    plan: Callable[[Problem, Sequence[Sample]], PlannedBatch]


_POOL, _SETTING_OF_POOL = "pool", "tile_tokens"
"""The one kind that there is, and a setting in the texts of its plans."""


def kind_of(plan: Plan) -> PlanKind | None:
    """Return the kind of a plan; None: it has only micro-batches."""
    return None if plan.extension is None else kind_named(plan.extension.kind)


def kind_named(name: str) -> PlanKind:
    """Return a kind by its name, importing it."""
    kind: PlanKind = importlib.import_module(f"dynamic_cp.{name}.kind").KIND
    return kind


def kind_in_json(data: Mapping[str, Any]) -> str | None:
    """Return the kind of the plan that is written in `data`; None: it has only micro-batches."""
    return _POOL if _POOL in data else None


def kind_in_text(settings: Mapping[str, Any]) -> str | None:
    """Return the kind of the plan whose text has these settings; None: it has only micro-batches."""
    return _POOL if _SETTING_OF_POOL in settings else None


def kind_planned(options: PlanOptions) -> PlanKind | None:
    """Return the kind that plans of a job may be; None: they have only micro-batches."""
    return None if options.pool == "off" else kind_named(_POOL)


def kind_of_all(options: PlanOptions) -> PlanKind | None:
    """Return the kind that all plans of a job are; None: some have only micro-batches."""
    return kind_planned(options) if options.pool == "always" else None
