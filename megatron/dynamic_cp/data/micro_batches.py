"""From the buckets of a lane to the tensors of its micro-batches.

    buckets -> pack_step (numpy, any process: reads, pads, shards) -> PackedStep -> micro_batches (this rank's device)

A packed step is a few flat tensors and a short list, so it moves between processes and to a GPU in few copies.
"""

from __future__ import annotations

import importlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamic_cp.errors import DataError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.plans.padding import padded_of, placed_share
from dynamic_cp.types import CAUSAL, STATE_EXCHANGES, Bucket, Causal, CpCommType, Full, Sample, StateExchange, is_placed
from megatron.dynamic_cp.data.sample_tokens import HasTokens, SampleTokens
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import (
    NUM_COLUMNS,
    DynamicPackedSeqParams,
    ExchangeStats,
    FutureColumns,
    Levels,
    boundaries,
    packed_shard_positions,
    take_shard,
)

if TYPE_CHECKING:
    from megatron.dynamic_cp.attention.placed_packs import PlacedLane

COLUMNS = ("tokens", "labels", "position_ids", "loss_mask")
"""What a micro-batch holds of every token; the first three are the rows of `PackedStep.columns`."""

_EMPTY_PLACE = SampleTokens.repeating(np.zeros(0, np.int64))

ReadSample = Callable[[int], HasTokens]

RunStep = Callable[..., list[dict[str, Any]]]
"""Runs all micro-batches of a step in place of megatron-core's schedules; called as `step.schedule` does."""


class PoolSteps(NamedTuple):
    """What the pool adds to the steps of plans that have one (`dynamic_cp.plans.extension`).

    Attributes:
        pack: (lane plan, stage, vp_size, padded rank tokens of each micro-batch) -> what this rank does beside its
            micro-batches; sent by processes that pack ahead.
        group: returns the group whose members exchange the attention of all micro-batches.
        ready: (packed, groups, counter of the step) -> what runs the step.
    """

    pack: Callable[[LanePlan, int, int, list[int]], object]
    group: Callable[[DynamicCPGroups], ProcessGroup]
    ready: Callable[[Any, DynamicCPGroups, ExchangeStats], RunStep]


