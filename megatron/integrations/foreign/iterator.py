"""Dynamic context parallelism for a training loop that owns its data iterator, as Megatron-LM's does.

    draw (lookahead batches ahead) -> lengths -> plan -> re-route -> packs -> one iterator per model chunk

TP rank 0 of the stages that read tokens or labels draws; the other ranks learn everything from the plan. Bad data on
one rank, the end of the data and a failed plan reach all ranks at the same step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan
from megatron.dynamic_cp.agreement.verify import agree, collective_device, run_on_all_ranks
from megatron.dynamic_cp.attention.te.support import why_no_masks
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.data.micro_batches import (
    COLUMNS,
    ChunkNeeds,
    PackedStep,
    groups_of,
    micro_batches,
    pack_step,
)
from megatron.dynamic_cp.data.token_audit import combine
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.plans.plan_source import PlanSource, check_whole
from megatron.integrations.foreign import rerouting
from megatron.integrations.foreign.draw import BatchDrawer, DataIterators, DrawnBatch
from megatron.integrations.foreign.rerouting import Incoming, ReroutingStats, in_phase

Verify = Literal["off", "digest", "full"]


class ForeignIteratorWrapper:
    """Makes packed micro-batches with their own CP groups out of what a data iterator yields; `next()` is `wrap()`.

    Args:
        data_iterator: of samples or packs (megatron/integrations/foreign/samples.py), or a list with one for each model
            chunk. TP rank 0 of stages that read anything uses that of the first chunk that reads; elsewhere it may be
            None. The iterators of a lane must yield the same samples on every stage that reads.
        plan_source: makes the plans, `plan_source.lookahead` global batches ahead.
        chunks: what each model chunk of this rank reads.
        global_batch_size: items of all lanes; a pack is one item. The first `global_batch_size % num_lanes` lanes draw
            one more than the others.
        drop_last: end at the first global batch that is not full. False: lanes that still have data go on.
        verify: "digest" compares the plan's digest over all ranks in each step; "full" also checks the whole plan and
            compares checksums of all tokens before and after re-routing; "off" does neither.
        first_step: number of the first global batch.
        consumed_samples: items consumed before; the iterators continue there.
        why_no_masks: as `draw.BatchDrawer`.

    Attributes:
        step, consumed_samples: number of the next global batch, and items of those handed out (those drawn ahead do not
            count). A checkpoint must save both.
        plan, rank_tokens: this lane's part of the latest plan, and this rank's padded tokens in each of its
            micro-batches.
        stats, exchange_stats: what the latest `wrap` took, and bytes that this rank's attention sent since then.
    """

    def __init__(
        self,
        data_iterator: DataIterators,
        *,
        plan_source: PlanSource,
        groups: DynamicCPGroups,
        chunks: Sequence[ChunkNeeds],
        global_batch_size: int,
        drop_last: bool = True,
        verify: Verify = "digest",
        first_step: int = 0,
        consumed_samples: int = 0,
        device: torch.device | None = None,
        why_no_masks: str | None = None,
    ) -> None:
        self.step = first_step
        self.consumed_samples = consumed_samples
        self.plan: LanePlan | None = None
        self.rank_tokens: tuple[int, ...] = ()
        self.stats = ReroutingStats()
        self.exchange_stats = ExchangeStats()
        self._plan_source = plan_source
        self._groups = groups
        self._chunks = tuple(chunks)
        self._verify = verify
        self._device = device or collective_device()
        self._drawer = BatchDrawer(
            data_iterator,
            chunks=self._chunks,
            lane=groups.lane,
            num_lanes=groups.num_lanes,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            device=self._device,
            why_no_masks=why_no_masks,
        )
        self._needs = ChunkNeeds(
            tokens=any(chunk.tokens for chunk in self._chunks), labels=any(chunk.labels for chunk in self._chunks)
        )
        self._lanes_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._is_at_its_end = False
        self._in_flight: deque[DrawnBatch] = deque()

    def __iter__(self) -> ForeignIteratorWrapper:
        return self

    def __next__(self) -> StepData:
        return self.wrap()

    def wrap(self) -> StepData:
        """Return the iterators and counts of the next global batch. Collective over the job. Raises StopIteration: the
        data ended; on all ranks at the same step. Raises DynamicCPError: bad data, no plan or ranks that disagree, on
        all ranks alike; or a rank died or hung."""
        self.stats = ReroutingStats()
        self.exchange_stats = ExchangeStats()
        started_s = time.perf_counter()
        while not self._is_at_its_end and len(self._in_flight) <= self._plan_source.lookahead:
            self._draw_ahead()
        drawn_s = time.perf_counter()
        self.stats.draw_s = drawn_s - started_s
        if not self._in_flight:
            raise StopIteration
        batch = self._in_flight.popleft()
        plan = self._take_plan(batch)
        planned_s = time.perf_counter()
        self.stats.plan_wait_s = planned_s - drawn_s
        packed = self._reroute(batch, plan)
        built = list(micro_batches(packed, self._groups, self._device, f"step {batch.step}", self.exchange_stats))
        self.stats.reroute_s = time.perf_counter() - planned_s
        self.plan = plan
        self.rank_tokens = tuple(bucket.rank_tokens for bucket in packed.buckets)
        self.step += 1
        self.consumed_samples += batch.num_items
        return StepData.of(plan, built, self._chunks)

    def close(self) -> None:
        """Stop fetching plans, and close the plan source."""
        self._plan_source.close()

    def _draw_ahead(self) -> None:
        """Draw one more global batch and ask for its plan, or note that the data ended."""
        batch = self._drawer.draw(self.step + len(self._in_flight))
        if batch is None:
            self._is_at_its_end = True
            return
        self._plan_source.request(batch.step, batch.lengths)
        self._in_flight.append(batch)

    def _take_plan(self, batch: DrawnBatch) -> LanePlan:
        """Return this lane's part of the plan; an error on one rank is raised on all."""

        def take() -> LanePlan:
            plan = self._plan_source.take(batch.step)
            placed = {bucket.cp_comm_type for bucket in plan.buckets if bucket.is_placed}
            if plan.extension:
                raise UnsupportedFeatureError(
                    f"the plan of step {batch.step} has {plan.facts.num_servers} servers of all stages, 0 are possible "
                    "with a loop's own iterator: plan without a pool (PlanOptions.pool)"
                )
            if placed:
                raise UnsupportedFeatureError(
                    f"the plan of step {batch.step} uses {placed.pop()}, which says of each token where it goes; what "
                    "a loop's own iterator yields is sent to CP groups: leave it out of cp_comm_types (--cp-comm-type)"
                )
            if self._verify == "full":
                check_whole(batch.step, self._plan_source.whole(batch.step), plan, batch.lengths)
            return plan

        with in_phase(f"planning step {batch.step}"):
            return agree(
                take,
                None if self._verify == "off" else lambda plan: plan.facts.digest,
                what=f"the plan of step {batch.step}",
                device=self._device,
            )

    def _reroute(self, batch: DrawnBatch, plan: LanePlan) -> PackedStep:
        sent = batch.sent.for_stage(self._needs)
        directory = None
        if self._drawer.draws:
            directory = rerouting.exchange_directory(
                plan, batch.step, batch.max_samples, self._lanes_group, self._device
            )

        def prepare() -> tuple[PackedStep, Incoming, rerouting.Outgoing | None]:
            for bucket in plan.buckets:
                groups_of(bucket, self._groups)  # raises here, where all ranks hear of it
            arriving = rerouting.incoming(plan, batch.step, self._groups.num_lanes)
            leaving = None
            if directory is not None:
                places = rerouting.read_directory(directory, batch.samples, batch.step)
                leaving = rerouting.outgoing(batch.samples, places, sent.names, self._groups.num_lanes)
            return pack_step(plan, None), arriving, leaving

        with in_phase(f"re-routing of step {batch.step} (agreement of all ranks)"):
            packed, arriving, leaving = run_on_all_ranks(prepare, self._device)
        if sent.names:
            words = None
            if leaving is not None:
                words = rerouting.exchange(
                    leaving, arriving, step=batch.step, group=self._lanes_group, device=self._device, stats=self.stats
                )
            words = rerouting.broadcast(
                words,
                (len(arriving.targets), len(sent.names)),
                step=batch.step,
                group=self._tp_group,
                device=self._device,
                stats=self.stats,
            )
            packed = rerouting.fill(packed, words, arriving, sent)
        if self._verify == "full":
            self._check_tokens(batch, packed, arriving)
        return packed

    def _check_tokens(self, batch: DrawnBatch, packed: PackedStep, arriving: Incoming) -> None:
        """Raise unless every drawn token is on its lane once, on every TP rank of every stage that reads it."""
        names = batch.sent.for_stage(self._needs).names
        tp_size = self._tp_group.size()
        totals = torch.zeros((2, 1 + len(COLUMNS)), dtype=torch.int64)
        if self._drawer.draws:
            num_tokens, *sums = rerouting.count_drawn(batch.samples, batch.sample_ids, names)
            totals[0] = torch.tensor([num_tokens * tp_size, *(combine(total * tp_size) for total in sums)])
        if names:
            totals[1] = torch.tensor(rerouting.count_packed(packed, arriving, names, self._groups.lane))
        totals = totals.to(self._device)
        with in_phase(f"verifying the tokens of step {batch.step}"):
            dist.all_reduce(totals)
        before, after = totals.tolist()
        if before[0] != after[0]:
            raise DisagreementError(
                f"re-routing of step {batch.step} took in {before[0]} tokens and gave out {after[0]}, over all ranks: "
                "this is a bug in it, or ranks run different versions"
            )
        for name, drawn, arrived in zip(COLUMNS, before[1:], after[1:], strict=True):
            if combine(drawn) != combine(arrived):
                raise DisagreementError(
                    f"re-routing of step {batch.step} changed {name}: checksum {combine(drawn):013x} before, "
                    f"{combine(arrived):013x} after: check the memory and network of the hosts"
                )


