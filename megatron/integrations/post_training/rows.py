"""Where each local token of a micro-batch is in the order of the caller's samples.

    samples of 3 and 2 tokens, in the caller's order:   0 1 2 | 3 4        a place for each token, 5 is padding
    lane 1 of 2, where both are in one bucket:          1 2 | 5 5          zigzag: its shard of each sample

The same numbers take a sample's columns to its lanes and bring results back, whatever lane, shard and micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dynamic_cp.errors import DisagreementError, InvalidInputError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import Sample
from megatron.dynamic_cp.agreement.verify import agree
from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.data.micro_batches import PackedBucket, packed_buckets, shards_of
from megatron.dynamic_cp.layout.token_owners import parts_of


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
        return _starts([len(parts_of(sample).sequences) for sample in self.samples])

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; the place of padding."""
        return int(self.starts[-1])

    @property
    def num_responses(self) -> int:
        """Responses of all samples."""
        return int(self.first_responses[-1])

    def digest(self) -> str:
        """Return a digest of the samples in their order (hex)."""
        return hashlib.sha256(repr(self.samples).encode()).hexdigest()

    def of_lane(self, plan: LanePlan, device: torch.device) -> list[MicroBatchRows]:
        """Return where the tokens of each micro-batch of a lane are, on `device`.

        Raises:
            DisagreementError: the plan holds another sample.
        """
        packed = packed_buckets(plan)
        return [
            self._of_bucket(bucket.samples, of_lane, plan.lane, device)
            for bucket, of_lane in zip(plan.buckets, packed, strict=True)
        ]

    def _of_bucket(
        self, samples: Sequence[Sample], bucket: PackedBucket, lane: int, device: torch.device
    ) -> MicroBatchRows:
        places = np.full(bucket.rank_tokens, self.num_tokens)
        none = np.zeros(0, np.int64)
        tokens, responses, present = [none], [none], [none]
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
            places[here] = np.where(shard < sample.seqlen, self.starts[row] + shard, self.num_tokens)
            present.append(np.arange(*self.first_responses[row : row + 2]))
            lengths, sequences = parts_of(sample)
            has_part = np.zeros((len(sequences), len(lengths) + 1), np.bool_)  # padding is nobody's part
            for number, parts in enumerate(sequences):
                has_part[number, parts] = True
            of_token = np.searchsorted(np.cumsum(lengths), shard, side="right")
            of_response, token = np.nonzero(has_part[:, of_token])
            tokens.append(here.start + token)
            responses.append(self.first_responses[row] + of_response)
        every = np.concatenate(tokens)
        copies = np.bincount(every, minlength=1)
        return MicroBatchRows(
            places=to_device(places, device),
            tokens=to_device(every, device),
            responses=to_device(np.concatenate(responses), device),
            weights=to_device((1 / copies[every]).astype(np.float32), device),
            present=to_device(np.concatenate(present), device),
        )


def agreed_rows(
    samples: Sequence[Sample], plan: LanePlan, device: torch.device, check: Callable[[], None] = lambda: None
) -> tuple[Rows, list[MicroBatchRows]]:
    """Return the rows of samples, equal on all ranks, and those of this lane's micro-batches. Collective over the job.

    Args:
        device: of the job's collectives, and of what is returned.
        check: what else a rank looks at first.

    Raises:
        DynamicCPError: ranks have other samples, or one of them found something bad; on all ranks.
    """

    def prepare() -> tuple[Rows, list[MicroBatchRows]]:
        check()
        rows = Rows(samples=tuple(samples))
        return rows, rows.of_lane(plan, device)

    return agree(prepare, lambda prepared: prepared[0].digest(), what="the samples of a pass", device=device)


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchRows:
    """Where the T local tokens of a micro-batch are in the caller's order.

    A token that several responses share is an *entry* of each of them; padding is none.

    Attributes:
        places: int64 [T], `Rows.num_tokens` for padding.
        tokens, responses: which local token each entry is, and whose, int64 [entries].
        weights: 1 over the entries of the same token, float32 [entries].
        present: the responses of all samples that this lane works with, tokens of its own or not, int64 [present].
    """

    places: torch.Tensor
    tokens: torch.Tensor
    responses: torch.Tensor
    weights: torch.Tensor
    present: torch.Tensor

    def masked(self, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return the loss mask of each entry, whose sum over the entries of a token is its own, [entries]."""
        return loss_mask.reshape(-1)[self.tokens] * self.weights

    def sums(self, values: torch.Tensor, num_responses: int) -> torch.Tensor:
        """Return the sums of values [n, entries] over the local ones of each response, [n, num_responses]."""
        return values.new_zeros(len(values), num_responses).index_add(1, self.responses, values)
