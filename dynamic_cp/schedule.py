"""The operations of a pipeline stage in the order in which Megatron-Core runs them.

Plain data: an `Operation` prints as `chunk F|B micro_batch` ("0F3", "1B0") and parses back. The list depends on stage,
pp_size, num_microbatches and vp_size only, so it is the same for all lanes of a stage.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

from dynamic_cp.errors import InvalidInputError


class Operation(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch on one model chunk of a stage."""

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Return the operation that prints as `text`; InvalidInputError when none does."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise InvalidInputError(f"{text!r} is no operation: write chunk, F or B, micro-batch, like 0F3")
        return cls("F" if match[2] == "F" else "B", int(match[3]), int(match[1]))


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
