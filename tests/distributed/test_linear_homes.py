"""Linear attention of placed buckets: states follow homes, wherever these lie; it equals that of each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dynamic_cp.plans.lane_plan import PlanFacts, decode_lane, encode_lanes
from dynamic_cp.plans.stretches import Stretches
from dynamic_cp.pricing.linear_prices import sent_states
from dynamic_cp.types import Bucket, MicroBatch, Plan, PlannedBatch, Sample, Topology
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.data.micro_batches import packed_buckets
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from tests.distributed.emulated_lanes import Board, EmulatedGroup, run_lanes
from tests.distributed.test_linear_attention import LAYERS, Whole, error
from tests.placements import random_placement, random_tree

BESIDE = 1
"""Lanes of the process group before those of the bucket, and behind them: no part of it."""


def random_bucket(random: np.random.Generator, num_lanes: int, inner: int, most_tokens: int = 60) -> Bucket:
    lengths = random.integers(1, most_tokens, random.integers(1, 5)).tolist()
    samples = tuple(
        Sample(sample_id=7 + i, seqlen=n, mask=random_tree(random, n) if random.random() < 0.4 else None)
        for i, n in enumerate(lengths)
    )
    return Bucket(
        first_lane=0,
        cp_size=num_lanes * inner,
        samples=samples,
        cp_comm_type="blocks",
        inner_cp_size=inner,
        placement=random_placement(random, samples, num_lanes, 2),
        state_exchange="states",
    )


def placed_lanes(bucket: Bucket, tp_size: int = 1) -> list[PlacedLane]:
    """Return what each lane gets of the plan, by way of its message."""
    topology = Topology(num_lanes=bucket.cp_size, tp_size=tp_size, sequence_parallel=tp_size > 1)
    plan = Plan(topology=topology, max_tokens_per_rank=1000, micro_batches=(MicroBatch(buckets=(bucket,)),))
    planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * bucket.cp_size, reason="test")
    lanes = []
    for message in encode_lanes(plan, PlanFacts.of(planned)):
        (packed,) = packed_buckets(decode_lane(message))
        assert packed.placed is not None
        lanes.append(packed.placed)
    return lanes


def tokens_of(lane: PlacedLane, bucket: Bucket) -> Tensor:
    """Return which of the tokens of a bucket each row of a lane is, -1 for padding."""
    names = [sample.sample_id for sample in bucket.samples]
    firsts = np.cumsum([0, *(sample.seqlen for sample in bucket.samples)])
    held = [firsts[names.index(s.sample_id)] + shard for s, shard in zip(lane.samples, lane.shards(), strict=False)]
    padding = lane.num_tokens - sum(map(len, held))
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *held, np.full(padding, -1)]))


def computed(whole: Whole, bucket: Bucket, tp_size: int = 1, **how: Any) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return what the lanes of a bucket compute, as `Whole.expected`, and the bytes that each sends."""
    lanes, board = placed_lanes(bucket, tp_size), Board(bucket.cp_size + 2 * BESIDE)
    tokens = [tokens_of(lane, bucket) for lane in lanes]

    def work(lane: int) -> Any:
        group: Any = EmulatedGroup(BESIDE + lane, board)
        params = DynamicPackedSeqParams.build(
            (lanes[lane].num_tokens,),
            torch.zeros(lanes[lane].num_tokens, dtype=torch.int64),
            group,
            label="emulated",
            stats=ExchangeStats(),
            placed=replace(lanes[lane], first_in_group=BESIDE),
            state_exchange="states",
        )
        return whole.lane(params, tokens=tokens[lane], **how)

    found = run_lanes(bucket.cp_size, work, [board])
    assert not board.letters, "a message was sent that nobody takes"
    return whole.joined([tensors for tensors, _ in found], tokens), [sent for _, sent in found]


def whole_of(kind: str, bucket: Bucket) -> Whole:
    samples = bucket.samples
    return Whole(LAYERS[kind], [sample.seqlen for sample in samples], [sample.mask for sample in samples])


