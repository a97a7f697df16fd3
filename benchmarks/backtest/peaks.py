"""Published peaks of memory beside those of the model, and attention by the kernel that ran.

Megatron-Bridge's writers run on the last rank (its issue 3167), so a peak of a pipeline is that of the last stage. It
is what torch allocates: communicators of NCCL are not in it, and the fused cross entropy keeps a quarter of the logits
that the unfused one does. Gigabytes are taken as 2^30 bytes, as the one page says that names its unit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.backtest.errors import spread
from benchmarks.backtest.runs import FILE, Run, read_runs
from benchmarks.backtest.steps import Modelled, modelled, slower, stages_of
from benchmarks.planner.report import percent, table
from dynamic_cp.memory.memory_model import StageMemory

SLOWEST = 0.4
"""Rate of attention over that of the hardware file in the slowest published runs with sequences of 32k and more."""
OF_OTHER_KERNELS = ("long context, other kernels", "long context, FP8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A published peak.

    Attributes:
        run: what ran; gigabytes: of 2^30 bytes.
    """

    name: str
    run: Run
    gigabytes: float
    source: str

    @property
    def last_stage(self) -> StageMemory:
        """What the model says of the last stage."""
        return stages_of(self.run)[-1]


def read_peaks() -> tuple[Peak, ...]:
    """Return the published peaks."""
    runs = {run.name: run for run in read_runs()}

    def peak(entry: dict[str, Any]) -> Peak:
        changes = {name: tuple(value) if isinstance(value, list) else value for name, value in entry["changes"].items()}
        run = replace(runs[entry["run"]], **changes)
        return Peak(name=entry["name"], run=run, gigabytes=entry["gigabytes"], source=entry["source"])

    return tuple(map(peak, json.loads(FILE.read_text(encoding="utf-8"))["peaks"]))


def allocated_gb(stage: StageMemory) -> float:
    """Return what torch allocates of a stage, in 2^30 bytes."""
    return (stage.total_bytes - stage.communicators_bytes) / 2**30


def markdown(peaks: Sequence[Peak]) -> str:
    """Return each published peak beside the parts of the modelled one."""
    rows, ratios = [], []
    for peak in peaks:
        stage = peak.last_stage
        ratios.append(allocated_gb(stage) / peak.gigabytes)
        state = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
        parts = (state, stage.activations_bytes, stage.logits_bytes)
        cells = [f"{part / 2**30:.1f}" for part in parts]
        said = f"{peak.gigabytes:.1f}", f"{allocated_gb(stage):.1f}"
        rows.append([peak.name, peak.run.layout, *said, *cells, f"{ratios[-1]:.2f}", f"[card]({peak.source})"])
    found = spread(ratios)
    last = f"Median {found.median:.2f}, rms error {percent(found.rms, 1)}."
    columns = (
        "run | layout | published | modelled | weights, gradients, optimizer | activations | logits | ratio | source"
    )
    return f"{table(columns, rows, left=2)}\n\n{last}"


def kernels_markdown(results: Sequence[Modelled]) -> str:
    """Return runs with other kernels of attention: as priced, and at the slowest rate that was published."""
    rows = []
    for one in results:
        if one.run.group not in OF_OTHER_KERNELS:
            continue
        slow = modelled(one.run, slower(one.run.hardware, 1 / SLOWEST, "attention"))
        inside = "yes" if one.ratio <= 1 <= slow.ratio else "**no**"
        ratios = f"{one.ratio:.2f}", f"{slow.ratio:.2f}"
        rows.append([one.run.name, one.run.layout, f"{one.run.published_s:.2f}", *ratios, inside])
    columns = f"run | layout | published s | ratio as priced | ratio at {SLOWEST:g} of the attention rate | between"
    return table(columns, rows, left=2)
