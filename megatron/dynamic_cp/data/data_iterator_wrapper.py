"""From the lengths of a global batch to what megatron-core's schedules iterate over.

    lengths -> plan (rank 0, published) -> this lane's samples -> packs -> zigzag shards -> one iterator per model chunk

Plans and packs are made ahead of their step. Errors that only one rank can find are exchanged before the first
collective of the step: all ranks continue, or all raise the same error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from dynamic_cp.errors import DisagreementError, IllegalPlanError
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import Sample
from megatron.dynamic_cp.agreement.verify import agree, collective_device
from megatron.dynamic_cp.data.micro_batches import (
    ChunkNeeds,
    PackedStep,
    ReadSample,
    RunStep,
    for_chunk,
    micro_batches,
    pool_steps,
)
from megatron.dynamic_cp.data.prefetch import Packer
from megatron.dynamic_cp.data.token_audit import check_tokens
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.measuring import span
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.plans.plan_source import FixedPlan, PlanSource, check_whole


class _Counted(NamedTuple):
    data_iterators: list[Iterator[dict[str, Any]]]
    num_microbatches: int
    seqlen_sum: int
    seqlen_squared_sum: int


class StepData(_Counted):
    """The four values of Megatron's own wrapper, which loops unpack. `run` runs a step whose plan has a pool; None: one
    of megatron-core's schedules does."""

    run: RunStep | None = None

    @classmethod
    def of(
        cls, plan: LanePlan, batches: Sequence[dict[str, Any]], chunks: Sequence[ChunkNeeds], run: RunStep | None = None
    ) -> StepData:
        """Return the iterators of this rank's chunks over the micro-batches of a plan, and its counts."""
        facts = plan.facts
        data = cls(
            [for_chunk(batches, needs) for needs in chunks],
            facts.num_microbatches,
            facts.seqlen_sum,
            facts.seqlen_squared_sum,
        )
        data.run = run
        return data


