"""The HTML report of a comparison: verdict, policies side by side, where the time goes, plans, memory, lower bound."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dynamic_cp.decide.comparison.parts import PART_LABELS
from dynamic_cp.decide.comparison.values import Comparison, PlanOutcome, PolicyOutcome, PoolOutcome, Speedup
from dynamic_cp.decide.comparison.verdict import Verdict, verdict_of
from dynamic_cp.decide.report.cp_map import cp_map
from dynamic_cp.decide.report.curves import imbalance, knee, knee_points, length_histogram
from dynamic_cp.decide.report.drawing import MEDIUM_IN, WIDE_IN, format_bytes, format_count, format_s
from dynamic_cp.decide.report.gantt import gantt, tick_gantt
from dynamic_cp.decide.report.page import Picture, picture, render
from dynamic_cp.decide.report.placed import placed_section
from dynamic_cp.pipeline.timeline import Timeline
from dynamic_cp.plans.serialize import format_cp_sizes
from dynamic_cp.pricing.allowed import problem_of_prices
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import ModelShape, Problem, Sample, counted

LABELS = (
    "policy",
    "iteration",
    "dynamic is faster by",
    "tokens/s per GPU",
    "TFLOP/s per GPU",
    "micro-batches",
    "idle",
    "padding",
    "planning",
    "sent for attention",
)
_BATCH_LABELS = ("policy, batch", "iteration", "over bound", "micro-batches", "buckets by CP size", "choice")


def render_report(comparison: Comparison, *, command: str, inputs: Mapping[str, Any]) -> str:
    """Return the page of `comparison` as one self-contained HTML document; it shows `command` and `inputs` as they are.
    UnsupportedFeatureError: matplotlib or jinja2 is not installed."""
    verdict = verdict_of(comparison)
    samples = sum(len(batch) for batch in comparison.batches) / len(comparison.batches)
    parts = [dict(one.parts) for one in comparison.policies if one.parts is not None]
    return render(
        "comparison_page.html",
        title=f"Dynamic context parallelism for {comparison.model_name or 'a model'}",
        facts=f"{_layout(comparison)} · {samples:g} samples per global batch",
        command=command,
        inputs=inputs,
        comparison=comparison,
        verdict=verdict,
        typeset=_typeset,
        num_batches=counted(len(comparison.batches), "global batch"),
        labels=LABELS,
        cells_of=partial(_cells, speedups={one.baseline: one for one in comparison.speedups}),
        notes=_notes(comparison),
        parts=[name for name in PART_LABELS if any(of_policy[name] > 0 for of_policy in parts)],
        part_labels=PART_LABELS,
        part_color=lambda name: f"var(--parts-{list(PART_LABELS).index(name)})",
        **_pictures(comparison, verdict),
        bound=_bound(comparison),
        over_bound={one.name: (one.mean("time_over_bound") or 1.0) - 1 for one in comparison.policies},
        batch_labels=_BATCH_LABELS,
        cp_sizes=format_cp_sizes,
    )


def _layout(comparison: Comparison) -> str:
    topology = comparison.problem.topology
    gpus = f"{topology.world_size} GPUs ({comparison.hardware_name})"
    if comparison.is_tuned:
        return f"{gpus}, every policy at its own fastest layout"
    return " · ".join([f"{gpus}: {topology.num_lanes} lanes", *comparison.policies[0].setting.split])


def _typeset(text: str) -> str:
    """Return a terminal's text with typographic signs: 1.3× for 1.3x, – for .. between numbers, → for ->."""
    text = re.sub(r"(?<=\d)x\b", "×", text)
    return re.sub(r"(?<=\d)\.\.(?=\d)", "–", text).replace(" -> ", " → ")


