"""Ticks: all pipeline stages in the same phase, so that all of them can compute attention for each other.

In a tick a stage runs a model chunk of a micro-batch, or it only serves: it computes attention for the others. Which,
`types.Tick.unit` knows, and `types.tick_order` when. With one chunk on each stage:

    2 stages, 3 micro-batches        F0 F1 B0 F2 B1 F3 B2 B3
    stage 0                          F0 F1  - F2 B0  - B1 B2
    stage 1                           - F0 B0 F1 B1 F2 B2  -

With two, ticks are half as long, and so is what the pipeline takes to fill:

    2 stages of 2 chunks, 2 micro-batches    F0  F1  F2  F3  B0  F4  B1  B2  B3  B4
    stage 0                                 0F0 0F1 1F0 1F1   -   - 1B0 1B1 0B0 0B1
    stage 1                                   - 0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1   -

Every layer of a tick has an exchange of all stages, so all have to run the same ticks in the same order. Stage s keeps
(vp_size + 1) * pp_size - 1 - 2 * s chunks of micro-batches between forward and backward, each of 1 / vp_size of its
layers, where 1F1B keeps pp_size - s whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.pipeline.graph import needed_operation
from dynamic_cp.pipeline.schedule import Operation
from dynamic_cp.types import KINDS, tick_order

StageTicks = Sequence[Sequence[Operation | None]]
"""[stage][tick] -> what the stage runs; None: it only serves."""


def stage_ticks(pp_size: int, vp_size: int, num_microbatches: int) -> list[list[Operation | None]]:
    """Return what each stage runs in each tick, in order."""
    order = tick_order(pp_size, vp_size, num_microbatches)
    found: list[list[Operation | None]] = []
    for stage in range(pp_size):
        units = [tick.unit(stage, pp_size, vp_size, num_microbatches) for tick in order]
        found.append(
            [None if unit is None else Operation(tick.kind, *unit) for tick, unit in zip(order, units, strict=True)]
        )
    return found


def check_ticks(ticks: StageTicks, vp_size: int, num_microbatches: int) -> None:
    """Refuse lists with which stages would wait for each other forever.

    A stage begins a tick when all stages are at it, none has to do something of the other phase, and its input is
    there.

    Raises:
        IllegalPlanError: a stage lacks an operation, or the lists deadlock; the first line says where, those below show
            the stages around it. `tick` is the place in the lists.
    """
    pp_size = len(ticks)
    wanted = sorted(
        Operation(kind, row, chunk) for kind in KINDS for row in range(num_microbatches) for chunk in range(vp_size)
    )
    for stage, own in enumerate(ticks):
        found = sorted(operation for operation in own if operation is not None)
        if found != wanted:
            strange = {*found} ^ {*wanted} or {one for one in found if found.count(one) > 1}
            first = min(strange)
            raise IllegalPlanError(
                f"stage {stage} runs {first} {found.count(first)} times, it must be "
                f"{wanted.count(first)}: list every operation of the stage once",
                stage=stage,
            )
    done: set[tuple[int, Operation]] = set()
    for place in range(max(map(len, ticks))):
        here = [own[place] if place < len(own) else None for own in ticks]
        lacking = [stage for stage, own in enumerate(ticks) if place >= len(own)]
        if lacking:
            _refuse(ticks, place, f"stage {lacking[0]} has {len(ticks[lacking[0]])} ticks, others have more")
        phases = {operation.kind for operation in here if operation is not None}
        if len(phases) > 1:
            stages = [next(s for s, one in enumerate(here) if one is not None and one.kind == kind) for kind in KINDS]
            _refuse(ticks, place, f"stage {stages[0]} is at {here[stages[0]]}, stage {stages[1]} at {here[stages[1]]}")
        for stage, operation in enumerate(here):
            need = None if operation is None else needed_operation(stage, operation, pp_size, vp_size)
            if need is not None and (need.stage, need.operation) not in done:
                _refuse(ticks, place, f"stage {stage} is at {operation} before {need.operation} of stage {need.stage}")
        done |= {(stage, operation) for stage, operation in enumerate(here) if operation is not None}


def _refuse(ticks: StageTicks, place: int, reason: str) -> None:
    shown = range(max(0, place - 2), place + 3)
    lines = [f"  tick {place - min(place, 2)} and on"]
    for stage, own in enumerate(ticks):
        cells = [str(own[one] or "-") if one < len(own) else "" for one in shown]
        lines.append(f"  stage {stage}  " + " ".join(f"{cell:>5}" for cell in cells))
    raise IllegalPlanError(
        f"tick {place} deadlocks: {reason}, and attention of a tick needs all stages in one phase: run `tick_order` on "
        "all of them; 1F1B and interleaving have no such order\n" + "\n".join(lines),
        tick=place,
    )
