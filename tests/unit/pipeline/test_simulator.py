"""The longest path against an independent event-driven simulation and closed forms."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.pipeline.schedule import Operation, peak_in_flight_tokens
from dynamic_cp.pipeline.simulator import grid_of, makespan_ns, simulate
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.pricing.cost_model import BucketCost
from dynamic_cp.types import Bucket, Sample, Topology
from tests.unit.pipeline.event_simulator import megatron_lists, play
from tests.unit.support import GivenCosts, plan_of, plan_of_buckets

MS = 1_000_000


def random_case(rng: random.Random):
    pp = rng.choice([1, 2, 3, 4])
    vp = rng.choice([1, 2, 3]) if pp > 1 else 1
    lanes = rng.choice([1, 2, 3, 4, 5, 6, 8])
    m = pp * rng.randint(1, 2) if vp > 1 else rng.randint(1, 6)
    grid = []
    for _ in range(m):
        row, lane = [], 0
        while lane < lanes:
            cp = rng.choice([cp for cp in (1, 2, 4, 8) if lane % cp == 0 and lane + cp <= lanes])
            row.append((lane, cp))
            lane += cp
        grid.append(row)
    plan = plan_of(grid, Topology(num_lanes=lanes, pp_size=pp, vp_size=vp))
    with_edges = rng.random() < 0.7

    def milliseconds(low, high, present=True):
        return rng.randint(low, high) * 1e-3 * present

    costs = {
        sample.sample_id: BucketCost(
            forward_s=milliseconds(1, 9), backward_s=milliseconds(1, 19), p2p_s=milliseconds(0, 3),
            embedding_forward_s=milliseconds(0, 3, with_edges), embedding_backward_s=milliseconds(0, 2, with_edges),
            head_forward_s=milliseconds(0, 4, with_edges), head_backward_s=milliseconds(0, 6, with_edges),
        )
        for sample in plan.samples
    }  # fmt: skip
    return plan, costs


def by_place(array):
    """[stage, lane] -> Counter, for comparison with what the event-driven simulation booked."""
    return Counter({(stage, lane): int(value) for (stage, lane), value in np.ndenumerate(array) if value})


def work_ns(plan, costs):
    """Nanoseconds of all operations on all ranks' places, from the prices alone."""
    pp, vp = plan.topology.pp_size, plan.topology.vp_size
    total = 0
    for bucket in plan.buckets:
        cost = costs[bucket.samples[0].sample_id]
        chunks = round(cost.forward_s / vp * 1e9) + round(cost.backward_s / vp * 1e9)
        edges = sum(round(edge_s * 1e9) for edge_s in cost[3:])
        total += bucket.cp_size * (pp * vp * chunks + edges)
    return total


@pytest.mark.by_day("0")
@pytest.mark.parametrize("seed", range(4))
def test_equals_an_independent_event_driven_simulation(seed):
    rng = random.Random(seed)
    seen = Counter()
    for _ in range(150):
        plan, costs = random_case(rng)
        model = GivenCosts(costs)
        timeline, lists = simulate(plan, model), megatron_lists(plan)
        expected = play(plan, costs, lists)
        assert expected.finished
        assert timeline.makespan_ns == expected.makespan_ns == makespan_ns(plan, model)
        split = timeline.split
        for name in ("busy_ns", "pipeline_bubble_ns", "cp_wait_ns", "dp_wait_ns"):
            assert by_place(getattr(split, name)) == +getattr(expected, name), name
            seen[name] += bool(getattr(expected, name))
        total = split.busy_ns + split.pipeline_bubble_ns + split.cp_wait_ns + split.dp_wait_ns
        assert (total == timeline.makespan_ns).all()
        assert split.busy_ns.sum() == work_ns(plan, costs)
        seen["interleaved"] += plan.topology.vp_size > 1
        seen["coupled"] += any(bucket.cp_size > 1 for bucket in plan.buckets)
        seen["mixed cp"] += any(len({b.cp_size for b in row.buckets}) > 1 for row in plan.micro_batches)
        seen["odd lanes"] += plan.topology.num_lanes % 2
        seen["edges"] += any(cost.head_forward_s > 0 for cost in costs.values())
        seen["hops"] += plan.topology.pp_size > 1 and any(cost.p2p_s > 0 for cost in costs.values())
    assert min(seen.values()) > 25, seen
    assert len(seen) == 10


