"""Sends samples from the lanes that drew them to those that compute them: each lane gets only its own zigzag shards.

    directory   reduce-scatter, 16 bytes a sample: the first lane of a bucket tells the owners where their samples go
    exchange    one all-to-all of 4-byte words over the data-parallel group: token ids, labels, position ids as int32,
                the loss mask as the bits of its float32; only columns that the stage reads and the plan does not imply
    broadcast   the same words to the other TP ranks of a stage that reads them

Both sides of the exchange know its sizes from the plan. Padding is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dynamic_cp.errors import DisagreementError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.types import Bucket
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.agreement.verify import lost_rank
from megatron.dynamic_cp.data.micro_batches import COLUMNS, ChunkNeeds, PackedStep, shards_of
from megatron.dynamic_cp.data.token_audit import token_checksum
from megatron.dynamic_cp.packed_seq_params import shard_positions
from megatron.integrations.foreign.samples import ForeignSample

MAX_SAMPLES_PER_DRAW = 1_000_000
"""Most samples of one lane in one global batch: the last six digits of a sample id count them."""


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """Name the phase in the DynamicCPError of a collective that fails because a rank died or hung."""
    with phase.during(name):
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises; the errors of this package are ValueErrors
            raise lost_rank(error) from error


@dataclass(slots=True)
class ReroutingStats:
    """Re-routing since the latest `wrap` began: bytes sent to other lanes, and by TP rank 0 to other TP ranks; seconds
    of drawing with its agreement, of waiting for the plan, and of the rest."""

    bytes_sent: int = 0
    bytes_broadcast: int = 0
    draw_s: float = 0.0
    plan_wait_s: float = 0.0
    reroute_s: float = 0.0


class SentColumns(NamedTuple):
    """The columns that the lanes agreed to send, in the order of COLUMNS. If labels came from the iterator
    (`own_labels`), the last token of a sample has a loss, too."""

    names: tuple[str, ...]
    own_labels: bool

    def for_stage(self, needs: ChunkNeeds) -> SentColumns:
        """Return the columns that a stage with these needs reads."""
        needed = {"tokens": needs.tokens, "position_ids": needs.tokens}
        return self._replace(names=tuple(name for name in self.names if needed.get(name, needs.labels)))


def columns_to_send(num_positions: int, num_masks: int, num_labels: int, num_made_labels: int) -> SentColumns:
    """Return the columns that do not follow from the lengths and must be sent, from numbers of samples in the global
    batch: with position ids, a loss mask or labels, and without labels."""
    sends_mask = num_masks > 0 or (num_labels > 0 and num_made_labels > 0)
    sends = {"position_ids": num_positions > 0, "loss_mask": sends_mask}
    return SentColumns(tuple(name for name in COLUMNS if sends.get(name, True)), num_made_labels == 0)


def make_sample_id(step: int, lane: int, order: int, num_lanes: int) -> int:
    """Return an id, unique in the run, of the sample that `lane` drew as number `order` for global batch `step`."""
    return (step * num_lanes + lane) * MAX_SAMPLES_PER_DRAW + order


def sample_origin(sample_id: int, num_lanes: int) -> tuple[int, int, int]:
    """Return (step, lane, order) of a sample id."""
    draw, order = divmod(sample_id, MAX_SAMPLES_PER_DRAW)
    return (*divmod(draw, num_lanes), order)


class Destination(NamedTuple):
    """Where a sample goes, and its padded length there (tokens over the whole group)."""

    first_lane: int
    cp_size: int
    padded_seqlen: int


def exchange_directory(
    plan: LanePlan, step: int, max_samples: int, group: dist.ProcessGroup, device: torch.device
) -> NDArray[np.int64]:
    """Return the claims of buckets on this lane's samples, int64 [max_samples, 2], for `read_directory`. Collective."""
    num_lanes = group.size()
    claims = np.zeros((num_lanes, max_samples, 2), dtype=np.int64)
    for bucket in plan.buckets:
        if bucket.first_lane != plan.lane:
            continue
        place = 1 << 40 | bucket.first_lane << 5 | bucket.cp_size.bit_length() - 1
        for sample, padded in zip(bucket.samples, _padded(bucket, plan), strict=False):
            origin, lane, order = sample_origin(sample.sample_id, num_lanes)
            if origin == step and order < max_samples:
                claims[lane, order] += (place, sample.seqlen << 31 | padded)
    sent = torch.from_numpy(claims.reshape(num_lanes * max_samples, 2)).to(device)
    received = sent.new_empty((max_samples, 2))
    with in_phase(f"re-routing of step {step} (directory, reduce-scatter over {num_lanes} lanes)"):
        dist.reduce_scatter_tensor(received, sent, group=group)
    return received.cpu().numpy()


