"""Plans in the form of Megatron-LM's packing schedulers: every sample once, no lane idle, aligned groups, counts."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp import ModelShape, PlanOptions, load_hardware, plan_global_batch
from dynamic_cp.errors import IllegalPlanError, InvalidInputError
from dynamic_cp.types import Bucket, MicroBatch, Plan, Sample, Topology
from megatron.integrations.scheduler.groups import Pack, check_groups, groups_of, spread

MODEL = ModelShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=128,
)
LIMIT = 128


@settings(max_examples=60)
@given(data=st.data())
def test_every_plan_becomes_legal_groups(data: st.DataObject) -> None:
    lanes = data.draw(st.sampled_from([1, 2, 4, 8]))
    lengths = data.draw(st.lists(st.integers(1, LIMIT // 2), min_size=1, max_size=40))
    seqlens = {index: units * 2 * lanes for index, units in enumerate(lengths) if units * 2 * lanes <= LIMIT * lanes}
    if not seqlens:
        return
    multiple = data.draw(st.integers(1, min(3, len(seqlens))))
    max_samples = data.draw(st.sampled_from([None, 1, 3]))
    planned = plan_global_batch(
        [Sample(sample_id=index, seqlen=seqlen) for index, seqlen in seqlens.items()],
        topology=Topology(num_lanes=lanes),
        model=MODEL,
        hardware=load_hardware("cpu"),
        options=PlanOptions(max_tokens_per_rank=LIMIT, cp_comm_types=("p2p",)),
    )
    try:
        groups = groups_of(planned.plan, multiple=multiple, max_samples=max_samples)
    except InvalidInputError:
        assert len(seqlens) % multiple  # else one sample in each micro-batch would do
        return
    sizes = check_groups(groups, seqlens, num_lanes=lanes, max_tokens_per_rank=LIMIT, multiple=multiple)
    assert sum(sizes.values()) >= len(groups)
    assert max_samples is None or max(len(ids) for lane in groups for ids in lane) <= max_samples


def plan_of(*micro_batches: tuple[Bucket, ...]) -> Plan:
    return Plan(
        topology=Topology(num_lanes=4),
        micro_batches=tuple(MicroBatch(buckets=buckets) for buckets in micro_batches),
        max_tokens_per_rank=LIMIT,
    )


def bucket(first_lane: int, cp_size: int, *samples: int) -> Bucket:
    return Bucket(first_lane=first_lane, cp_size=cp_size, samples=tuple(Sample(sample_id=s, seqlen=8) for s in samples))


def test_full_micro_batches_keep_their_lanes_and_empty_places_are_shared_out() -> None:
    plan = plan_of(
        (bucket(0, 2, 5, 6), bucket(2, 1, 7), bucket(3, 1, 8)),
        (bucket(0, 1, 9), bucket(1, 1), bucket(2, 1, 10), bucket(3, 1)),
        (bucket(0, 1), bucket(1, 1), bucket(2, 1), bucket(3, 1)),
    )
    assert groups_of(plan) == [[[5, 6], [5, 6], [7], [8]], [[9], [9], [10], [10]]]


def test_counts_follow_interleaving() -> None:
    plan = plan_of((bucket(0, 4, 1, 2, 3),), (bucket(0, 4, 4),))
    groups = groups_of(plan, multiple=3)
    assert [lanes[0] for lanes in groups] == [[1], [2, 3], [4]]
    with pytest.raises(InvalidInputError, match="4 samples cannot fill a multiple of 5 micro-batches"):
        groups_of(plan, multiple=5)


def test_lanes_that_are_no_power_of_two_are_refused() -> None:
    plan = Plan(
        topology=Topology(num_lanes=3),
        micro_batches=(MicroBatch(buckets=tuple(bucket(lane, 1, lane) for lane in range(3))),),
        max_tokens_per_rank=LIMIT,
    )
    with pytest.raises(InvalidInputError, match="3 lanes"):
        groups_of(plan)


@pytest.mark.parametrize("sizes", [(1,), (2, 1), (1, 1, 1), (4, 1, 1), (2, 2, 2), (4, 2, 1), (1,) * 7])
def test_spreading_leaves_no_lane_empty(sizes: tuple[int, ...]) -> None:
    packs = [Pack(cp_size=size, ids=(index,)) for index, size in enumerate(sizes)]
    lanes = spread(packs, 8)
    found = check_groups([lanes], dict.fromkeys(range(len(sizes)), 8), num_lanes=8, max_tokens_per_rank=8)
    assert sum(size * count for size, count in found.items()) == 8
    assert all(lanes.count([index]) >= size for index, size in enumerate(sizes))


LEGAL = [[[0], [0], [1], [2]], [[3, 4]] * 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g[0].__setitem__(2, []), "lane 2 without samples"),
        (lambda g: g[0].__setitem__(3, [1]), "sample 2 is in 0 packs"),
        (lambda g: g[0].__setitem__(3, [2, 1]), "sample 1 is in 2 packs"),
        (lambda g: g[0].__setitem__(2, [0]), "lanes 0 to 2, not an aligned"),
        (lambda g: g[0].__setitem__(slice(0, 4), [[0], [1], [1], [2]]), "lanes 1 to 2, not an aligned"),
        (lambda g: g[0].pop(), "3 lanes, 4 are there"),
        (lambda g: g.append(g[0]), "3 micro-batches are not a multiple of 2"),
        (lambda g: g[1].__setitem__(slice(0, 4), [[3, 4], [3, 4], [5], [5]]), "sample 5 is in 1 packs"),
    ],
)
def test_illegal_groups_are_noticed(change, message: str) -> None:
    groups = copy.deepcopy(LEGAL)
    seqlens = {0: 8, 1: 8, 2: 8, 3: 8, 4: 8}
    assert check_groups(groups, seqlens, num_lanes=4, max_tokens_per_rank=16, multiple=2) == {2: 1, 1: 2, 4: 1}
    change(groups)
    with pytest.raises(IllegalPlanError, match=message):
        check_groups(groups, seqlens, num_lanes=4, max_tokens_per_rank=16, multiple=2)


def test_too_many_tokens_are_noticed() -> None:
    with pytest.raises(IllegalPlanError, match="16 tokens on 1 lanes, 8 fit"):
        check_groups([[[0]]], {0: 16}, num_lanes=1, max_tokens_per_rank=8)
