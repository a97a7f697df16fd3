"""Where each local token of a micro-batch is in the order of the caller's samples.

    samples of 3 and 2 tokens, in the caller's order:   0 1 2 | 3 4        a place for each token, 5 is padding
    lane 1 of 2, where both are in one bucket:          1 2 | 5 5          zigzag: its shard of each sample

The same numbers take a sample's columns to its lanes and bring results back, whatever lane, shard and micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dynamic_cp.errors import DisagreementError, InvalidInputError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import Sample
from megatron.dynamic_cp.data.micro_batches import PackedBucket, packed_buckets, shards_of
from megatron.dynamic_cp.layout.token_owners import lengths_of_parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The samples of a global batch in the caller's order.

    Attributes:
        samples: each id once.
    """

    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if len(self.row_of_id) != len(self.samples):
            raise InvalidInputError(
                f"{len(self.samples)} samples have {len(self.row_of_id)} ids: give each sample an id of its own"
            )

    @cached_property
    def row_of_id(self) -> dict[int, int]:
        """Which sample has an id, counted from 0."""
        return {sample.sample_id: row for row, sample in enumerate(self.samples)}

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The place of each sample's first token, and behind all of them, [samples + 1]."""
        return _starts([sample.seqlen for sample in self.samples])

    @cached_property
    def first_responses(self) -> NDArray[np.int64]:
        """The number of each sample's first response, and behind all of them, [samples + 1]."""
        return _starts([max(1, len(lengths_of_parts(sample)) - 1) for sample in self.samples])

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; the place of padding."""
        return int(self.starts[-1])

    @property
    def num_responses(self) -> int:
        """Responses of all samples; the number of what belongs to none."""
        return int(self.first_responses[-1])

    def of_lane(self, plan: LanePlan) -> list[MicroBatchRows]:
        """Return where the tokens of each micro-batch of a lane are.

        Raises:
            DisagreementError: the plan holds another sample.
        """
        packed = packed_buckets(plan)
        return [
            self._of_bucket(bucket.samples, of_lane, plan.lane)
            for bucket, of_lane in zip(plan.buckets, packed, strict=True)
        ]

    def _of_bucket(self, samples: Sequence[Sample], bucket: PackedBucket, lane: int) -> MicroBatchRows:
        places = np.full(bucket.rank_tokens, self.num_tokens)
        responses = np.full(bucket.rank_tokens, self.num_responses)
        present: list[NDArray[np.int64]] = []
        start = 0
        for sample, shard in zip(samples, shards_of(bucket, lane), strict=False):
            row = self.row_of_id.get(sample.sample_id)
            if row is None or self.samples[row] != sample:
                raise DisagreementError(
                    f"the plan has sample {sample.sample_id} of {sample.seqlen} tokens, the {len(self.samples)} "
                    "samples of the pass do not: give those that were planned, with their masks",
                    sample_id=sample.sample_id,
                )
            here = slice(start, start + len(shard))
            start = here.stop
            is_token = shard < sample.seqlen
            places[here] = np.where(is_token, self.starts[row] + shard, self.num_tokens)
            of_row = np.arange(*self.first_responses[row : row + 2])
            present.append(of_row)
            lengths = lengths_of_parts(sample)
            of_parts = of_row if len(lengths) == 1 else np.append(self.num_responses, of_row)  # a prompt is nobody's
            of_parts = np.append(of_parts, self.num_responses)  # and so is padding
            responses[here] = of_parts[np.searchsorted(np.cumsum(lengths), shard, side="right")]
        return MicroBatchRows(
            places=torch.from_numpy(places),
            responses=torch.from_numpy(responses),
            present=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *present])),
        )


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchRows:
    """Where the T local tokens of a micro-batch are in the caller's order.

    Attributes:
        places: int64 [T], `Rows.num_tokens` for padding.
        responses: int64 [T], `Rows.num_responses` for padding, and for a prompt that several responses share.
        present: the responses of all samples that this lane works with, tokens of its own or not, int64 [present].
    """

    places: torch.Tensor
    responses: torch.Tensor
    present: torch.Tensor

    def to(self, device: torch.device) -> MicroBatchRows:
        """Return them on `device`."""
        places, responses, present = (
            tensor.to(device, non_blocking=True) for tensor in (self.places, self.responses, self.present)
        )
        return MicroBatchRows(places=places, responses=responses, present=present)
