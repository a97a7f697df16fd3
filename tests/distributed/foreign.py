"""Made-up data of a loop that owns its iterator, a plan source for it, and a rank that checks what comes out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from dynamic_cp.plans import serialize
from dynamic_cp.plans.lane_plan import LanePlan, PlanFacts, decode_lane, encode_lanes
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.types import FULL, Mask, Plan, PlannedBatch, Sample, SharedQuestion, parse_mask
from megatron.dynamic_cp.agreement.verify import job_store
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import shard_positions, take_shard
from megatron.integrations.foreign.iterator import ForeignIteratorWrapper
from megatron.integrations.foreign.rerouting import sample_origin
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.parity import Layout, mixed_plan

Piece = dict[str, Any]
"""One sample as the iterator gives it, its arrays and maybe a mask; packs are several of them."""

Item = list[Piece]
LaneData = list[Item]

LAYOUTS = {
    "dp4": Layout(4), "dp3": Layout(3), "pp2": Layout(2, pp=2), "pp2_vpp2": Layout(2, pp=2, vpp=2),
    "tp2": Layout(2, tp=2),
}  # fmt: skip


def piece_of(lane: int, number: int, seqlen: int, flavour: int) -> Piece:
    """Return a sample whose tokens tell whose they are; flavours differ in what the iterator gives with the tokens."""
    positions = np.arange(seqlen)
    piece: Piece = {"tokens": (lane * 4096 + number) * 512 + positions + 1}
    if flavour in (1, 2, 5):
        piece["labels"] = piece["tokens"] + 100_000_000
    if flavour in (1, 3):
        piece["loss_mask"] = (positions % 5 != 3).astype(np.float32)
    if flavour == 3:
        piece["position_ids"] = positions[::-1].copy()
    if flavour == 5:
        prompt, answer = (seqlen + 2) // 3, seqlen // 3
        mask = SharedQuestion(prompt, (answer, seqlen - prompt - answer)) if answer else FULL
        piece["mask"] = mask if number % 2 else str(mask)
    return piece


def mask_of(piece: Piece) -> Mask | None:
    mask = piece.get("mask")
    return parse_mask(mask) if isinstance(mask, str) else mask


def columns_of(piece: Piece) -> dict[str, np.ndarray]:
    """Return what the model must see of a sample."""
    tokens = piece["tokens"]
    mask = piece.get("loss_mask", np.ones(len(tokens), np.float32)).copy()
    labels = piece.get("labels")
    if labels is None:
        labels = np.concatenate([tokens[1:], [0]])
        mask[-1] = 0
    own_mask = mask_of(piece)
    by_mask = None if own_mask is None else own_mask.positions(len(tokens))
    position_ids = piece.get("position_ids", np.arange(len(tokens)) if by_mask is None else by_mask)
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": position_ids}


def lane_data(lane: int, num_items: int, *, packed: bool = False, flavours: Sequence[int] = (0,)) -> LaneData:
    """Return random items; of a run of 16 numbers all have the same flavour, or two flavours in turn."""
    random = np.random.default_rng(lane)
    data, number = [], 0
    for index in range(num_items):
        item = []
        for _ in range(int(random.integers(1, 5)) if packed else 1):
            flavour = flavours[index // 16 % len(flavours)]
            if flavour == 4:  # some with labels, some without
                flavour = number % 3
            if packed:  # the pieces of a pack have the same keys
                flavour = flavours[index % len(flavours)]
            item.append(piece_of(lane, number, int(np.clip(random.lognormal(3, 1.2), 1, 511)), flavour))
            number += 1
        data.append(item)
    return data


def item_dict(item: Item, as_torch: bool) -> dict[str, Any]:
    """Return an item as an iterator yields it: of several pieces with cu_seqlens."""
    names = [name for name in item[0] if name != "mask"]
    columns: dict[str, Any] = {name: np.concatenate([piece[name] for piece in item]) for name in names}
    if len(item) > 1:
        columns["cu_seqlens"] = np.cumsum([0, *(len(piece["tokens"]) for piece in item)]).astype(np.int32)
    given = {name: torch.from_numpy(column) if as_torch else column for name, column in columns.items()}
    masks = [piece.get("mask") for piece in item]
    return given | ({"mask": masks if len(masks) > 1 else masks[0]} if any(masks) else {})


class RandomPlans:
    """Plan source of a test: random legal plans by way of the job's store."""

    def __init__(self, layout: Layout, lane: int, lookahead: int, name: str) -> None:
        self._name = name
        self.topology = layout.topology
        self.lookahead = lookahead
        self.requested: list[int] = []
        self.latest: LanePlan | None = None
        self._layout, self._lane = layout, lane

    def request(self, step: int, samples: Sequence[Sample]) -> None:
        self.requested.append(step)
        if torch.distributed.get_rank() == 0:
            plan = mixed_plan(tuple(samples), self._layout, seed=step)
            busy = (1.0,) * self.topology.num_lanes
            facts = PlanFacts.of(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=busy, reason="test"))
            job_store().set(f"{self._name}/{step}/whole", serialize.dumps(plan))
            for lane, message in enumerate(encode_lanes(plan, facts)):
                job_store().set(f"{self._name}/{step}/{lane}", message)
        else:
            assert not samples, "only rank 0 needs the lengths"

    def take(self, step: int) -> LanePlan:
        self.latest = decode_lane(job_store().get(f"{self._name}/{step}/{self._lane}"))
        return self.latest

    def whole(self, step: int) -> Plan:
        return serialize.loads(job_store().get(f"{self._name}/{step}/whole").decode())

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class StepRecord:
    """What a rank got in one step. packs: (cp size, padded lengths, boundaries, longest) of each micro-batch; tokens:
    the real tokens whose column a chunk was handed; held: tensors that any chunk was handed; rows: counted from the
    plan; bytes: as the wrapper counts them."""

    counts: tuple[int, int, int]
    packs: list[Any]
    tokens: dict[str, list[int]]
    held: set[str]
    consumed: int
    arrived_rows_from_others: int
    sent_bytes: int
    broadcast_bytes: int
    real_tokens: int


