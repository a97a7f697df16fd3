"""Table A: one layer's attention of a micro-batch, by every way to share it out, under every mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.blocks import ours
from benchmarks.blocks.baselines import baselines, planner_s
from benchmarks.blocks.setting import Setting, masked
from benchmarks.planner.report import Row, table

DATA = ("sft_longalign", "prolong", "github_bal")
MASKS = ("causal", "full", "lambda:64,4096", "causal_blockwise:256,2", "shared_question:4x0.2")
SCALES = (0.5, 1.0, 2.0, 4.0)
NUM_BATCHES = 3
PAPER_NAMES = ("ring", "zigzag ring", "TransformerEngine", "double ring")
"""The ways that DCP's paper compares with."""
NAMES = (*PAPER_NAMES, "repeated KV heads", "Ulysses x DP", "whole documents", "blocks")
LONG_DATA = DATA[:2]
"""Lists that stand for LongAlign and LongDataCollections, for which the goals are."""
GOALS = (
    ("causal, geometric mean", ("causal",), 1.1),
    ("sparse masks, geometric mean", MASKS[2:], 2.0),
)


class Cell(NamedTuple):
    """Which batches, under which mask."""

    data: str
    mask: str
    scale: float


CELLS = tuple(Cell(*one) for one in product(DATA, MASKS, SCALES))
PAPER_CELLS = tuple(cell for cell in CELLS if cell.data in LONG_DATA and cell.mask != "full")


def measure_cell(cell: Cell, setting: Setting, num_batches: int = NUM_BATCHES) -> Row:
    """Return the mean milliseconds of its batches by name, and the sums that ratios are made of."""
    rows = []
    for seqlens in setting.batches(cell.data, num_batches, cell.scale):
        samples = masked(seqlens, cell.mask)
        found = dict(baselines(samples, setting))
        best_ms, paper_ms = min(found.values()), min(found[name] for name in PAPER_NAMES)
        placed = ours.price(ours.chosen(samples, setting), setting)
        found["blocks"] = placed.milliseconds
        found["exposed"] = placed.exposed_ms
        # What `auto` has to choose from: this project's plan without blocks, or blocks.
        found["auto"] = min(placed.milliseconds, 1e3 * planner_s(samples, setting))
        rows.append({**found, "best": best_ms, "best of the paper": paper_ms, "documents": len(samples)})
    return {**cell._asdict(), **{name: float(np.mean([row[name] for row in rows])) for name in rows[0]}}


def gain(row: Row, name: str = "blocks", over: str = "best") -> float:
    """Return how many times as long another way takes; by default the best of all others in each batch."""
    return float(row[over] / row[name])


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of some ratios."""
    return float(np.exp(np.mean(np.log(list(values)))))


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of the cells with the lists' own lengths, if there are any; by scale see `shapes_markdown`."""
    header = " | ".join(["lengths", "mask", *NAMES, "exposed", "best / blocks"])
    lines = []
    for row in [row for row in rows if row["scale"] == 1] or rows:
        numbers = [f"{row[name]:.2f}" for name in (*NAMES, "exposed")]
        lines.append((row["data"], row["mask"].partition(":")[0], *numbers, f"{gain(row):.2f}"))
    return table(header, lines, left=2)


def goals_markdown(rows: Sequence[Row]) -> str:
    """Return the goals, and what is reached."""
    of_goals = [row for row in rows if row["data"] in LONG_DATA]
    lines = []
    for what, masks, goal in GOALS:
        chosen = [row for row in of_goals if row["mask"] in masks]
        reached = [geometric_mean(gain(row, name) for row in chosen) for name in ("blocks", "auto")]
        lines.append((what, f"≥ {goal}", *(f"{one:.2f}" for one in reached)))
    for what, masks in (("causal", MASKS[:1]), ("full", MASKS[1:2]), ("sparse masks", MASKS[2:])):
        chosen = [row for row in rows if row["mask"] in masks]
        worst = [min(gain(row, name) for row in chosen) for name in ("blocks", "auto")]
        lines.append((f"{what}, worst cell of all lengths", "≥ 0.999", *(f"{one:.2f}" for one in worst)))
    return table("best of the others over ours | goal | blocks | auto", lines)


PAPER_FIGURES = (
    # Read off its figures 13 and 14; forward and backward of the first are apart there.
    (
        "sft_longalign",
        "causal",
        "best of the paper",
        "LongAlign, best over DCP",
        "1.49 / 1.07 / 0.88 / 0.69 forward, 1.63 / 1.21 / 1.11 / 0.83 backward",
    ),
    (
        "prolong",
        "causal",
        "best of the paper",
        "LDC, best over DCP",
        "2.42 / 2.12 / 1.55 / 1.17 forward, 2.12 / 1.95 / 1.60 / 1.27 backward",
    ),
    ("prolong", "causal", "TransformerEngine", "LDC, TE over DCP", "2.43 / 2.04 / 1.64 / 1.28"),
    ("prolong", "causal_blockwise:256,2", "TransformerEngine", "LDC, TE over DCP", "3.84 / 3.57 / 3.29 / 2.93"),
    ("prolong", "lambda:64,4096", "TransformerEngine", "LDC, TE over DCP", "3.29 / 1.49 / 3.08 / 3.87"),
    ("prolong", "shared_question:4x0.2", "TransformerEngine", "LDC, TE over DCP", "3.39 / 3.08 / 2.48 / 2.30"),
)
"""(our lengths, mask, compared with, what the paper shows, its figures by scale)."""


def paper_markdown(rows: Sequence[Row]) -> str:
    """Return our ratios on the paper's cluster beside those of the paper, by scale; and over the best of all."""
    lines = []
    for data, mask, over, what, figures in PAPER_FIGURES:
        chosen = [row for row in rows if (row["data"], row["mask"]) == (data, mask)]
        ours_, best = (" / ".join(f"{gain(row, over=name):.2f}" for row in chosen) for name in (over, "best"))
        lines.append((what, mask.partition(":")[0], figures, data, ours_, best))
    return table(
        "in the paper | mask | its ratios by scale | our lengths | our ratios | over the best of all", lines, 6
    )


def shapes_markdown(rows: Sequence[Row]) -> str:
    """Return the best of the others over blocks by mask and scale, as geometric means over lengths."""
    scales = sorted({row["scale"] for row in rows})
    lines = []
    for mask in dict.fromkeys(row["mask"] for row in rows):
        of_mask = [row for row in rows if row["mask"] == mask]
        means = [geometric_mean(gain(row) for row in of_mask if row["scale"] == scale) for scale in scales]
        lines.append((mask.partition(":")[0], *(f"{one:.2f}" for one in means)))
    return table(" | ".join(["mask", *(f"x{scale:g}" for scale in scales)]), lines)
