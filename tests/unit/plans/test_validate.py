"""Rules of check_plan, broken once each; samples as arrays; multiples of 16 or 32 tokens, as FP8 needs."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.decide.bounds.lower import lower_bound
from dynamic_cp.errors import IllegalPlanError, InvalidInputError
from dynamic_cp.memory.activations import activation_bytes
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.plans.padding import lane_tokens, padded_of, rank_tokens
from dynamic_cp.plans.serialize import digest, dumps, loads, topology_from_dict, topology_to_dict
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Bucket, MicroBatch, Plan, PlanOptions, Sample, Topology
from tests.unit.support import TINY_MODEL, plan_of_buckets, problem_of, samples_of


def bucket(first_lane: int, cp_size: int, *samples: tuple[int, int]) -> Bucket:
    held = tuple(Sample(sample_id=sample_id, seqlen=seqlen) for sample_id, seqlen in samples)
    return Bucket(first_lane=first_lane, cp_size=cp_size, samples=held)


ROWS = (
    (bucket(0, 2, (0, 100), (1, 20)), bucket(2, 1, (2, 60))),
    (bucket(0, 1, (3, 64)), bucket(1, 1), bucket(2, 1, (4, 1), (5, 2))),
)
LEGAL = plan_of_buckets(*ROWS, topology=Topology(num_lanes=3))
SAMPLES = tuple(LEGAL.samples)


def with_row(index: int, *buckets: Bucket) -> Plan:
    rows = list(LEGAL.micro_batches)
    rows[index] = MicroBatch(buckets=buckets)
    return replace(LEGAL, micro_batches=tuple(rows))


# name, plan, micro-batch and lane of the cell, what the first line says
CELLS = [
    ("gap", with_row(0, bucket(0, 1, (0, 60)), bucket(2, 1, (2, 60))), (0, 2), "starts at lane 2 but lane 1 is next"),
    ("overlap", with_row(0, bucket(0, 2, (0, 9)), bucket(1, 1, (1, 9)), bucket(2, 1)), (0, 1), "lane 2 is next"),
    ("unordered", with_row(1, bucket(2, 1), bucket(0, 2, (3, 9))), (1, 2), "lane 0 is next"),
    ("not aligned", with_row(0, bucket(0, 1, (0, 9)), bucket(1, 2, (1, 9))), (0, 1), "first_lane 1 .* cp_size 2"),
    ("outside", with_row(0, bucket(0, 2, (0, 9)), bucket(2, 2, (1, 9))), (0, 2), "up to 3, the last lane is 2"),
    ("lane without bucket", with_row(1, bucket(0, 2, (3, 64))), (1, 2), "cover 2 of 3 lanes"),
    ("no buckets", with_row(1), (1, 0), "cover 0 of 3 lanes"),
    ("over the limit", with_row(0, bucket(0, 2, (0, 126), (1, 1)), bucket(2, 1)), (0, 0), "66 padded tokens .* 64"),
    ("one over the limit", with_row(1, bucket(0, 1), bucket(1, 1), bucket(2, 1, (3, 65))), (1, 2), "65 padded .* 64"),
    ("wide empty place", with_row(1, bucket(0, 2), bucket(2, 1, (3, 9))), (1, 0), "empty but has cp_size 2"),
    ("twice", with_row(1, bucket(0, 1, (2, 60)), bucket(1, 1), bucket(2, 1)), (1, 0), "sample 2 is twice .* lane 2"),
    ("twice in one bucket", with_row(0, bucket(0, 2, (0, 9), (0, 9)), bucket(2, 1)), (0, 0), "sample 0 is twice"),
]


@pytest.mark.parametrize(("plan", "cell", "says"), [case[1:] for case in CELLS], ids=[case[0] for case in CELLS])
def test_a_broken_cell_is_refused_and_pointed_at(plan, cell, says):
    with pytest.raises(IllegalPlanError, match=says) as caught:
        check_plan(plan)
    assert (caught.value.micro_batch, caught.value.first_lane) == cell
    first_line, *grid = str(caught.value).splitlines()
    assert first_line.startswith(f"micro-batch {cell[0]}, lane")
    assert [line.split("|")[0].strip() for line in grid if "|" in line] == ["0", "1"]
    row = next(index for index, line in enumerate(grid) if line.split("|")[0].strip() == str(cell[0]))
    mark = grid[row + 1]
    assert set(mark.strip()) == {"^"}
    buckets = plan.micro_batches[cell[0]].buckets
    pointed = grid[row][mark.index("^") : mark.rindex("^") + 1]
    if any(one.first_lane == cell[1] for one in buckets):
        assert pointed.startswith(("lane ", "lanes "))
        assert pointed.split()[1].rstrip(":").split("-")[0] == str(cell[1])
    else:
        assert pointed == "", "a missing bucket is pointed at behind the row"


def test_no_micro_batches():
    with pytest.raises(IllegalPlanError, match="0 micro-batches"):
        check_plan(replace(LEGAL, micro_batches=()))


def test_interleaving_needs_a_multiple():
    topology = Topology(num_lanes=3, pp_size=2, vp_size=2)
    check_plan(replace(LEGAL, topology=topology))
    with pytest.raises(IllegalPlanError, match=r"1 micro-batches.*multiple of 2"):
        check_plan(replace(LEGAL, topology=topology, micro_batches=LEGAL.micro_batches[:1]))


def test_sequence_parallel_padding_counts():
    check_plan(replace(LEGAL, topology=Topology(num_lanes=3, tp_size=4, sequence_parallel=True)))
    with pytest.raises(IllegalPlanError, match="66 padded tokens per rank, the limit is 64"):
        check_plan(replace(LEGAL, topology=Topology(num_lanes=3, tp_size=3, sequence_parallel=True)))


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ((*SAMPLES, Sample(sample_id=9, seqlen=5)), r"lacks 1 of 7 samples \(9\)"),
        (SAMPLES[:-1], "sample 5 is not one of the 5 samples"),
        ((*SAMPLES[:-1], Sample(sample_id=5, seqlen=3)), "sample 5 has 2 tokens here but 3 were given"),
        ((*SAMPLES, SAMPLES[0]), "7 samples but 6 different sample ids"),
    ],
    ids=["missing", "unknown", "other length", "given twice"],
)
def test_the_given_samples_must_be_the_planned_ones(samples, says):
    with pytest.raises(IllegalPlanError, match=says):
        check_plan(LEGAL, samples)


def test_a_long_row_is_shortened():
    plan = with_row(0, bucket(0, 2, *((index, 1) for index in range(40))), bucket(2, 1, (40, 65)))
    with pytest.raises(IllegalPlanError) as caught:
        check_plan(plan)
    assert "0 1 2 3 + 36 more = 40 tokens" in str(caught.value)


def hierarchical(topology: Topology, cp_size: int, inner: int) -> Plan:
    buckets = [
        replace(bucket(first, cp_size, (first, 40)), cp_comm_type="a2a+p2p", inner_cp_size=inner)
        for first in range(0, topology.num_lanes - cp_size + 1, cp_size)
    ]
    rest = [Bucket(first_lane=lane) for lane in range(len(buckets) * cp_size, topology.num_lanes)]
    return plan_of_buckets([*buckets, *rest], topology=topology)


@pytest.mark.parametrize(
    ("topology", "cp_size", "inner", "says"),
    [
        (Topology(num_lanes=16), 16, 8, None),
        (Topology(num_lanes=16, tp_size=2), 16, 4, None),
        (Topology(num_lanes=16, ranks_per_node=4), 16, 8, r"lanes 0-15: inner_cp_size 8 does not divide the 4 lanes"),
        (Topology(num_lanes=16, tp_size=2), 16, 8, r"inner_cp_size 8 does not divide the 4 lanes of a node"),
        (Topology(num_lanes=8, ranks_per_node=6), 8, 4, r"inner_cp_size 4 does not divide the 6 lanes of a node"),
        (Topology(num_lanes=8, ranks_per_node=6), 8, 2, None),
        # Stage 1 starts in the middle of a node: lanes 0-7 lie on two nodes there.
        (Topology(num_lanes=20, pp_size=2), 16, 8, r"the inner group of lanes 0-7 lies on more than one node of 8"),
        (Topology(num_lanes=20, pp_size=2), 16, 4, None),
    ],
)
def test_inner_groups_lie_inside_a_node(topology, cp_size, inner, says):
    plan = hierarchical(topology, cp_size, inner)
    if says is None:
        check_plan(plan)
        return
    with pytest.raises(IllegalPlanError, match=says):
        check_plan(plan)


BATCH = tuple(Sample(sample_id=i, seqlen=n) for i, n in ((7, 30), (2, 1), (9, 512), (3, 8)))


def test_it_is_a_sequence_of_samples():
    batch = GlobalBatch.of(BATCH)
    assert len(batch) == 4
    assert tuple(batch) == BATCH == (*batch[:2], *batch[2:])
    assert batch == BATCH
    assert batch != BATCH[:3]
    assert batch[-1] == BATCH[-1]
    assert list(reversed(batch)) == list(reversed(BATCH))
    assert BATCH[2] in batch
    assert GlobalBatch.of(batch) is batch
    with pytest.raises(IndexError):
        batch[4]


def test_lengths_are_found_by_id():
    found = GlobalBatch.of(BATCH).seqlens_of(np.array([9, 2, 8, 7, 100, -1]))
    assert found.tolist() == [512, 1, 0, 30, 0, 0]
    assert GlobalBatch.of(()).seqlens_of(np.array([1])).tolist() == [0]


SEQLENS = [1, 1, 5, 17, 33, 64, 65, 129, 300, 511, 700]


@pytest.mark.parametrize(("tp_size", "alignment"), [(1, 16), (2, 16), (2, 32)])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_plans_hold_whole_multiples(tp_size, alignment, pp_size, policy):
    topology = Topology(
        num_lanes=4, tp_size=tp_size, pp_size=pp_size, sequence_parallel=tp_size > 1, token_alignment=alignment
    )
    assert topology.rank_token_multiple == tp_size * alignment
    samples = samples_of(SEQLENS)
    problem = replace(problem_of(topology, static_cp_size=4, cp_comm_types=("p2p", "a2a")), policy=policy)
    plan = plan_problem(problem, samples).plan
    check_plan(plan, samples)
    held = [tokens for bucket in plan.buckets for tokens in lane_tokens(bucket, topology.rank_token_multiple)]
    assert all(tokens % (tp_size * alignment) == 0 for tokens in held)
    assert 0 < min(held) <= max(held) <= 256
    model = CostModel(problem)
    assert lower_bound(samples, model).seconds <= makespan_ns(plan, model) / 1e9 * (1 + 1e-9)
    with pytest.raises(IllegalPlanError, match="the limit is"):
        check_plan(replace(plan, max_tokens_per_rank=max(held) - 1), samples)


def test_a_place_without_samples_is_priced_with_what_it_computes():
    plain, aligned = (CostModel(problem_of(Topology(num_lanes=2, token_alignment=k))) for k in (1, 32))
    empty, full = Bucket(first_lane=0), Bucket(first_lane=0, samples=samples_of([32]))
    assert aligned.bucket_cost(empty) == plain.bucket_cost(full) == aligned.bucket_cost(full)
    assert plain.bucket_cost(empty).forward_s < plain.bucket_cost(full).forward_s


def test_only_sequence_parallelism_shares_activations_out():
    options = PlanOptions(max_tokens_per_rank=64, cp_comm_types=("p2p",))
    split = Topology(num_lanes=2, tp_size=2, pp_size=2, sequence_parallel=True)
    aligned = replace(split, token_alignment=16)
    assert activation_bytes(TINY_MODEL, aligned, options) == activation_bytes(TINY_MODEL, split, options)
    hops = [CostModel(problem_of(one)).table.hop_s_per_token for one in (split, aligned)]
    assert hops[0] == hops[1] > 0
    assert MemoryModel(problem_of(aligned, hardware=load_hardware("h100"))).max_tokens_per_rank() % 32 == 0


def test_plans_name_it_where_it_is_there():
    plain, aligned = Topology(num_lanes=2), Topology(num_lanes=2, token_alignment=16)
    assert "token_alignment" not in topology_to_dict(plain)
    assert topology_from_dict(topology_to_dict(aligned)) == aligned
    plan = plan_problem(problem_of(aligned), samples_of([20, 30])).plan
    assert loads(dumps(plan)) == plan
    assert json.loads(dumps(plan))["topology"]["token_alignment"] == 16
    assert digest(plan) != digest(replace(plan, topology=plain))
    with pytest.raises(InvalidInputError, match="token_alignment"):
        Topology(num_lanes=2, token_alignment=0)


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rank_token_multiple", [1, 2, 3, 4, 8, 16, 64])
def test_a_rank_holds_its_share_of_the_padded_lengths(cp_size: int, rank_token_multiple: int) -> None:
    rng = random.Random(f"{cp_size} {rank_token_multiple}")
    for number in (0, 1, 1, 2, 5, 9):
        samples = samples_of([rng.randint(1, 70) for _ in range(number)])
        bucket = Bucket(first_lane=0, cp_size=cp_size, samples=tuple(samples))
        padded = padded_of(bucket, rank_token_multiple)
        tokens = rank_tokens(bucket, rank_token_multiple)
        assert tokens * cp_size == sum(padded)
        assert tokens % rank_token_multiple == 0
        assert all(length >= sample.seqlen for length, sample in zip(padded, samples, strict=False))
        if cp_size > 1:
            assert all(length % (2 * cp_size) == 0 for length in padded[:-1])
            assert tokens % 2 == 0
