"""From the lengths of a global batch to what megatron-core's schedules iterate over.

    lengths -> plan (rank 0, published) -> this lane's samples -> packs -> zigzag shards -> one iterator per model chunk

Everything that can fail on one rank alone (reading samples) happens here, before the first collective of the step, and
its outcome is exchanged: all ranks go on, or all raise the same error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.padding import padded_seqlens
from dynamic_cp.serialize import digest
from dynamic_cp.types import Bucket, Plan, PlannedBatch, Sample
from dynamic_cp.validate import check_plan
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.planning import PlanSource
from megatron.dynamic_cp.process_groups import DynamicCPGroups
from megatron.dynamic_cp.sharding import packed_shard_positions, take_shard
from megatron.dynamic_cp.verify import check_same_digest, collective_device, run_on_all_ranks


class SampleTokens(Protocol):
    """What is read of one sample; labels are shifted already: labels[i] follows tokens[i]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


class _Values(NamedTuple):
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]


_EMPTY_PLACE = _Values(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkNeeds:
    """Which tensors a model chunk reads: the first of the pipeline tokens, the last labels and loss mask."""

    tokens: bool
    labels: bool


class StepData(NamedTuple):
    """What a step runs on, in the order of Megatron's own wrapper."""

    data_iterators: list[Iterator[dict[str, Any]]]
    num_microbatches: int
    seqlen_sum: int
    seqlen_squared_sum: int


class DataIteratorWrapper:
    """Plans global batches and builds this rank's micro-batches.

    Args:
        plan_source: makes the plan, the same on all ranks.
        read_sample: sample_id -> its tokens; called for the samples of this lane only, once each.
        groups: prebuilt CP groups.
        chunks: what each model chunk of this rank needs.
        device: where the tensors go.

    Attributes:
        planned: the latest plan with its prediction.
        exchange_stats: bytes that this rank's attention sent since the latest `wrap`.
    """

    def __init__(
        self,
        *,
        plan_source: PlanSource,
        read_sample: Callable[[int], SampleTokens],
        groups: DynamicCPGroups,
        chunks: Sequence[ChunkNeeds],
        device: torch.device | None = None,
    ) -> None:
        self._plan_source = plan_source
        self._read_sample = read_sample
        self._groups = groups
        self._chunks = tuple(chunks)
        self._device = device or collective_device()
        self.planned: PlannedBatch | None = None
        self.exchange_stats = ExchangeStats()

    @property
    def planner_s(self) -> float:
        """Seconds that rank 0 spent on the latest plan."""
        return self._plan_source.planner_s

    def wrap(self, step: int, samples: Sequence[Sample]) -> StepData:
        """Return the iterators and counts of global batch `step`. Collective over the job.

        Args:
            samples: the global batch, the same on all ranks.

        Raises:
            DynamicCPError: no plan, an illegal one, ranks that disagree, or a sample that could not be read; the same
                on all ranks.
        """
        self.planned = self._plan_source.plan(step, samples)
        plan = self.planned.plan
        check_same_digest(digest(plan), f"the plan of step {step}", self._device)
        self.exchange_stats = ExchangeStats()

        def build_all() -> list[dict[str, Any]]:
            check_plan(plan, samples)
            return [self._build(plan, i, f"step {step}, micro-batch {i}") for i in range(plan.num_microbatches)]

        micro_batches = run_on_all_ranks(build_all, self._device)
        seqlens = np.array([sample.seqlen for sample in samples], dtype=np.int64)
        return StepData(
            [_iterate(deque(micro_batches), needs) for needs in self._chunks],
            plan.num_microbatches,
            int(seqlens.sum()),
            int((seqlens * seqlens).sum()),
        )

    def _build(self, plan: Plan, index: int, label: str) -> dict[str, Any]:
        """Return this rank's shard of micro-batch `index`: [1, T] tensors and the packed-sequence parameters."""
        bucket = plan.micro_batches[index].bucket_of_lane(self._groups.lane)
        group = self._groups.group(bucket.first_lane, bucket.cp_size)
        seqlens = padded_seqlens(
            (sample.seqlen for sample in bucket.samples), bucket.cp_size, plan.topology.rank_token_multiple
        )
        positions = packed_shard_positions(seqlens, bucket.cp_size, group.rank())
        params = DynamicPackedSeqParams.build(
            seqlens,
            torch.from_numpy(positions).to(self._device),
            group,
            cp_comm_type=bucket.cp_comm_type,
            label=f"{label}, lanes {bucket.first_lane}..{bucket.first_lane + bucket.cp_size - 1}",
            stats=self.exchange_stats,
        )
        batch: dict[str, Any] = {"packed_seq_params": params}
        if any(needs.tokens or needs.labels for needs in self._chunks):
            ends = np.cumsum(seqlens) // bucket.cp_size
            columns = self._read_shard(bucket, np.split(positions, ends[:-1]))
            batch |= {name: torch.from_numpy(column).to(self._device)[None] for name, column in columns.items()}
        return batch

    def _read_shard(self, bucket: Bucket, shards: list[NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        """Return tokens, labels, loss mask and position ids of the local tokens, 0 in all of them for padding.

        Args:
            shards: for each sequence of the pack the positions that this rank holds.
        """
        columns: dict[str, list[NDArray[Any]]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": []}
        read = [self._read(sample) for sample in bucket.samples] or [_EMPTY_PLACE]
        for values, shard in zip(read, shards, strict=True):
            for name in ("tokens", "labels", "loss_mask"):
                columns[name].append(take_shard(getattr(values, name), shard))
            columns["position_ids"].append(take_shard(np.arange(len(values.tokens)), shard))
        return {name: np.concatenate(column) for name, column in columns.items()}

    def _read(self, sample: Sample) -> SampleTokens:
        values = self._read_sample(sample.sample_id)
        lengths = [len(values.tokens), len(values.labels), len(values.loss_mask)]
        if lengths != [sample.seqlen] * 3:
            raise DataError(
                f"sample {sample.sample_id} has {lengths[0]} tokens, {lengths[1]} labels and a loss mask of "
                f"{lengths[2]}, its index says {sample.seqlen}: the data changed after it was indexed; restart to "
                "index it again",
                sample_id=sample.sample_id,
            )
        return values


def _iterate(micro_batches: deque[dict[str, Any]], needs: ChunkNeeds) -> Iterator[dict[str, Any]]:
    """Yield for each micro-batch what a chunk reads, None for the rest.

    Lets go of a micro-batch once it is handed out: what layers cache on it then ends with its backward pass.
    """
    while micro_batches:
        batch = micro_batches.popleft()
        yield {
            "tokens": batch.get("tokens") if needs.tokens else None,
            "position_ids": batch.get("position_ids") if needs.tokens else None,
            "labels": batch.get("labels") if needs.labels else None,
            "loss_mask": batch.get("loss_mask") if needs.labels else None,
            "packed_seq_params": batch["packed_seq_params"],
        }
