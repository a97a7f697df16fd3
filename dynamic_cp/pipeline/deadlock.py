"""Finds an order in which given lists of operations can run, or names what deadlocks.

Lists may differ from lane to lane. An operation of a bucket starts when it is next on all lanes of the bucket and its
input is there; nothing else joins lanes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.pipeline.schedule import KINDS, Operation, needed_operation

LaneOperations = Mapping[tuple[int, int], Sequence[Operation]]
"""(stage, lane) -> what it runs, in order."""


class BucketOperation(NamedTuple):
    """One operation of one stage on one bucket (its index in the micro-batch)."""

    stage: int
    operation: Operation
    bucket_index: int


def resolve(
    operations: LaneOperations, groups: Sequence[Sequence[range]], pp_size: int, vp_size: int
) -> tuple[BucketOperation, ...]:
    """Return all operations in an order in which they can run.

    Args:
        operations: what each (stage, lane) runs, in order; each runs every operation of the stage once.
        groups: [micro-batch][bucket] -> lanes of the bucket.
        pp_size, vp_size: stages and model chunks of a stage.

    Raises:
        IllegalPlanError: a list lacks an operation or has one that nobody asked for, or the lists deadlock; then
            `stuck` maps (stage, lane) to the operation it cannot start.
    """
    _check_complete(operations, groups, pp_size, vp_size)
    bucket_of_lane = [{lane: index for index, lanes in enumerate(row) for lane in lanes} for row in groups]
    position = dict.fromkeys(operations, 0)
    done: set[tuple[int, Operation, int]] = set()  # stage, operation, bucket
    steps: list[BucketOperation] = []

    def next_operation(place: tuple[int, int]) -> Operation | None:
        return operations[place][position[place]] if position[place] < len(operations[place]) else None

    def obstacle(stage: int, lane: int, operation: Operation) -> str | None:
        """Return what keeps `operation` from starting; None when it can."""
        index = bucket_of_lane[operation.micro_batch][lane]
        need = needed_operation(stage, operation, pp_size, vp_size)
        if need is not None and (need.stage, need.operation, index) not in done:
            return f"{need.operation} on stage {need.stage}"
        for member in groups[operation.micro_batch][index]:
            if next_operation((stage, member)) != operation:
                return f"lane {member}, which is at {next_operation((stage, member))}"
        return None

    # Only the lanes next to a change can become ready: those of the same group, and of the neighbour stages.
    pending = list(operations)
    while pending:
        stage, lane = pending.pop()
        operation = next_operation((stage, lane))
        if operation is None or obstacle(stage, lane, operation) is not None:
            continue
        index = bucket_of_lane[operation.micro_batch][lane]
        members = groups[operation.micro_batch][index]
        done.add((stage, operation, index))
        steps.append(BucketOperation(stage, operation, index))
        for member in members:
            position[stage, member] += 1
        neighbours = {stage, (stage + 1) % pp_size, (stage - 1) % pp_size}
        pending += [(other, member) for other in sorted(neighbours) for member in members]

    stuck = {place: operation for place in operations if (operation := next_operation(place)) is not None}
    if stuck:
        raise _deadlock({place: (stuck[place], obstacle(*place, stuck[place])) for place in sorted(stuck)}, operations)
    return tuple(steps)


def _deadlock(
    stuck: Mapping[tuple[int, int], tuple[Operation, str | None]], operations: LaneOperations
) -> IllegalPlanError:
    """Return the error for (stage, lane) -> the operation that cannot start there, and what keeps it from starting."""
    lines = [
        f"  stage {stage} lane {lane} at {operation} waits for {obstacle}"
        for (stage, lane), (operation, obstacle) in stuck.items()
    ]
    return IllegalPlanError(
        f"the operations deadlock: {len(stuck)} of {len(operations)} (stage, lane) places are stuck; "
        "run shared groups in one order on all their lanes\n" + "\n".join(lines),
        stuck={place: operation for place, (operation, _) in stuck.items()},
    )


def _check_complete(operations: LaneOperations, groups: Sequence[Sequence[range]], pp_size: int, vp_size: int) -> None:
    lanes = {lane for row in groups for group in row for lane in group}
    places = {(stage, lane) for stage in range(pp_size) for lane in lanes}
    if places != operations.keys():
        stage, lane = min(places ^ operations.keys())
        raise IllegalPlanError(
            f"operations are given for {len(operations)} (stage, lane) places, {len(places)} are needed; stage {stage} "
            f"lane {lane} is {'left out' if (stage, lane) in places else 'not in the plan'}: give one list per place",
            stage=stage,
            lane=lane,
        )
    wanted = Counter(
        Operation(kind, micro_batch, chunk)
        for kind in KINDS
        for micro_batch in range(len(groups))
        for chunk in range(vp_size)
    )
    for (stage, lane), todo in operations.items():
        cut = next((operation for operation in todo if operation.part), None)
        if cut is not None:
            raise IllegalPlanError(
                f"stage {stage} lane {lane} runs {cut}, part {cut.part} of micro-batch {cut.micro_batch}: "
                "the sequences of a plan are whole, list part 0 only",
                stage=stage,
                lane=lane,
                operation=cut,
            )
        found = Counter(todo)
        if found != wanted:
            operation = min((wanted - found) + (found - wanted))
            raise IllegalPlanError(
                f"stage {stage} lane {lane} runs {operation} {found[operation]} times, it must be "
                f"{wanted[operation]}: list every operation of the stage once",
                stage=stage,
                lane=lane,
                operation=operation,
            )
