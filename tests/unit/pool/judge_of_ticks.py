"""What would hang, said again without `tick_order`: a judge of lists of what stages run in each tick."""

from collections.abc import Sequence

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.pipeline.schedule import KINDS, Operation, needed_operation

StageTicks = Sequence[Sequence[Operation | None]]
"""[stage][tick] -> what the stage runs; None: it only serves."""


def check_ticks(ticks: StageTicks, vp_size: int, num_microbatches: int) -> None:
    """Refuse lists with which stages wait forever: IllegalPlanError shows the tick and the stages around it. A stage
    begins a tick when all are at it, none has to do something of the other phase, and its input is there."""
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