@pytest.mark.nightly
def test_lanes_of_a_group_may_take_unequal_times():
    rng = random.Random(1)
    seen = Counter()
    for _ in range(200):
        plan, costs = random_case(rng)
        grid = grid_of(plan, GivenCosts(costs))
        longer = np.array([rng.choice([0, 0, 1, 5]) for _ in range(grid.chunk_ns.size)]).reshape(grid.chunk_ns.shape)
        uneven = grid._replace(chunk_ns=grid.chunk_ns + longer * MS)
        places = {("FB"[kind], row, lane): int(ns) * MS for (kind, row, lane), ns in np.ndenumerate(longer)}
        lists = megatron_lists(plan)
        expected = play(plan, costs, lists, Counter(places))
        timeline = simulate(plan, GivenCosts(costs), grid=uneven)
        assert timeline.makespan_ns == expected.makespan_ns
        for name in ("busy_ns", "pipeline_bubble_ns", "cp_wait_ns", "dp_wait_ns"):
            assert by_place(getattr(timeline.split, name)) == +getattr(expected, name), name
        busy_ns = sum(sum(span.lane_ends_ns) - len(span.lane_ends_ns) * span.start_ns for span in timeline.spans)
        assert busy_ns == timeline.split.busy_ns.sum()
        assert max(span.end_ns for span in timeline.spans) == timeline.makespan_ns
        seen["unequal"] += any(
            len({longer[0, index, lane] for lane in bucket.lanes}) > 1
            for index, row in enumerate(plan.micro_batches)
            for bucket in row.buckets
        )
        seen["several stages"] += plan.topology.pp_size > 1
    assert min(seen.values()) > 50, seen


@pytest.mark.parametrize(("pp", "vp", "m"), [(1, 1, 5), (2, 1, 3), (4, 1, 9), (8, 1, 8), (2, 2, 4), (4, 3, 8)])
def test_uniform_micro_batches_have_the_closed_form(pp, vp, m):
    plan = plan_of([[(0, 2), (2, 1)]] * m, Topology(num_lanes=3, pp_size=pp, vp_size=vp))
    cost = BucketCost(6e-3, 12e-3, 0.0)
    timeline = simulate(plan, GivenCosts(dict.fromkeys(range(2 * m), cost)))
    assert timeline.makespan_s == pytest.approx((m * vp + pp - 1) / vp * 18e-3, rel=1e-9)
    assert timeline.lane_busy_s == pytest.approx([m * 18e-3] * 3)
    split = timeline.split
    assert split.bubble_fraction == pytest.approx((pp - 1) / (m * vp + pp - 1))
    assert split.pipeline_bubble_fraction == split.bubble_fraction
    assert split.busy_fraction == pytest.approx(1 - split.bubble_fraction)


@pytest.mark.parametrize(("pp", "m"), [(1, 4), (2, 1), (2, 5), (4, 2), (4, 9)])
def test_edges_and_hops_have_the_closed_form_where_the_head_is_the_bottleneck(pp, m):
    """The last stage never waits once it has started: it is filled through all stages and drained through them."""
    plan = plan_of([[(0, 1)]] * m, Topology(num_lanes=1, pp_size=pp))
    cost = BucketCost(5e-3, 11e-3, 1e-3 if pp > 1 else 0.0, 1e-3, 2e-3, 7e-3, 13e-3)
    timeline = simulate(plan, GivenCosts(dict.fromkeys(range(m), cost)))
    last_stage, edge = m * (16 + 20) * MS, (1 + 2) * MS
    through = (pp - 1) * (16 + 2) * MS
    assert timeline.makespan_ns == last_stage + through + edge * (m if pp == 1 else 1)