def read_directory(claims: NDArray[np.int64], samples: Sequence[ForeignSample], step: int) -> list[Destination]:
    """Return each drawn sample's destination; DisagreementError unless it is in one bucket, with its own length."""
    places = []
    for order, sample in enumerate(samples):
        place, seqlens = claims[order].tolist()
        count, where = place >> 40, place & (1 << 40) - 1
        planned_seqlen, padded = seqlens >> 31, seqlens & (1 << 31) - 1
        if count != 1 or planned_seqlen != sample.seqlen:
            raise DisagreementError(
                f"sample number {order} that was drawn for step {step} is in {count} buckets of the plan with "
                f"{planned_seqlen} tokens, it must be in 1 with {sample.seqlen}: all ranks of a lane must draw the "
                "same samples",
                seqlen=sample.seqlen,
            )
        places.append(Destination(where >> 5, 1 << (where & 31), padded))
    if claims[len(samples) :].any():
        raise DisagreementError(
            f"the plan of step {step} has more samples of a lane than the {len(samples)} that this rank drew: all "
            "ranks of a lane must draw the same samples"
        )
    return places


class Outgoing(NamedTuple):
    """The rows that leave a lane: int32 words [n, columns], by receiving lane and sample; how many go to each lane."""

    words: NDArray[np.int32]
    rows: list[int]


