"""The operations of a pipeline: their order in Megatron-Core, and what each of them waits for and pays.

An `Operation` prints as `chunk F|B micro_batch` ("0F3", "1B0") and parses back. The list depends on stage, pp_size,
num_microbatches and vp_size only, so all lanes of a stage have the same. A model chunk of a stage is virtual stage g =
chunk * pp_size + stage. An operation waits for what its own stage runs before it, and for its input:

    F at g > 0        F at g - 1, one hop later
    B at g < last     B at g + 1, one hop later
    B at the last g   its own F, which its stage has run before it: no hop

The first virtual stage also embeds tokens, the last one computes logits and loss. `pipeline_graph` writes this down as
arrays, which simulation, critical paths, profiles, bounds, the exact search and timelines read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dynamic_cp.arrays import Ints
from dynamic_cp.errors import InvalidInputError

Kind = Literal["F", "B"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Forward and backward."""


class Operation(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch on one model chunk of a stage.

    Attributes:
        kind, micro_batch, chunk: which.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@lru_cache(maxsize=4096)
def stage_operations(stage: int, pp_size: int, num_microbatches: int, vp_size: int = 1) -> tuple[Operation, ...]:
    """Return what `stage` runs, in order: 1F1B, interleaved 1F1B, or F and B in turn without pipelining.

    Args:
        stage: pipeline stage, 0 .. pp_size - 1.
        pp_size: number of stages.
        num_microbatches: micro-batches of the global batch (>= 1), with vp_size > 1 a multiple of pp_size.
        vp_size: model chunks of a stage.

    Raises:
        InvalidInputError: num_microbatches does not fit the interleaved schedule.

    Example: stage 0 of 2 with 3 micro-batches runs 0F0 0F1 0B0 0F2 0B1 0B2.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2, with
    Megatron-Core's default micro-batch group size pp_size.
    """
    if vp_size > 1 and num_microbatches % pp_size:
        raise InvalidInputError(
            f"{num_microbatches} micro-batches is not a multiple of pp_size {pp_size}: "
            "the interleaved schedule needs one, add empty micro-batches"
        )
    total = num_microbatches * vp_size
    stages_after = pp_size - 1 - stage
    num_warmup = min(total, stages_after if vp_size == 1 else 2 * stages_after + (vp_size - 1) * pp_size)

    # Interleaving runs pp_size micro-batches through chunk 0, the same ones through chunk 1, and so on.
    group = pp_size if vp_size > 1 else 1
    micro_batches = [k // (group * vp_size) * group + k % group for k in range(total)]
    chunks = [k % (group * vp_size) // group for k in range(total)]
    forwards = [Operation("F", i, c) for i, c in zip(micro_batches, chunks, strict=True)]
    backwards = [Operation("B", i, vp_size - 1 - c) for i, c in zip(micro_batches, chunks, strict=True)]

    steady = zip(forwards[num_warmup:], backwards, strict=False)
    return (
        *forwards[:num_warmup],
        *(operation for pair in steady for operation in pair),
        *backwards[total - num_warmup :],
    )


def peak_in_flight_tokens(rank_tokens: npt.NDArray[np.int64], pp_size: int, vp_size: int = 1) -> npt.NDArray[np.int64]:
    """Return [stage, lane] -> the most tokens of a rank whose activations are alive at once.

    A micro-batch counts from the start of its forward to the end of its backward, once for each model chunk that is
    between the two; a chunk holds 1 / vp_size of the stage's layers. The order of operations alone decides this, not
    how long they take.

    Args:
        rank_tokens: [micro-batch, lane] -> padded tokens of a rank.
        pp_size, vp_size: stages and model chunks of a stage.

    Example: 3 micro-batches of 10 tokens on 2 stages: 20 on stage 0, 10 on stage 1.
    """
    num_microbatches = len(rank_tokens)
    return np.stack(
        [
            most_alive_tokens(stage_operations(stage, pp_size, num_microbatches, vp_size), rank_tokens)
            for stage in range(pp_size)
        ]
    )


def most_alive_tokens(operations: Sequence[Operation], rank_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return [lane] -> the most tokens between forward and backward on lanes that run `operations` in this order."""
    signs = np.array([1 if operation.kind == "F" else -1 for operation in operations], np.int64)
    micro_batches = [operation.micro_batch for operation in operations]
    alive: npt.NDArray[np.int64] = np.cumsum(signs[:, None] * rank_tokens[micro_batches], axis=0)
    peak: npt.NDArray[np.int64] = alive.max(axis=0)
    return peak


FORWARD, BACKWARD = 0, 1
"""Indexes of `schedule.KINDS`."""
EMBEDDING, HEAD = 0, 1


class Graph(NamedTuple):
    """All operations of one lane, in an order in which it can run them; all lanes have the same. Arrays are [operation]
    unless they say more; where one names another operation, -1 means none.

    Attributes:
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
    """The operation whose output another one needs, and whether it comes through a hop."""

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
    """Return the graph of Megatron-Core's schedule (`stage_operations`), in an order that is right for any plan."""
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
    """Return an order that can run, of operations listed stage by stage; `source`: their inputs, -1: none."""
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