def _cells(one: PolicyOutcome, speedups: Mapping[str, Speedup]) -> list[tuple[str, str]]:
    """Return the cells of a policy's row: (text, smaller text below it)."""
    spread, speedup = one.stdev("iteration_s"), speedups.get(one.policy)
    interval = f"{speedup.low:.2f}–{speedup.high:.2f}" if speedup and speedup.low and speedup.high else ""
    parts, padding, rows = one.parts, one.mean("padding_fraction"), one.mean("num_microbatches")
    return [
        (format_s(one.iteration_s), f"± {format_s(spread)}" if spread else ""),
        (f"{speedup.ratio:.2f}×" if speedup else "", interval),
        (format_count(one.mean("tokens_per_s_per_gpu") or 0.0), ""),
        (format_count(one.mean("tflops_per_gpu") or 0.0), ""),
        ("" if rows is None else f"{rows:.{min(len(one.batches), 2) - 1}f}", ""),
        ("" if parts is None else f"{parts.bubble_s / parts.iteration_s:.1%}", ""),
        ("" if padding is None else f"{padding:.1%}", ""),
        (format_s(one.mean("plan_s") or 0.0), ""),
        _sent(one),
    ]


def _sent(one: PolicyOutcome) -> tuple[str, str]:
    """Return, as text, the bytes that exchanges send in an iteration, and those that go to other nodes."""
    total, across = one.mean("sent_bytes"), one.mean("sent_across_nodes_bytes")
    if total is None:
        return "", ""
    return format_bytes(total), f"{format_bytes(across)} to other nodes" if across else ""


def _notes(comparison: Comparison) -> list[str]:
    notes = []
    if any(one.low is not None for one in comparison.speedups):
        notes.append("± one standard deviation over batches; a speed-up stands with its 95% interval over batches.")
    elif comparison.speedups:
        notes.append("One batch says nothing of others: compare several for an interval.")
    limits = {one.policy: one.max_tokens_per_rank for one in comparison.policies}
    if comparison.is_tuned:
        notes += [f"{one.name} at {one.setting.words} (padded tokens of a rank)." for one in comparison.policies]
    elif len(set(limits.values())) == 1:
        notes.append(f"Limit: {next(iter(limits.values()))} padded tokens of a rank in a micro-batch.")
    else:
        named = ", ".join(f"{name} {limit}" for name, limit in limits.items())
        notes.append(f"Limit of padded tokens of a rank in a micro-batch: {named}.")
    notes += [
        f"{one.policy}: CP sizes up to {one.setting.max_cp_size}, as larger groups take memory from tokens."
        for one in comparison.policies
        if one.setting.max_cp_size is not None and not comparison.is_tuned
    ]
    notes += [
        f"{one.policy}: {note}"
        for one in comparison.policies
        for note in dict.fromkeys(b.note for b in one.batches)
        if note
    ]
    return notes


def _pictures(comparison: Comparison, verdict: Verdict | None) -> dict[str, Any]:
    """Return the pictures of one batch, planned by the dynamic policy and by what it was judged against."""
    number = _typical_batch(comparison, verdict)
    planned = [(one, one.batches[number]) for one in comparison.policies if one.parts is not None]
    all_timelines = {one.policy: (one.name, batch.timeline) for one, batch in planned if isinstance(batch, PlanOutcome)}
    if not all_timelines:
        return {"pictures": _tick_pictures(comparison, number), "batch_note": "", "placed": [], "placed_note": ""}
    wanted = (verdict.baseline if verdict else "", "dynamic")
    timelines = [all_timelines[policy] for policy in wanted if policy in all_timelines]
    timelines = timelines or list(all_timelines.values())[:2]
    names = " and ".join(name for name, _ in timelines)
    several = len(comparison.batches) > 1
    which = (
        f"Batch {number + 1} of {len(comparison.batches)}, the one with the median speed-up" if several else "The batch"
    )
    problem = comparison.problem
    name, plan = timelines[-1][0], timelines[-1][1].plan
    return {
        "pictures": _plan_pictures(timelines, comparison.batches[number], problem) + _tick_pictures(comparison, number),
        "batch_note": f"{which}, planned by {names}.",
        **placed_section(name, plan, replace(problem, topology=plan.topology)),
    }