def chunks_of(model: Sequence[torch.nn.Module]) -> tuple[ChunkNeeds, ...]:
    """Return the columns that each model chunk reads, bare or wrapped (DDP, Float16Module). Raises
    UnsupportedFeatureError: a model with multi-token prediction."""
    bare = [unwrap_model(chunk) for chunk in model]
    if any(chunk.config.mtp_num_layers for chunk in bare):
        raise UnsupportedFeatureError(
            "--mtp-num-layers with the samples of another loop's iterator: columns of later tokens are made where "
            "samples are read; use DataIteratorWrapper, or leave multi-token prediction out"
        )
    return tuple(ChunkNeeds.of(chunk) for chunk in bare)


def wrap_data_iterator(
    data_iterator: DataIterators,
    model: Sequence[torch.nn.Module],
    *,
    plan_source: PlanSource,
    groups: DynamicCPGroups,
    global_batch_size: int,
    drop_last: bool = True,
    verify: Verify = "digest",
    first_step: int = 0,
    consumed_samples: int = 0,
) -> ForeignIteratorWrapper:
    """Return an iterator of one `StepData` per global batch, for the model chunks of this rank.

        for data_iterators, num_microbatches, seqlen_sum, seqlen_squared_sum in wrap_data_iterator(...):

    Args: as `ForeignIteratorWrapper`; what the chunks read is asked of the model.
    """
    return ForeignIteratorWrapper(
        data_iterator,
        plan_source=plan_source,
        groups=groups,
        chunks=chunks_of(model),
        global_batch_size=global_batch_size,
        drop_last=drop_last,
        verify=verify,
        first_step=first_step,
        consumed_samples=consumed_samples,
        why_no_masks=why_no_masks(model),
    )
