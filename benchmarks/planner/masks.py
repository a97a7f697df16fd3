"""Planning time beside the modelled step, where samples have masks and micro-batches are placed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.planner.report import Row, table
from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import CP_COMM_TYPES, PlannedBatch, PlanOptions, Sample, Topology

LIMIT = 16384
MOST_SHARE = 0.5
"""Share of the step that planning should take at most; larger ones are printed in bold."""
MASKS = ("shared_question:4x0.2", "lambda:64,4096")


class Cell(NamedTuple):
    """A global batch: its masks, lanes and samples."""

    mask: str
    lanes: int
    samples: int

    @property
    def name(self) -> str:
        """The text that `--cases` searches."""
        return f"{self.mask}_n{self.lanes}_{self.samples}samples"

    def planned(self) -> tuple[PlannedBatch, float]:
        """Return the plan, and the CPU seconds that it took."""
        rule = parse_mask_rule(self.mask)
        seqlens = draw_lengths("lognormal-github", self.samples, 0, 131072).tolist()
        samples = [Sample(sample_id=index, seqlen=seqlen, mask=rule(seqlen)) for index, seqlen in enumerate(seqlens)]
        start_s = time.process_time()
        planned = plan_global_batch(
            samples,
            topology=Topology(num_lanes=self.lanes, tp_size=4, sequence_parallel=True),
            model=load_model("llama-3-8b"),
            hardware=load_hardware("h100"),
            options=PlanOptions(max_tokens_per_rank=LIMIT, recompute="full", cp_comm_types=(*CP_COMM_TYPES, "blocks")),
        )
        return planned, time.process_time() - start_s


CELLS = tuple(Cell(mask, 8 << doubled, 32 << 2 * fours) for mask in MASKS for doubled in range(6) for fours in range(4))


def measure(cells: Sequence[Cell]) -> list[Row]:
    """Return a row for each cell."""
    CELLS[0].planned()  # loads compiled code
    return [_row(cell) for cell in cells]


def _row(cell: Cell) -> Row:
    planned, plan_s = cell.planned()
    return {**cell._asdict(), "plan_s": plan_s, "step_s": planned.predicted_s, "reason": planned.reason}


def markdown(rows: Sequence[Row]) -> str:
    """Return CPU seconds of planning / modelled seconds of the step: masks and lanes down, samples across."""
    sizes = sorted({row["samples"] for row in rows})
    lines = {(row["mask"], row["lanes"]): ["–"] * len(sizes) for row in rows}
    for row in rows:
        share = row["plan_s"] / row["step_s"]
        text = f"{row['plan_s']:.2f} / {row['step_s']:.2f}"
        lines[row["mask"], row["lanes"]][sizes.index(row["samples"])] = text if share <= MOST_SHARE else f"**{text}**"
    header = " | ".join(["mask", "lanes", *(f"{size} samples" for size in sizes)])
    return table(header, ([f"`{mask}`", lanes, *texts] for (mask, lanes), texts in lines.items()))
