"""Table C: whole training steps, the best plan with placed attention beside the best one without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.planner.report import Row, table
from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.errors import DynamicCPError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import BY_PLACEMENT, CP_COMM_TYPES, PlanOptions, Problem, Sample, SharedQuestion, Topology

K = 1024
NUM_LANES = 32
MAX_SEQLEN = 128 * K
MASKS = ("causal", "lambda:64,4096", "causal_blockwise:256,2", "shared_question:4x0.2")
DATA = ("sft_longalign", "github_bal")


class Layout(NamedTuple):
    """A model and how its ranks are arranged over 32 lanes.

    Attributes:
        limit: tokens of a rank.
        samples: of a global batch.
    """

    model: str
    tp: int
    pp: int
    limit: int
    samples: int

    @property
    def name(self) -> str:
        return f"{self.model}, TP {self.tp}, PP {self.pp}"


LAYOUTS = (
    Layout("llama-3-8b", 4, 1, 16 * K, 64),
    Layout("llama-3-8b", 1, 4, 16 * K, 128),
    Layout("llama-2-13b", 4, 1, 16 * K, 64),
    Layout("llama-2-13b", 1, 8, 16 * K, 256),
)
CASES = tuple(product(LAYOUTS, DATA, MASKS))


class Windows(NamedTuple):
    """Which layers of a model have a window: its keys, the token's own among them, and first tokens that all see.

    Attributes:
        but_every: every n-th layer has none; 0: all have one.
    """

    tokens: int
    but_every: int = 0
    sink_tokens: int = 0

    def describe(self) -> tuple[str, str]:
        """Return the cells of a table: the window, and the layers with it."""
        sink = f" and a sink of {self.sink_tokens}" if self.sink_tokens else ""
        layers = {0: "all", 2: "all but every second", 6: "all but every sixth"}[self.but_every]
        return f"{self.tokens:,}{sink}", layers


WINDOWS = (
    Windows(4 * K),
    Windows(K),
    Windows(K, 2),
    Windows(K, 6),
    Windows(128, 2),
    Windows(K, 2, 64),
)
WINDOW_CASES = tuple(product(WINDOWS, DATA))


def problem_of(layout: Layout) -> Problem:
    """Return the problem of a layout without placed attention; its limit fits into the device's memory."""
    topology = Topology(num_lanes=NUM_LANES, tp_size=layout.tp, pp_size=layout.pp, sequence_parallel=layout.tp > 1)
    options = PlanOptions(max_tokens_per_rank=layout.limit, recompute="full", cp_comm_types=CP_COMM_TYPES)
    model, hardware = load_model(layout.model), load_hardware("h100")
    problem = Problem(topology=topology, model=model, hardware=hardware, options=options)
    MemoryModel(problem).check_limit_fits(layout.limit, NUM_LANES)
    return problem


def measure_case(layout: Layout, data: str, mask: str, seed: int = 0) -> Row:
    """Return seconds of a step: without placed attention, with it, and with it alone; and of separate samples."""
    without = problem_of(layout)
    mask_of = parse_mask_rule(mask)
    lengths = draw_lengths(data, layout.samples, seed, MAX_SEQLEN).tolist()
    samples = [Sample(sample_id=number, seqlen=size, mask=mask_of(size)) for number, size in enumerate(lengths)]
    seconds = {
        "without_s": _step_s(without, samples, CP_COMM_TYPES),
        "with_s": _step_s(without, samples, (*CP_COMM_TYPES, BY_PLACEMENT)),
        "alone_s": _step_s(without, samples, (BY_PLACEMENT,)),
    }
    pieces = separate(samples)
    seconds["separate_s"] = _step_s(without, pieces, CP_COMM_TYPES) if len(pieces) > len(samples) else None
    return {"layout": layout.name, "data": data, "mask": mask, **seconds}


def measure_windows(windows: Windows, data: str, layout: Layout = LAYOUTS[0]) -> Row:
    """Return seconds of a step of a model with windows: without placed attention, and with it."""
    problem = problem_of(layout)
    model = replace(
        problem.model,
        window_tokens=windows.tokens,
        window_attn_skip_freq=windows.but_every,
        window_sink_tokens=windows.sink_tokens,
    )
    lengths = draw_lengths(data, layout.samples, 0, MAX_SEQLEN).tolist()
    samples = [Sample(sample_id=number, seqlen=size) for number, size in enumerate(lengths)]
    problem = replace(problem, model=model)
    return {
        "windows": windows,
        "data": data,
        "without_s": _step_s(problem, samples, CP_COMM_TYPES),
        "with_s": _step_s(problem, samples, (*CP_COMM_TYPES, BY_PLACEMENT)),
    }


def separate(samples: Sequence[Sample]) -> list[Sample]:
    """Return the causal samples of prompt and answer that a sample with several answers replaces."""
    seqlens: list[int] = []
    for sample in samples:
        if isinstance(sample.mask, SharedQuestion):
            seqlens += [sample.mask.prompt + answer for answer in sample.mask.answers]
        else:
            seqlens.append(sample.seqlen)
    return [Sample(sample_id=number, seqlen=size) for number, size in enumerate(seqlens)]


def _step_s(problem: Problem, samples: Sequence[Sample], exchanges: tuple) -> float | None:  # type: ignore[type-arg]
    try:
        return plan_problem(
            replace(problem, options=replace(problem.options, cp_comm_types=exchanges)), samples
        ).predicted_s
    except DynamicCPError:
        return None


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""

    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    lines = []
    for row in rows:
        ratios = [
            "–" if row[name] is None else f"{row[name] / row['with_s']:.2f}" for name in ("without_s", "separate_s")
        ]
        seconds = [text(row[name]) for name in ("without_s", "alone_s", "with_s")]
        lines.append((row["layout"], row["data"], row["mask"].partition(":")[0], *seconds, *ratios))
    header = "model, layout | lengths | mask | without | blocks alone | with | without / with | separate / with"
    return table(header, lines, left=3)


def windows_markdown(rows: Sequence[Row]) -> str:
    """Return a line for each kind of windows, with seconds without and with placed attention for each data."""
    data = list(dict.fromkeys(row["data"] for row in rows))
    lines = []
    for windows in dict.fromkeys(row["windows"] for row in rows):
        own = {row["data"]: row for row in rows if row["windows"] == windows}
        lines.append(
            (*windows.describe(), *(f"{own[name]['without_s']:.3f} → {own[name]['with_s']:.3f}" for name in data))
        )
    return table(f"window | layers with it | {' | '.join(data)}", lines, left=4)


def summary_markdown(rows: Sequence[Row]) -> str:
    """Return the geometric mean, least and most of what placed attention gives, by mask."""
    lines = []
    for mask in dict.fromkeys(row["mask"] for row in rows):
        gains = [row["without_s"] / row["with_s"] for row in rows if row["mask"] == mask and row["without_s"]]
        mean = float(np.exp(np.mean(np.log(gains))))
        goal = "≥ 1.00" if mask == "causal" else "≥ 1.3"
        lines.append((mask.partition(":")[0], goal, f"{mean:.2f}", f"{min(gains):.2f}", f"{max(gains):.2f}"))
    return table("mask | goal | geometric mean | least | most", lines)