def outgoing(
    samples: Sequence[ForeignSample], places: Sequence[Destination], names: Sequence[str], num_lanes: int
) -> Outgoing:
    """Return the shards of the drawn samples for each lane."""
    parts: list[list[NDArray[np.int32]]] = [[] for _ in range(num_lanes)]
    for sample, place in zip(samples, places, strict=True):
        words = np.stack([sample.column(name) for name in names], axis=1)
        for cp_rank in range(place.cp_size):
            positions = shard_positions(place.padded_seqlen, place.cp_size, cp_rank)
            parts[place.first_lane + cp_rank].append(words[positions[positions < sample.seqlen]])
    rows = [sum(map(len, part)) for part in parts]
    empty = np.zeros((0, len(names)), np.int32)
    return Outgoing(np.concatenate([empty, *(part for to_lane in parts for part in to_lane)]), rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Incoming:
    """The n rows that arrive at a lane, known from the plan.

    Attributes:
        rows: how many come from each lane.
        targets: local token of the packed step that each row is, int64 [n].
        sample_ids, positions, is_last: sample and place of each row, int64 [n]; whether it is the last there, bool [n].
    """

    rows: tuple[int, ...]
    targets: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    is_last: NDArray[np.bool_]


def incoming(plan: LanePlan, step: int, num_lanes: int) -> Incoming:
    """Return the rows that arrive at the plan's lane, in the order of `outgoing`; refuse a sample of another step."""
    rows = [0] * num_lanes
    arriving = []
    start = 0
    for bucket in plan.buckets:
        seqlens = _padded(bucket, plan)
        for sample, padded in zip(bucket.samples, seqlens, strict=False):
            origin, lane, _ = sample_origin(sample.sample_id, num_lanes)
            if origin != step:
                raise DisagreementError(
                    f"the plan of step {step} has sample {sample.sample_id}, which was drawn for step {origin}: ask "
                    "for plans in the order of the steps",
                    sample_id=sample.sample_id,
                )
            shard = shard_positions(padded, bucket.cp_size, plan.lane - bucket.first_lane)
            real = np.flatnonzero(shard < sample.seqlen)
            rows[lane] += len(real)
            arriving.append((sample.sample_id, sample.seqlen, start + real, shard[real]))
            start += len(shard)
        if not bucket.samples:
            start += seqlens[0] // bucket.cp_size
    arriving.sort(key=lambda part: part[0])  # ids ascend with the lane, then with the order of drawing
    none = np.zeros(0, np.int64)
    return Incoming(
        rows=tuple(rows),
        targets=np.concatenate([none, *(targets for _, _, targets, _ in arriving)]),
        sample_ids=np.concatenate([none, *(np.full(len(targets), id_) for id_, _, targets, _ in arriving)]),
        positions=np.concatenate([none, *(positions for *_, positions in arriving)]),
        is_last=np.concatenate([none, *(positions == seqlen - 1 for _, seqlen, _, positions in arriving)]).astype(bool),
    )


def exchange(
    leaving: Outgoing,
    arriving: Incoming,
    *,
    step: int,
    group: dist.ProcessGroup,
    device: torch.device,
    stats: ReroutingStats,
) -> Tensor:
    """Return the rows that arrived, int32 [n, columns] on `device`. Collective over lanes: one all-to-all."""
    sent = torch.from_numpy(leaving.words).to(device)
    received = sent.new_empty((len(arriving.targets), sent.shape[1]))
    with in_phase(f"re-routing of step {step} (exchange, all-to-all over {group.size()} lanes)"):
        dist.all_to_all_single(received, sent, list(arriving.rows), leaving.rows, group=group)
    stats.bytes_sent += (len(sent) - leaving.rows[group.rank()]) * sent.shape[1] * sent.itemsize
    return received


def broadcast(
    words: Tensor | None,
    shape: tuple[int, int],
    *,
    step: int,
    group: dist.ProcessGroup,
    device: torch.device,
    stats: ReroutingStats,
) -> Tensor:
    """Return TP rank 0's `words` on all TP ranks. Collective over the TP group: one broadcast."""
    if group.size() == 1:
        assert words is not None
        return words
    if words is None:
        words = torch.empty(shape, dtype=torch.int32, device=device)
    else:
        stats.bytes_broadcast += words.nbytes * (group.size() - 1)
    if words.numel():
        with in_phase(f"re-routing of step {step} (broadcast to {group.size()} TP ranks)"):
            dist.broadcast(words, dist.get_global_rank(group, 0), group=group)
    return words


def fill(packed: PackedStep, words: Tensor, arriving: Incoming, sent: SentColumns) -> PackedStep:
    """Return `packed` with the columns that arrived and those that follow from the plan; padding is 0."""
    device = words.device
    targets = torch.from_numpy(arriving.targets).to(device)
    num_tokens = len(packed.positions)
    columns = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
    loss_mask = torch.zeros(num_tokens, dtype=torch.float32, device=device)
    for name, column in zip(sent.names, words.unbind(1), strict=True):
        if name == "loss_mask":
            loss_mask.index_copy_(0, targets, column.contiguous().view(torch.float32))
        else:
            columns[COLUMNS.index(name)].index_copy_(0, targets, column.long())
    if "position_ids" not in sent.names:
        columns[COLUMNS.index("position_ids")].index_copy_(0, targets, packed.positions.to(device)[targets])
    if "loss_mask" not in sent.names:
        has_loss = np.ones_like(arriving.is_last) if sent.own_labels else ~arriving.is_last
        loss_mask.index_copy_(0, targets, torch.from_numpy(has_loss).to(device, torch.float32))
    return replace(packed, columns=columns, loss_mask=loss_mask)


def count_drawn(samples: Sequence[ForeignSample], ids: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return the number of drawn tokens and a checksum of each of COLUMNS (0 for those not in `names`)."""
    totals = [0] * (1 + len(COLUMNS))
    for sample, sample_id in zip(samples, ids, strict=True):
        totals[0] += sample.seqlen
        for name in names:
            index = COLUMNS.index(name)
            values = sample.column(name)
            totals[1 + index] += token_checksum(sample_id, np.arange(sample.seqlen), values, column=index)
    return totals


def count_packed(packed: PackedStep, arriving: Incoming, names: Sequence[str], lane: int) -> list[int]:
    """Return the same counts for the tokens of a packed step that this rank computes on."""
    assert packed.columns is not None
    assert packed.loss_mask is not None
    positions = np.concatenate([shard for bucket in packed.buckets for shard in shards_of(bucket, lane)])
    positions = positions[arriving.targets]
    totals = [len(positions)] + [0] * len(COLUMNS)
    for name in names:
        index = COLUMNS.index(name)
        column = packed.loss_mask if name == "loss_mask" else packed.columns[index]
        values = column.cpu().numpy()[arriving.targets]
        totals[1 + index] = token_checksum(arriving.sample_ids, positions, values, column=index)
    return totals


def _padded(bucket: Bucket, plan: LanePlan) -> tuple[int, ...]:
    seqlens = (sample.seqlen for sample in bucket.samples)
    return padded_seqlens(seqlens, bucket.cp_size, plan.facts.rank_token_multiple)