@pytest.mark.by_day("3-1-gated_delta_net", "3-2-mamba2_of_one_group")
@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2_of_one_group"])
@pytest.mark.parametrize(("num_lanes", "inner"), [(2, 1), (3, 1), (5, 1), (3, 2)])
def test_homes_anywhere_equal_samples_token_after_token(kind: str, num_lanes: int, inner: int) -> None:
    random = np.random.default_rng([num_lanes, inner])
    for turn in range(3):
        bucket = random_bucket(random, num_lanes, inner)
        whole = whole_of(kind, bucket)
        found, _ = computed(whole, bucket, tp_size=1 + turn % 2)
        assert error(found, whole.expected) < 1e-10, str(bucket)
        found, sent = computed(whole, bucket, dtype=torch.float32)
        assert error(found, whole.expected) < 1e-3
        planned = sent_states(Stretches.of_placement(bucket), whole.sizes, 4)
        of_lanes = planned.of_lanes(np.zeros(bucket.cp_size, np.int64)).sum(axis=1)
        assert np.allclose(sent, of_lanes.T, rtol=1e-12, atol=0), "a lane sends something else than is planned"


@pytest.mark.nightly
def test_random_homes_equal_samples_token_after_token() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        bucket = random_bucket(random, int(random.integers(1, 6)) + 1, int(random.choice([1, 1, 2])), 100)
        whole = whole_of(str(random.choice([*LAYERS])), bucket)
        found, _ = computed(
            whole,
            bucket,
            tp_size=int(random.choice([1, 2])),
            repeated=str(random.choice(["", "", "reentrant", "by hooks"])),
        )
        assert error(found, whole.expected) < 1e-10, str(bucket)


def homes(*of_lanes: Sequence[tuple[int, int, int]]) -> Bucket:
    """Return a bucket with these homes on its lanes; their tiles are of no interest."""
    table = sorted((*home, lane) for lane, held in enumerate(of_lanes) for home in held)
    lengths = {sample: stop for sample, _, stop, _ in table}
    samples = tuple(Sample(sample_id=i, seqlen=n) for i, n in lengths.items())
    placement = random_placement(np.random.default_rng(1), samples, len(of_lanes), 1)
    homes = np.array(table, np.int32)
    return Bucket(
        first_lane=0,
        cp_size=len(of_lanes),
        samples=samples,
        cp_comm_type="blocks",
        placement=replace(placement, homes=homes, tiles=placement.tiles[:0]),
        state_exchange="states",
    )


def test_runs_are_homes_that_adjoin() -> None:
    """Lane 0 has the begin of sample 0, in two homes, and all of sample 1; lane 1 has the end of sample 0."""
    runs = Stretches.of_placement(homes([(0, 0, 4), (0, 4, 6), (1, 0, 3)], [(0, 6, 9)]), rank_token_multiple=4)
    assert [column.tolist() for column in runs] == [
        [0, 1, 0, 0, 1],
        [0, 0, 6, 9, 3],
        [6, 3, 3, 3, 1],
        [-1, 0, -1, -1, -1],
    ]
    assert runs.is_linked.tolist() == [True, True, False, False, False]
    assert runs.num_linked.tolist() == [1, 1]
    assert runs.depth.tolist() == [0, 1, 0, 0, 0]
    assert Stretches.read(runs.as_json()).as_json() == runs.as_json()
    known = runs.known_to(1)
    assert [column.tolist() for column in known] == [[0, 1, 1], [0, 0, 3], [6, 3, 1], [-1, 0, -1]]


def test_samples_on_one_lane_send_nothing() -> None:
    bucket = homes([(0, 0, 40)], [(1, 0, 9)])
    found, sent = computed(whole_of("gated_delta_net", bucket), bucket)
    assert error(found, whole_of("gated_delta_net", bucket).expected) < 1e-10
    assert sent == [(0, 0), (0, 0)]