@dataclass
class RankRecord:
    """What a rank got until the data ended."""

    lane: int
    tp_rank: int
    stage: int
    steps: list[StepRecord] = field(default_factory=list)
    ended_at: int | None = None
    requested: list[int] = field(default_factory=list)


def needs_of_rank(layout: Layout) -> list[ChunkNeeds]:
    return [
        ChunkNeeds(
            tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            labels=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        )
        for stage in (range(layout.vpp) if layout.vpp > 1 else [None])
    ]


def groups_of(layout: Layout) -> DynamicCPGroups:
    initialize_model_parallel(layout.tp, layout.pp, layout.vpp if layout.vpp > 1 else None)
    return DynamicCPGroups.build(layout.topology, timeout_s=30, exchanges=sorted({"p2p", layout.exchange}))


def make_wrapper(
    layout: Layout, data: Sequence[LaneData], global_batch_size: int, *, lookahead: int = 0,
    groups: DynamicCPGroups | None = None, name: str = "test", **settings: Any,
) -> tuple[ForeignIteratorWrapper, RandomPlans, DynamicCPGroups]:  # fmt: skip
    """Return a wrapper on this rank, with an iterator where Megatron-LM has one; wrappers of a job need a `name`
    each."""
    groups = groups or groups_of(layout)
    chunks = needs_of_rank(layout)
    plans = RandomPlans(layout, groups.lane, lookahead, name)
    has_data = parallel_state.get_tensor_model_parallel_rank() == 0 and any(n.tokens or n.labels for n in chunks)

    def items() -> Iterator[Any]:
        for index, item in enumerate(data[groups.lane]):
            yield item_dict(item, as_torch=index % 2 == 0)

    iterators: Any = items() if has_data else None
    if layout.vpp > 1:
        iterators = [items() if has_data and (needs.tokens or needs.labels) else None for needs in chunks]
    wrapper = ForeignIteratorWrapper(
        iterators, plan_source=plans, groups=groups, chunks=chunks, global_batch_size=global_batch_size, **settings
    )
    return wrapper, plans, groups


