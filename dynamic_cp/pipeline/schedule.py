"""The operations of a pipeline stage in the order in which Megatron-Core runs them.

Plain data: an `Operation` prints as `chunk F|B micro_batch` ("0F3", "1B0") and parses back; one of a later part of the
sequences adds `.part` ("0F3.1"). The list depends on stage, pp_size, num_microbatches and vp_size only, so it is the
same for all lanes of a stage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dynamic_cp.errors import InvalidInputError

Kind = Literal["F", "B"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Forward and backward."""


class Operation(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch on one model chunk of a stage.

    Attributes:
        kind, micro_batch, chunk: which.
        part: of its sequences, for schedules that cut them; plans have whole ones, part 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    part: int = 0

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}" + (f".{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Return the operation that prints as `text`; InvalidInputError when none does."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)(?:\.([1-9]\d*))?", text)
        if match is None:
            raise InvalidInputError(
                f"{text!r} is no operation: write chunk, F or B, micro-batch, like 0F3; a later part like 0F3.1"
            )
        return cls("F" if match[2] == "F" else "B", int(match[3]), int(match[1]), int(match[4] or 0))


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
            "the interleaved schedule needs one, add empty micro-batches",
            num_microbatches=num_microbatches,
            pp_size=pp_size,
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