class Step(NamedTuple):
    """A step that is ready to run."""

    number: int
    samples: Sequence[Sample]
    data: StepData


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Seconds of the latest `wrap` spent waiting: for the plan, and for packs (packing them, without workers)."""

    plan_s: float
    pack_s: float


class DataIteratorWrapper:
    """Plans global batches and builds this rank's micro-batches.

    Args:
        plan_source: makes the plan, the same on all ranks; a series of its own.
        read_sample: sample_id -> its tokens; called once for each sample of this lane.
        device: where the tensors go; None: where the job's collectives run.
        num_workers: processes that read and pack ahead; 0 packs inside `wrap`.
        verify: "digest" compares the plan's digest over all ranks in each step; "full" also checks the whole plan on
            every rank and reads every sample again to follow its tokens; "off" does neither.
        may_place: whether plans may have placed attention; not with routers that count the tokens of samples.

    Attributes:
        plan, rank_tokens: the latest plan, as this lane sees it, and this rank's padded tokens in each micro-batch of
            it.
        waits, exchange_stats: of the latest `wrap`, and what this rank's attention has sent since.
    """

    def __init__(
        self,
        *,
        plan_source: PlanSource | FixedPlan,
        read_sample: ReadSample,
        groups: DynamicCPGroups,
        chunks: Sequence[ChunkNeeds],
        device: torch.device | None = None,
        num_workers: int = 0,
        verify: str = "digest",
        may_place: bool = True,
    ) -> None:
        self._may_place = may_place
        self._source = plan_source
        self._groups = groups
        self._chunks = tuple(chunks)
        self._device = device or collective_device()
        self._verify = verify
        self._read_sample = read_sample
        reads = any(needs.tokens or needs.labels for needs in self._chunks)
        self._packer = Packer(
            read_sample if reads else None,
            num_depths=max((needs.num_depths for needs in self._chunks), default=0),
            stage=groups.stage,
            vp_size=len(self._chunks),
            num_workers=num_workers,
            pin_memory=self._device.type == "cuda",
        )
        self._source.on_arrival(lambda _, plan: self._packer.submit(plan))
        self._requested: set[int] = set()
        self.plan: LanePlan | None = None
        self.rank_tokens: tuple[int, ...] = ()
        self.waits = Waits(plan_s=0.0, pack_s=0.0)
        self.exchange_stats = ExchangeStats()

    def look_ahead(self, step: int, samples: Sequence[Sample]) -> None:
        """Start making plan and packs of a coming global batch, on all ranks in the order of steps; returns at once."""
        self._source.request(step, samples)
        self._requested.add(step)

    def wrap(self, step: int, samples: Sequence[Sample]) -> StepData:
        """Return the iterators and counts of global batch `step`. Collective over the job. `samples`: the global batch,
        the same on all ranks and in `look_ahead`, if that was called. Raises DynamicCPError: no plan, an illegal
        one, ranks that disagree, or a sample that could not be read; the same on all ranks."""
        if step not in self._requested:
            self.look_ahead(step, samples)
        self._requested.discard(step)
        self.exchange_stats = ExchangeStats()

        def prepare() -> tuple[LanePlan, PackedStep, list[dict[str, Any]]]:
            started_s = time.perf_counter()
            with span("waiting for the plan"):
                plan = self._source.take(step)
            taken_s = time.perf_counter()
            with span("waiting for packed samples"):
                packed = self._packer.take()
            self.waits = Waits(plan_s=taken_s - started_s, pack_s=time.perf_counter() - taken_s)
            self._check(step, plan, samples)
            self.rank_tokens = tuple(bucket.rank_tokens for bucket in packed.buckets)
            return (
                plan,
                packed,
                list(micro_batches(packed, self._groups, self._device, f"step {step}", self.exchange_stats)),
            )

        self.plan, packed, batches = agree(
            prepare,
            None if self._verify == "off" else lambda prepared: prepared[0].facts.digest,
            what=f"the plan of step {step}",
            device=self._device,
        )
        if self._verify == "full":
            check_tokens(self.plan, packed, self._read_sample, f"step {step}", self._device)
        pool = pool_steps(packed.extension)
        run = None if pool is None else pool.ready(packed.extension, self._groups, self.exchange_stats)
        return StepData.of(self.plan, batches, self._chunks, run)

    def steps(self, batches: Iterable[tuple[int, Sequence[Sample]]]) -> Iterator[Step]:
        """Yield every batch (step, samples) with the result of its `wrap`, looking ahead."""
        coming = iter(batches)
        ahead: deque[tuple[int, Sequence[Sample]]] = deque()
        while True:
            for step, samples in islice(coming, self._source.lookahead + 1 - len(ahead)):
                self.look_ahead(step, samples)
                ahead.append((step, samples))
            if not ahead:
                return
            step, samples = ahead.popleft()
            yield Step(step, samples, self.wrap(step, samples))

    def close(self) -> None:
        """Stop fetching plans and packing, and close the plan source."""
        self._source.close()
        self._packer.close()

    def _check(self, step: int, plan: LanePlan, samples: Sequence[Sample]) -> None:
        """Compare this lane's part with the batch that this rank knows; with "full" also check the whole plan."""
        if self._verify == "full":
            check_whole(step, self._source.whole(step), plan, samples)
        for index, bucket in enumerate(plan.buckets if not self._may_place else ()):
            if bucket.is_placed:
                raise IllegalPlanError(
                    f"the plan of step {step} has {bucket.cp_comm_type} on {bucket.cp_size} lanes in micro-batch "
                    f"{index}: no lane of it counts the tokens of a sample, as routers to experts do; plan without it"
                )
        batch = GlobalBatch.of(samples)
        total = (len(batch), int(batch.seqlens.sum()))
        if (plan.facts.num_samples, plan.facts.seqlen_sum) != total:
            raise DisagreementError(
                f"the plan of step {step} holds {plan.facts.num_samples} samples of {plan.facts.seqlen_sum} tokens, "
                f"this rank's global batch {total[0]} of {total[1]}: all ranks must read the same data"
            )
        mine = GlobalBatch.of([sample for bucket in plan.buckets for sample in bucket.samples])
        known = batch.seqlens_of(mine.sample_ids)
        for place in np.flatnonzero(known != mine.seqlens)[:1].tolist():
            sample = mine[place]
            raise IllegalPlanError(
                f"the plan of step {step} has sample {sample.sample_id} with {sample.seqlen} tokens, this rank's "
                f"global batch says {known[place]}: all ranks must read the same data",
                sample_id=sample.sample_id,
            )
        masks = {} if batch.masks is None else dict(zip(batch.sample_ids.tolist(), batch.masks, strict=True))
        for sample in mine if masks or mine.masks else ():
            if sample.mask != masks.get(sample.sample_id):
                raise IllegalPlanError(
                    f"the plan of step {step} has sample {sample.sample_id} with the mask {str(sample.mask)[:60]}, "
                    f"this rank's global batch says {str(masks.get(sample.sample_id))[:60]}: all ranks must read the "
                    "same data",
                    sample_id=sample.sample_id,
                )