def _plan_pictures(
    timelines: Sequence[tuple[str, Timeline]], samples: Sequence[Sample], problem: Problem
) -> list[Picture]:
    """Return the pictures of a batch: its plans, its lengths, and which CP size suits which length."""
    points = knee_points(problem.model, problem.hardware, CostModel(problem_of_prices(problem)))
    end = " and ".join(f"{name} ends at {format_s(timeline.makespan_s)}" for name, timeline in timelines)
    return [
        picture(
            partial(gantt, timelines), name="gantt", title="Who computes what, and when", width_in=WIDE_IN,
            caption=f"{end}. A bar spans {_lanes_of_bar(timelines)}; numbers are micro-batches; gaps are idle.",
        ),
        picture(
            partial(cp_map, [(name, timeline.plan) for name, timeline in timelines]), name="cp-sizes",
            title="CP sizes by lane and micro-batch", width_in=MEDIUM_IN,
            caption="A tile is a CP group; small groups exchange less and waste less, large ones hold long samples.",
        ),
        picture(
            partial(length_histogram, [sample.seqlen for sample in samples]), name="lengths",
            title="Lengths of the batch", width_in=MEDIUM_IN, caption=_tail(samples, problem.model),
        ),
        picture(
            partial(imbalance, [(name, timeline.lane_busy_s) for name, timeline in reversed(timelines)]),
            name="imbalance", title="How evenly lanes work", width_in=MEDIUM_IN,
            caption="Busy seconds of every lane, mean of its stages; dashed: the mean of all. Flat is even, low fast.",
        ),
        picture(
            partial(knee, points), name="knee", title="Which CP size for which length", width_in=MEDIUM_IN,
            caption="Utilisation of a sample that runs alone. To the left of its knee a CP size wastes its ranks.",
        ),
    ]  # fmt: skip


def _tick_pictures(comparison: Comparison, number: int) -> list[Picture]:
    batches = ((one.name, one.batches[number]) for one in comparison.policies)
    pools = [(name, batch.pool) for name, batch in batches if isinstance(batch, PoolOutcome)]
    if not pools:
        return []
    return [
        picture(
            partial(tick_gantt, pools), name="ticks", title="What stages run in each tick of a pool", width_in=WIDE_IN,
            caption="All stages meet in every layer; one without a micro-batch computes attention for the others.",
        )
    ]  # fmt: skip


def _lanes_of_bar(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return which lanes a bar spans; those of a placed bucket may end one by one."""
    has_placed = any(timeline.plan.num_placed for _, timeline in timelines)
    return f"the lanes of a CP group{' that end together' if has_placed else ''}"


def _typical_batch(comparison: Comparison, verdict: Verdict | None) -> int:
    ratios = next((one.per_batch for one in comparison.speedups if verdict and one.baseline == verdict.baseline), ())
    return ratios.index(statistics.median_low(ratios)) if ratios else 0


def _tail(samples: Sequence[Sample], model: ModelShape) -> str:
    """Return a sentence on the samples that hold half of the attention work."""
    squares = sorted((model.squared_tokens(sample) for sample in samples), reverse=True)
    half, total, count = sum(squares) / 2, 0.0, 0
    while total < half:
        total += squares[count]
        count += 1
    share = f"{count} of {len(samples)} samples ({count / len(samples):.1%}) hold half of the attention work."
    if any(sample.mask is not None for sample in samples):
        return f"The costliest {share} Each has a mask of its own."
    if model.window is not None:
        return f"The longest {share} Of the model, {model.windows_in_words}."
    return f"The longest {share} Attention work grows with the square of the length."


def _bound(comparison: Comparison) -> str:
    # Bounds differ between token limits, so there is one for each limit.
    bounds = {one.max_tokens_per_rank: one.mean("lower_bound_s") or 0.0 for one in reversed(comparison.policies)}
    return " and ".join(
        f"{format_s(seconds)} with {limit} tokens per rank" for limit, seconds in reversed(bounds.items())
    )
