"""The longest path against an independent event-driven simulation, closed forms and deadlocks."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

import pytest

from dynamic_cp.cost_model import BucketCost
from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.schedule import Operation, stage_operations
from dynamic_cp.simulator import makespan_ns, simulate
from dynamic_cp.types import Topology
from tests.unit.planner.support import GivenCosts, plan_of


def event_driven_makespan_ns(plan, costs, lists) -> int:
    """Return the makespan from a heap of completions, written from the rules only; -1 when it gets stuck."""
    pp, vp = plan.topology.pp_size, plan.topology.vp_size
    at = dict.fromkeys(lists, 0)
    busy = dict.fromkeys(lists, False)
    arrival: dict[
        tuple, int
    ] = {}  # (kind, micro-batch, virtual stage, first lane) -> when its output can be used there
    events: list[tuple[int, int, int, Operation, int]] = []
    wake_ups: set[int] = set()
    now = finished = 0

    def start_what_can_start():
        for (stage, lane), todo in lists.items():
            if busy[stage, lane] or at[stage, lane] == len(todo):
                continue
            op = todo[at[stage, lane]]
            bucket = plan.micro_batches[op.micro_batch].bucket_of_lane(lane)
            if any(
                busy[stage, other]
                or at[stage, other] == len(lists[stage, other])
                or lists[stage, other][at[stage, other]] != op
                for other in bucket.lanes
            ):
                continue
            virtual = op.chunk * pp + stage
            cost = costs[bucket.samples[0].sample_id]
            hop = round(cost.p2p_s * 1e9)
            key = None
            if op.kind == "F" and virtual > 0:
                key, hop_ns = ("F", op.micro_batch, virtual - 1, bucket.first_lane), hop
            elif op.kind == "B" and virtual < pp * vp - 1:
                key, hop_ns = ("B", op.micro_batch, virtual + 1, bucket.first_lane), hop
            elif op.kind == "B":
                key, hop_ns = ("F", op.micro_batch, virtual, bucket.first_lane), 0
            if key is not None and (key not in arrival or arrival[key] + hop_ns > now):
                if key in arrival and arrival[key] + hop_ns not in wake_ups:
                    wake_ups.add(arrival[key] + hop_ns)
                    heapq.heappush(events, (arrival[key] + hop_ns, -1, -1, op, -1))  # look again then
                continue
            seconds = cost.forward_s if op.kind == "F" else cost.backward_s
            for other in bucket.lanes:
                busy[stage, other] = True
            heapq.heappush(events, (now + round(seconds / vp * 1e9), stage, bucket.first_lane, op, bucket.cp_size))

    start_what_can_start()
    while events:
        now, stage, first_lane, op, cp_size = heapq.heappop(events)
        if stage >= 0:
            finished = now
            arrival[op.kind, op.micro_batch, op.chunk * pp + stage, first_lane] = now
            for lane in range(first_lane, first_lane + cp_size):
                busy[stage, lane] = False
                at[stage, lane] += 1
        start_what_can_start()
    return finished if all(at[place] == len(todo) for place, todo in lists.items()) else -1


def random_case(rng: random.Random):
    pp = rng.choice([1, 2, 3, 4])
    vp = rng.choice([1, 2, 3]) if pp > 1 else 1
    lanes = rng.choice([1, 2, 3, 4, 6, 8])
    m = pp * rng.randint(1, 3) if vp > 1 else rng.randint(1, 7)
    grid = []
    for _ in range(m):
        row, lane = [], 0
        while lane < lanes:
            cp = rng.choice([cp for cp in (1, 2, 4, 8) if lane % cp == 0 and lane + cp <= lanes])
            row.append((lane, cp))
            lane += cp
        grid.append(row)
    plan = plan_of(grid, Topology(num_lanes=lanes, pp_size=pp, vp_size=vp))
    costs = {
        sample.sample_id: BucketCost(rng.randint(1, 9) * 1e-3, rng.randint(1, 19) * 1e-3, rng.randint(0, 3) * 1e-3)
        for sample in plan.samples
    }
    return plan, costs


def megatron_lists(plan):
    topology = plan.topology
    return {
        (stage, lane): stage_operations(stage, topology.pp_size, plan.num_microbatches, topology.vp_size)
        for stage in range(topology.pp_size)
        for lane in range(topology.num_lanes)
    }


def test_equals_an_independent_event_driven_simulation():
    rng = random.Random(0)
    interleaved = coupled = 0
    for _ in range(120):
        plan, costs = random_case(rng)
        timeline = simulate(plan, GivenCosts(costs))
        assert timeline.makespan_ns == event_driven_makespan_ns(plan, costs, megatron_lists(plan))
        assert timeline.makespan_ns == makespan_ns(plan, GivenCosts(costs))
        assert simulate(plan, GivenCosts(costs), megatron_lists(plan)).makespan_ns == timeline.makespan_ns
        interleaved += plan.topology.vp_size > 1
        coupled += any(bucket.cp_size > 1 for bucket in plan.buckets)
    assert interleaved > 20
    assert coupled > 60


@pytest.mark.parametrize(("pp", "vp", "m"), [(1, 1, 5), (2, 1, 3), (4, 1, 9), (8, 1, 8), (2, 2, 4), (4, 3, 8)])
def test_uniform_micro_batches_have_the_closed_form(pp, vp, m):
    plan = plan_of([[(0, 2), (2, 1)]] * m, Topology(num_lanes=3, pp_size=pp, vp_size=vp))
    cost = BucketCost(6e-3, 12e-3, 0.0)
    timeline = simulate(plan, GivenCosts(dict.fromkeys(range(2 * m), cost)))
    assert timeline.makespan_s == pytest.approx((m * vp + pp - 1) / vp * 18e-3, rel=1e-9)
    assert timeline.lane_busy_s == pytest.approx([m * 18e-3] * 3)
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (m * vp + pp - 1))


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
            assert before.start_s < before.end_s <= after.start_s + 1e-12


def test_groups_couple_their_lanes():
    """Lane 0 waits for lane 1 because the second micro-batch joins them; lane 2 does not."""
    plan = plan_of([[(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 1)]], Topology(num_lanes=3))
    costs = dict(enumerate([BucketCost(t * 1e-3, 0.0, 0.0) for t in (1, 5, 1, 2, 2)]))
    ends = {
        (s.operation.micro_batch, s.bucket.first_lane, s.operation.kind): s.end_s
        for s in simulate(plan, GivenCosts(costs)).spans
    }
    assert ends[1, 0, "F"] == pytest.approx(7e-3)
    assert ends[1, 2, "F"] == pytest.approx(3e-3)


def test_one_swap_on_one_lane_deadlocks_and_names_the_stuck_actions():
    plan = plan_of([[(0, 2), (2, 1)], [(0, 2), (2, 1)]], Topology(num_lanes=3))
    lists = megatron_lists(plan)
    lists[0, 1] = tuple(Operation(op.kind, 1 - op.micro_batch) for op in lists[0, 1])
    costs = dict.fromkeys(range(4), BucketCost(1e-3, 2e-3, 0.0))
    with pytest.raises(IllegalPlanError) as caught:
        simulate(plan, GivenCosts(costs), lists)
    assert caught.value.stuck == {(0, 0): Operation("F", 0), (0, 1): Operation("F", 1)}
    assert "stage 0 lane 0 at 0F0 waits for lane 1, which is at 0F1" in str(caught.value)
    assert "stage 0 lane 1 at 0F1 waits for lane 0, which is at 0F0" in str(caught.value)
    assert event_driven_makespan_ns(plan, costs, lists) == -1


def test_lanes_without_a_common_group_may_differ_in_order():
    plan = plan_of([[(0, 1), (1, 1)], [(0, 1), (1, 1)]], Topology(num_lanes=2))
    lists = megatron_lists(plan)
    lists[0, 1] = tuple(Operation(op.kind, 1 - op.micro_batch) for op in lists[0, 1])
    costs = {index: BucketCost((index + 1) * 1e-3, 1e-3, 0.0) for index in range(4)}
    assert simulate(plan, GivenCosts(costs), lists).makespan_ns == event_driven_makespan_ns(plan, costs, lists)


def test_a_backward_before_its_forward_is_named():
    plan = plan_of([[(0, 1)]], Topology(num_lanes=1, pp_size=2))
    lists = {(0, 0): (Operation("B", 0), Operation("F", 0)), (1, 0): (Operation("F", 0), Operation("B", 0))}
    with pytest.raises(IllegalPlanError, match="stage 0 lane 0 at 0B0 waits for 0B0 on stage 1"):
        simulate(plan, GivenCosts({0: BucketCost(1e-3, 1e-3, 0.0)}), lists)


def test_random_swaps_agree_with_the_event_driven_simulation_about_deadlock():
    rng = random.Random(1)
    deadlocks = 0
    for _ in range(60):
        plan, costs = random_case(rng)
        lists = megatron_lists(plan)
        place = rng.choice(sorted(lists))
        operations = list(lists[place])
        index = rng.randrange(len(operations) - 1)
        operations[index], operations[index + 1] = operations[index + 1], operations[index]
        lists[place] = tuple(operations)
        expected = event_driven_makespan_ns(plan, costs, lists)
        if expected < 0:
            deadlocks += 1
            with pytest.raises(IllegalPlanError, match="deadlock"):
                simulate(plan, GivenCosts(costs), lists)
        else:
            assert simulate(plan, GivenCosts(costs), lists).makespan_ns == expected
    assert 10 < deadlocks < 60