def test_the_split_of_coupled_lanes():
    """Lane 1 is done with its first micro-batch at 2 and waits until lane 0 is at 10; lane 2 is alone and done at 6."""
    plan = plan_of([[(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 1)]], Topology(num_lanes=3))
    costs = {i: BucketCost(t * 1e-3, t * 1e-3, 0.0) for i, t in enumerate((5, 1, 2, 3, 1))}
    split = simulate(plan, GivenCosts(costs)).split
    assert (split.busy_ns / MS).tolist() == [[16, 8, 6]]
    assert (split.cp_wait_ns / MS).tolist() == [[0, 8, 0]]
    assert (split.dp_wait_ns / MS).tolist() == [[0, 0, 10]]
    assert not split.pipeline_bubble_ns.any()
    assert split.cp_wait_fraction == pytest.approx(8 / 48)
    assert split.dp_wait_fraction == pytest.approx(10 / 48)
    assert split.bubble_fraction == pytest.approx(18 / 48)


def test_spans_are_the_whole_schedule_without_overlap():
    plan, costs = random_case(random.Random(7))
    timeline = simulate(plan, GivenCosts(costs))
    seen: dict[tuple[int, int], list] = {}
    for span in timeline.spans:
        for lane in span.bucket.lanes:
            seen.setdefault((span.stage, lane), []).append(span)
    assert {place: tuple(span.operation for span in spans) for place, spans in seen.items()} == megatron_lists(plan)
    for spans in seen.values():
        for before, after in pairwise(spans):
            assert before.start_ns < before.end_ns <= after.start_ns
    lengths_ns = [span.end_on_ns(lane) - span.start_ns for span in timeline.spans for lane in span.bucket.lanes]
    assert sum(lengths_ns) == pytest.approx(work_ns(plan, costs))
    assert max(span.end_ns for span in timeline.spans) == timeline.makespan_ns
    first = timeline.spans[0]
    assert (str(first.operation), first.stage, first.start_ns) == ("0F0", 0, 0)
    assert first.bucket == plan.micro_batches[0].bucket_of_lane(first.bucket.first_lane)


def test_in_flight_tokens_are_padded_and_of_one_rank():
    """5 tokens on 2 lanes are padded to 8, 4 a rank; stage 0 holds both micro-batches, stage 1 one at a time."""

    def bucket(lane, cp, sample_id, seqlen):
        return Bucket(first_lane=lane, cp_size=cp, samples=(Sample(sample_id=sample_id, seqlen=seqlen),))

    rows = [(bucket(0, 2, 0, 5), bucket(2, 1, 1, 9)), (bucket(0, 1, 2, 7), bucket(1, 1, 3, 2), bucket(2, 1, 4, 1))]
    plan = plan_of_buckets(*rows, topology=Topology(num_lanes=3, pp_size=2))
    assert peak_in_flight_tokens(lane_tokens_of(plan), pp_size=2).tolist() == [[11, 6, 10], [7, 4, 9]]


@pytest.mark.parametrize("lane", [1, 2])
def test_another_order_deadlocks_only_on_a_lane_that_shares_a_group(lane):
    plan = plan_of([[(0, 2), (2, 1)], [(0, 2), (2, 1)]], Topology(num_lanes=3))
    lists = megatron_lists(plan)
    lists[0, lane] = tuple(Operation(op.kind, 1 - op.micro_batch) for op in lists[0, lane])
    costs = dict.fromkeys(range(4), BucketCost(1e-3, 2e-3, 0.0))
    assert play(plan, costs, lists).finished == (lane == 2)


def test_a_plan_that_does_not_tile_its_lanes_is_refused_before_the_kernel():
    for row in ([(0, 1)], [(0, 2), (2, 1)], [(1, 1), (0, 1)], [(0, 1), (0, 1)]):
        plan = plan_of([[(0, 2)], row], Topology(num_lanes=2))
        model = GivenCosts(dict.fromkeys(range(4), BucketCost(1e-3, 1e-3, 0.0)))
        with pytest.raises(IllegalPlanError, match="micro-batch 1 covers"):
            makespan_ns(plan, model)