def pool_steps(extension: object) -> PoolSteps | None:
    """Return what the pool, a leaf loaded only here, adds to a step whose plan has `extension`; None: no pool."""
    if not extension:
        return None
    steps: PoolSteps = importlib.import_module("megatron.dynamic_cp.pool.ticks").STEPS
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkNeeds:
    """Which tensors a model chunk reads: the first of the pipeline tokens, the last labels and loss mask. `num_depths`
    counts modules of multi-token prediction, which read tokens, too."""

    tokens: bool
    labels: bool
    num_depths: int = 0

    @classmethod
    def of(cls, chunk: torch.nn.Module) -> ChunkNeeds:
        """Return the needs of a bare GPTModel."""
        num_depths = (chunk.config.mtp_num_layers or 0) if getattr(chunk, "mtp_process", False) else 0
        return cls(tokens=chunk.pre_process or num_depths > 0, labels=chunk.post_process, num_depths=num_depths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBucket:
    """A bucket without its tokens: padded lengths of its sequences over the whole group, one for an empty place.
    `seqlens` and `masked_samples` are as in `DynamicPackedSeqParams`. With `placed`, this lane's part of placed
    attention, the padded lengths are the lane's."""

    first_lane: int
    cp_size: int
    cp_comm_type: CpCommType
    inner_cp_size: int
    padded_seqlens: tuple[int, ...]
    seqlens: tuple[int, ...] | None = None
    masked_samples: tuple[Sample, ...] | None = None
    placed: PlacedLane | None = None
    state_exchange: StateExchange = STATE_EXCHANGES[0]

    @property
    def is_empty_place(self) -> bool:
        """Whether it has no token of a sample."""
        return self.seqlens is None and self.placed is None

    @property
    def rank_tokens(self) -> int:
        """Padded tokens on this lane."""
        if self.placed is not None:
            return self.placed.num_tokens
        return sum(self.padded_seqlens) // self.cp_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedStep:
    """What one lane computes in a step, its micro-batches one after the other (T local tokens in all).

    Attributes:
        buckets: one per micro-batch.
        positions: int64 [T], as in `DynamicPackedSeqParams`.
        cu_seqlens: int32, the boundaries of the padded sequences, bucket after bucket.
        columns: int64 [3, T]: tokens, labels and position ids, all 0 for padding; None where no chunk reads any.
        loss_mask: float32 [T], 0 for padding; None where `columns` is.
        future_columns, future_loss_mask: as in `FutureColumns`; None where no chunk reads any.
        extension: what this rank does beside its micro-batches (`PoolSteps.pack`); None: nothing.
    """

    buckets: tuple[PackedBucket, ...]
    positions: Tensor
    cu_seqlens: Tensor
    columns: Tensor | None
    loss_mask: Tensor | None
    future_columns: Tensor | None = None
    future_loss_mask: Tensor | None = None
    extension: object = None

    def pin_memory(self) -> PackedStep:
        """Return the step in page-locked memory, for copies to a GPU without waiting; DataLoader calls this."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> PackedStep:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, move: Callable[[Tensor], Tensor]) -> PackedStep:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: move(value) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def future(self, part: slice) -> FutureColumns | None:
        """Return the columns of some local tokens for multi-token prediction; None without such modules."""
        if self.future_columns is None or self.future_loss_mask is None:
            return None
        return FutureColumns(columns=self.future_columns[..., part], loss_mask=self.future_loss_mask[..., part])


def pack_step(
    plan: LanePlan, read_sample: ReadSample | None, num_depths: int = 0, stage: int = 0, vp_size: int = 1
) -> PackedStep:
    """Return the padded shard of every micro-batch of a lane.

    Args:
        read_sample: sample_id -> its tokens, once per sample of each bucket; None: no chunk reads tokens or labels.
        num_depths: modules of multi-token prediction on this rank.
        stage, vp_size: of the pipeline; only a pool uses them.

    Raises DataError: a sample that is not as long as the plan says, or what `read_sample` raises. Raises
    UnsupportedFeatureError: a sample with a mask of its own, and multi-token prediction."""
    packed, positions, read = packed_buckets(plan), [], []
    for bucket, of_lane in zip(plan.buckets, packed, strict=True):
        if num_depths:
            _check_has_future(bucket)
        shards = shards_of(of_lane, plan.lane)
        # A last shard without a sample is only padding.
        places = [_positions(sample, shard) for sample, shard in zip(bucket.samples, shards, strict=False)]
        places += shards[len(places) :]
        positions += places
        if read_sample is not None:
            read.append(read_shard(bucket, shards, places, read_sample, num_depths))
    joined = {name: np.concatenate([part[name] for part in read]) for name in (read[0] if read else ())}
    pool = pool_steps(plan.extension)
    return PackedStep(
        buckets=tuple(packed),
        positions=torch.from_numpy(np.concatenate(positions)),
        cu_seqlens=torch.from_numpy(np.concatenate([boundaries(bucket.padded_seqlens) for bucket in packed])),
        columns=torch.from_numpy(np.stack([joined[name] for name in COLUMNS[:NUM_COLUMNS]])) if joined else None,
        loss_mask=torch.from_numpy(joined["loss_mask"]) if joined else None,
        **(_future_of(joined, num_depths) if joined and num_depths else {}),
        extension=pool and pool.pack(plan, stage, vp_size, [bucket.rank_tokens for bucket in packed]),
    )


def _future_of(joined: Mapping[str, NDArray[Any]], num_depths: int) -> dict[str, Tensor]:
    depths = range(1, num_depths + 1)
    columns = np.stack([joined[f"{name} {depth}"] for depth in depths for name in COLUMNS[:NUM_COLUMNS]])
    masks = np.stack([joined[f"loss_mask {depth}"] for depth in depths])
    return {
        "future_columns": torch.from_numpy(columns).unflatten(0, (num_depths, NUM_COLUMNS)),
        "future_loss_mask": torch.from_numpy(masks),
    }


def _check_has_future(bucket: Bucket) -> None:
    for sample in bucket.samples:
        if sample.mask is not None:
            raise UnsupportedFeatureError(
                f"--mtp-num-layers: sample {sample.sample_id} has a mask of its own ({str(sample.mask)[:60]}), under "
                "which another token than the next may follow: leave multi-token prediction out, or give plain samples",
                sample_id=sample.sample_id,
            )


def packed_buckets(plan: LanePlan) -> list[PackedBucket]:
    return [_packed(bucket, plan, plan.parts.get(index)) for index, bucket in enumerate(plan.buckets)]


def _packed(bucket: Bucket, plan: LanePlan, part: Any) -> PackedBucket:
    shape = PackedBucket(
        first_lane=bucket.first_lane,
        cp_size=bucket.cp_size,
        cp_comm_type=bucket.cp_comm_type,
        inner_cp_size=bucket.inner_cp_size,
        padded_seqlens=(),
        state_exchange=bucket.state_exchange,
    )
    multiple = plan.facts.rank_token_multiple
    if part is not None:
        from dynamic_cp.placement.programme import Programme
        from dynamic_cp.plans.stretches import Stretches
        from megatron.dynamic_cp.attention.placed_packs import PlacedLane

        part, runs = part if bucket.exchanges_states else (part, None)
        programme = Programme.read(part)
        num_tokens = placed_share(programme.num_tokens, bucket.inner_cp_size, multiple)
        placed = PlacedLane(
            programme=programme,
            samples=bucket.samples,
            num_tokens=num_tokens,
            inner_cp_size=bucket.inner_cp_size,
            inner_rank=(plan.lane - bucket.first_lane) % bucket.inner_cp_size,
            state_runs=None if runs is None else Stretches.read(runs),
        )
        return replace(shape, padded_seqlens=(num_tokens,), placed=placed)
    return replace(
        shape,
        padded_seqlens=padded_of(bucket, multiple),
        seqlens=tuple(sample.seqlen for sample in bucket.samples) or None,
        masked_samples=bucket.samples if any(sample.mask is not None for sample in bucket.samples) else None,
    )


def shards_of(bucket: PackedBucket, lane: int) -> list[NDArray[np.int64]]:
    """Return, for each sequence of the pack, which of its tokens, from 0, each local token is. These are
    `PackedStep.positions` if all samples are causal; with other masks several tokens may share a position."""
    if bucket.placed is not None:
        return bucket.placed.shards()
    shard = packed_shard_positions(bucket.padded_seqlens, bucket.cp_size, lane - bucket.first_lane)
    return np.split(shard, np.cumsum(bucket.padded_seqlens)[:-1] // bucket.cp_size)


def read_shard(
    bucket: Bucket,
    shards: Sequence[NDArray[np.int64]],
    places: Sequence[NDArray[np.int64]],
    read_sample: ReadSample,
    num_depths: int = 0,
) -> dict[str, NDArray[Any]]:
    """Return COLUMNS of the local tokens, 0 in all of them for padding. `shards` are the tokens that this rank holds of
    each sequence, `places` their positions (`_positions`). "tokens 1", "labels 1" and so on are of the token 1 to
    `num_depths` places later in the sample, 0 after its end."""
    columns = defaultdict[str, list[NDArray[Any]]](list)
    held = zip(bucket.samples, shards, strict=False)
    read = [_read(sample, read_sample) if len(shard) else _EMPTY_PLACE for sample, shard in held]
    read += [_EMPTY_PLACE] * (len(shards) - len(read))
    for values, shard, positions in zip(read, shards, places, strict=True):
        for depth in range(num_depths + 1):
            behind = f" {depth}" if depth else ""
            for name in ("tokens", "labels", "loss_mask"):
                columns[name + behind].append(take_shard(getattr(values, name), shard + depth))
            columns["position_ids" + behind].append(np.where(shard + depth < len(values.tokens), positions + depth, 0))
    return {name: np.concatenate(column) for name, column in columns.items()}


def _positions(sample: Sample, shard: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of a shard's tokens, from those in the sequence; padding keeps its own."""
    by_mask = None if sample.mask is None else sample.mask.positions(sample.seqlen)
    if by_mask is None:
        return shard
    return np.where(shard < sample.seqlen, take_shard(by_mask, shard), shard)


def _read(sample: Sample, read_sample: ReadSample) -> HasTokens:
    values = read_sample(sample.sample_id)
    lengths = [len(values.tokens), len(values.labels), len(values.loss_mask)]
    if lengths != [sample.seqlen] * 3:
        raise DataError(
            f"sample {sample.sample_id} has {lengths[0]} tokens, {lengths[1]} labels and a loss mask of {lengths[2]}, "
            f"its index says {sample.seqlen}: the data changed after it was indexed; restart to index it again",
            sample_id=sample.sample_id,
        )
    return values


def micro_batches(
    packed: PackedStep,
    groups: DynamicCPGroups,
    device: torch.device,
    label: str,
    stats: ExchangeStats,
    mask: Causal | Full = CAUSAL,
) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of a lane: [1, T] views of the step's tensors, and the packed-sequence parameters.
    `label` names the place in the run for errors, `stats` counts the bytes of their attention. Raises
    InvalidInputError: a CP group was not built."""
    # Find all groups before the first micro-batch is computed; with a pool, the pool's group serves all.
    pool = pool_steps(packed.extension)
    common = None if pool is None else pool.group(groups)
    held = [groups_of(bucket, groups) if common is None else (common, (None, common)) for bucket in packed.buckets]
    on_device = packed.to(device)
    start = first_boundary = 0
    for index, (bucket, (group, levels)) in enumerate(zip(packed.buckets, held, strict=True)):
        part = slice(start, start + bucket.rank_tokens)
        placed = bucket.placed
        if placed is not None and common is None:
            placed = replace(
                placed, first_in_group=bucket.first_lane - groups.around(bucket.first_lane, bucket.cp_size)[0]
            )
        start = part.stop
        num_boundaries = len(bucket.padded_seqlens) + 1
        cu_seqlens = on_device.cu_seqlens[first_boundary : first_boundary + num_boundaries]
        first_boundary += num_boundaries
        batch: dict[str, Any] = {
            "packed_seq_params": DynamicPackedSeqParams.build(
                bucket.padded_seqlens,
                on_device.positions[part],
                group,
                cu_seqlens=cu_seqlens,
                cp_comm_type=bucket.cp_comm_type,
                levels=levels,
                seqlens=bucket.seqlens,
                mask=mask,
                masked_samples=bucket.masked_samples,
                placed=placed,
                state_exchange=bucket.state_exchange,
                is_empty_place=bucket.is_empty_place,
                label=f"{label}, micro-batch {index}, lanes {bucket.first_lane}.."
                f"{bucket.first_lane + bucket.cp_size - 1}",
                stats=stats,
                future=on_device.future(part),
            )
        }
        if on_device.columns is not None:
            tokens, labels, position_ids = on_device.columns[:, None, part]
            batch |= {
                "tokens": tokens,
                "labels": labels,
                "position_ids": position_ids,
                "loss_mask": on_device.loss_mask[None, part],
            }
        yield batch


def groups_of(bucket: PackedBucket | Bucket, groups: DynamicCPGroups) -> tuple[ProcessGroup, Levels]:
    """Return a bucket's CP group and those of its exchange's levels. Raises InvalidInputError: one was not built."""
    place = bucket.first_lane, bucket.cp_size
    if is_placed(bucket.cp_comm_type):
        group = groups.around(*place)[1]
        return group, groups.placed_levels(group, bucket.inner_cp_size)
    return groups.group(*place), groups.levels(*place, bucket.inner_cp_size)


def for_chunk(batches: Sequence[dict[str, Any]], needs: ChunkNeeds) -> Iterator[dict[str, Any]]:
    """Return an iterator over what a chunk reads of each micro-batch, None for the rest; see `handed_out`."""
    return handed_out(
        {
            "tokens": batch.get("tokens") if needs.tokens else None,
            "position_ids": batch.get("position_ids") if needs.tokens else None,
            "labels": batch.get("labels") if needs.labels else None,
            "loss_mask": batch.get("loss_mask") if needs.labels else None,
            "packed_seq_params": batch["packed_seq_params"],
        }
        for batch in batches
    )


def handed_out(batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield micro-batches without holding them, so what layers cache on one ends with its backward pass."""
    waiting = deque(batches)
    del batches
    while waiting:
        yield waiting.popleft()
