"""What each operation of a pipeline waits for, and which stage pays embedding and head: the one place that knows.

A model chunk of a stage is virtual stage g = chunk * pp_size + stage. An operation waits for what its own stage runs
before it, and for its input:

    F at g > 0        F at g - 1, one hop later
    B at g < last     B at g + 1, one hop later
    B at the last g   its own F, which its stage has run before it: no hop

The first virtual stage also embeds tokens, the last one computes logits and loss.

`pipeline_graph` writes this down as arrays, once for each shape of a pipeline. Whatever walks through a pipeline reads
them: simulation, critical paths, profiles, bounds, the exact search, timelines.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamic_cp.arrays import Ints
from dynamic_cp.pipeline.schedule import KINDS, Operation, stage_operations

FORWARD, BACKWARD = 0, 1
"""Indexes of `schedule.KINDS`."""
EMBEDDING, HEAD = 0, 1


class Graph(NamedTuple):
    """All operations of one lane, in an order in which it can run them; all lanes have the same.

    Arrays are [operation] unless they say more; where one names another operation, -1 says that there is none.

    Attributes:
        stage, micro_batch, chunk: which operation.
        kind: FORWARD or BACKWARD.
        before: the operation that its stage runs before it.
        sender: the operation of another virtual stage whose output it needs, one hop later. B at the last virtual stage
            has none: its own F is on its stage, somewhere before it.
        pays: [operation, EMBEDDING or HEAD] -> whether it does this work, too.
        last: [stage] -> the last operation there.
    """

    stage: Ints
    micro_batch: Ints
    chunk: Ints
    kind: Ints
    before: Ints
    sender: Ints
    pays: npt.NDArray[np.bool_]
    last: Ints


class Need(NamedTuple):
    """The operation whose output another one needs, and whether that comes through a hop or is there already."""

    stage: int
    operation: Operation
    by_hop: bool


def needed_operation(stage: int, operation: Operation, pp_size: int, vp_size: int) -> Need | None:
    """Return what `operation` needs on `stage`; None for F on the first virtual stage."""
    virtual = _virtual_stage(stage, operation.chunk, pp_size)
    if operation.kind == "B" and virtual == pp_size * vp_size - 1:
        return Need(stage, operation._replace(kind="F"), by_hop=False)
    chunk, sender = divmod(virtual + (1 if operation.kind == "B" else -1), pp_size)
    return Need(sender, operation._replace(chunk=chunk), by_hop=True) if chunk >= 0 else None


def edges_paid(stage: int, chunk: int, pp_size: int, vp_size: int) -> tuple[bool, bool]:
    """Return whether a model chunk of `stage` does the work of (EMBEDDING, HEAD), forward and backward."""
    virtual = _virtual_stage(stage, chunk, pp_size)
    return virtual == 0, virtual == pp_size * vp_size - 1


def places_of(graph: Graph) -> list[tuple[int, Operation]]:
    """Return [operation] -> (its stage, the operation itself)."""
    columns = (graph.stage.tolist(), graph.kind.tolist(), graph.micro_batch.tolist(), graph.chunk.tolist())
    return [(stage, Operation(KINDS[kind], row, chunk)) for stage, kind, row, chunk in zip(*columns, strict=True)]


def _virtual_stage(stage: int, chunk: int, pp_size: int) -> int:
    return chunk * pp_size + stage


@lru_cache(maxsize=512)
def pipeline_graph(pp_size: int, num_microbatches: int, vp_size: int) -> Graph:
    """Return the graph of Megatron-Core's schedule (`schedule.stage_operations`).

    It knows no groups of lanes, and its order is right for every bucket of any plan.
    """
    lists = [stage_operations(stage, pp_size, num_microbatches, vp_size) for stage in range(pp_size)]
    listed = [operation for operations in lists for operation in operations]
    num_listed = len(lists[0])
    stage = np.repeat(np.arange(pp_size), num_listed)
    kind = np.array([KINDS.index(operation.kind) for operation in listed])
    micro_batch = np.array([operation.micro_batch for operation in listed])
    chunk = np.array([operation.chunk for operation in listed])

    # All micro-batches need and pay the same.
    places = [(s, Operation(k, 0, c)) for k in KINDS for c in range(vp_size) for s in range(pp_size)]
    number = {place: index for index, place in enumerate(places)}
    needs = [needed_operation(s, operation, pp_size, vp_size) for s, operation in places]
    needed = np.array([-1 if need is None else number[need.stage, need.operation] for need in needs])
    by_hop = np.array([need is not None and need.by_hop for need in needs])
    pays = np.array([edges_paid(s, operation.chunk, pp_size, vp_size) for s, operation in places])
    place = np.ravel_multi_index((kind, chunk, stage), (len(KINDS), vp_size, pp_size))

    # Which of `listed` each needs, then where that stands in the order; -1 stays -1.
    index_of = np.full((len(places) + 1, num_microbatches), -1)
    index_of[place, micro_batch] = np.arange(len(listed))
    source = index_of[needed[place], micro_batch]
    order = _order(source.tolist(), pp_size)
    moved = np.full(len(listed) + 1, -1)
    moved[order] = np.arange(len(listed))
    before = np.arange(-1, len(listed) - 1)
    before[::num_listed] = -1
    sender = np.where(by_hop[place], source, -1)
    graph = Graph(
        stage=stage[order],
        micro_batch=micro_batch[order],
        chunk=chunk[order],
        kind=kind[order],
        before=moved[before[order]],
        sender=moved[sender[order]],
        pays=pays[place[order]],
        last=moved[num_listed - 1 : -1 : num_listed].copy(),
    )
    for array in graph:
        array.setflags(write=False)
    return graph


def _order(source: list[int], pp_size: int) -> list[int]:
    """Return an order that can run, of operations that are listed stage by stage; `source`: their inputs, -1 = none."""
    num_listed = len(source) // pp_size
    following = list(range(0, len(source), num_listed))
    is_done = [False] * len(source) + [True]  # the last one is no input
    order: list[int] = []
    pending = list(range(pp_size))
    while pending:
        stage = pending.pop()
        at, end = following[stage], (stage + 1) * num_listed
        while at < end and is_done[source[at]]:
            is_done[at] = True
            order.append(at)
            at += 1
            pending += ((stage + 1) % pp_size, (stage - 1) % pp_size)
        following[stage] = at
    return order