def run_foreign(
    layout: Layout, data: Sequence[LaneData], global_batch_size: int, settings: dict[str, Any]
) -> RankRecord:
    """Wrap until the data ends, checking each tensor against the data; return what came."""
    wrapper, plans, groups = make_wrapper(layout, data, global_batch_size, **settings)
    record = RankRecord(
        groups.lane, parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    )
    chunks = needs_of_rank(layout)
    shares = [
        global_batch_size // layout.lanes + (lane < global_batch_size % layout.lanes) for lane in range(layout.lanes)
    ]
    for step, batch in enumerate(wrapper):
        pieces = [
            [piece for item in lane[step * share : (step + 1) * share] for piece in item]
            for lane, share in zip(data, shares, strict=True)
        ]
        assert plans.latest is not None
        record.steps.append(check_step(wrapper, batch, plans.latest, pieces, chunks))
    record.ended_at = wrapper.step
    record.requested = plans.requested
    for _ in range(2):
        assert next(wrapper, None) is None, "the end of the data is for good"
    return record


def check_step(
    wrapper: ForeignIteratorWrapper, batch: Any, plan: LanePlan, pieces: list[list[Piece]], chunks: list[ChunkNeeds]
) -> StepRecord:
    """Compare all tensors of a step with what the plan says of the data."""
    num_lanes = len(pieces)
    got = [list(iterator) for iterator in batch.data_iterators]
    assert len(got) == len(chunks)
    assert all(len(micro_batches) == batch.num_microbatches == len(plan.buckets) for micro_batches in got)
    packs, held, from_others, real_tokens = [], set(), 0, 0
    seen: dict[str, list[np.ndarray]] = {"tokens": [], "labels": []}
    for index, bucket in enumerate(plan.buckets):
        params = got[0][index]["packed_seq_params"]
        packs.append(
            (params.local_cp_size, params.padded_seqlens, params.cu_seqlens_q.tolist(), params.max_seqlen_q, bucket)
        )
        seqlens = [sample.seqlen for sample in bucket.samples]
        padded = padded_seqlens(seqlens, bucket.cp_size, plan.facts.rank_token_multiple)
        want: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        for i, length in enumerate(padded):
            shard = shard_positions(length, bucket.cp_size, plan.lane - bucket.first_lane)
            if not bucket.samples:
                columns = {name: np.zeros(0) for name in want}
            else:
                _, lane, order = sample_origin(bucket.samples[i].sample_id, num_lanes)
                piece = pieces[lane][order]
                assert bucket.samples[i].seqlen == len(piece["tokens"])
                assert bucket.samples[i].mask == mask_of(piece)
                columns = columns_of(piece)
                real = shard[shard < len(piece["tokens"])]
                real_tokens += len(real)
                from_others += len(real) * (lane != plan.lane)
                for needs in chunks:
                    for name, needed in (("tokens", needs.tokens), ("labels", needs.labels)):
                        seen[name] += [piece["tokens"][real]] * needed
            for name, column in columns.items():
                want[name].append(take_shard(column, shard))
        for needs, micro_batches in zip(chunks, got, strict=True):
            micro_batch = micro_batches[index]
            needed = {"tokens": needs.tokens, "position_ids": needs.tokens}
            for name, parts in want.items():
                tensor = micro_batch[name]
                assert (tensor is not None) == needed.get(name, needs.labels), name
                if tensor is not None:
                    held.add(name)
                    assert tensor.dtype == (torch.float32 if name == "loss_mask" else torch.int64)
                    np.testing.assert_array_equal(tensor.numpy(), np.concatenate(parts)[None], err_msg=name)
    return StepRecord(
        counts=batch[1:],
        packs=packs,
        tokens={name: np.concatenate(parts).tolist() if parts else [] for name, parts in seen.items() if name in held},
        held=held, consumed=wrapper.consumed_samples, arrived_rows_from_others=from_others,
        sent_bytes=wrapper.stats.bytes_sent, broadcast_bytes=wrapper.stats.bytes_broadcast, real_tokens=real_tokens,
    )  # fmt: skip
