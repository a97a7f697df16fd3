"""A mechanism that shares unevenly and has no closed form needs one class and its name: everything else asks it."""

import json

import numpy as np
import pytest

from dynamic_cp.decide.bounds.lower import lower_bound
from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.mechanisms.mechanism import LaneSeconds, Mechanism, Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.stage_attention import Convex, Linear, StageAttention
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.schedule import peak_in_flight_tokens
from dynamic_cp.pipeline.simulator import makespan_ns, simulate
from dynamic_cp.plans.lane_plan import PlanFacts, decode_lane, encode_lanes, lane_plan
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.plans.serialize import digest, dumps, format_plan, loads, parse_plan
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel, lane_costs
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import TRAITS, Bucket, Plan, PlannedBatch, Problem, Topology, Traits
from tests.unit.support import TINY_HARDWARE, plan_of_buckets, problem_of, samples_of

NAME = "lopsided"
FORWARD_S, BACKWARD_S = 0.25, 0.5
"""Per token; twice that where another bucket of the micro-batch uses it, too."""


class Lopsided(Mechanism):
    """The last lane of a group holds all tokens but 8 of each other lane."""

    name = NAME
    has_closed_form = False

    def inner_sizes(self, cp_size: int, sharing: Sharing) -> tuple[int, ...]:
        return (1,)

    def floor(self, stage: StageAttention, cp_size, inner, copies, link) -> tuple[Convex, Convex]:
        return Convex(Linear()), Convex(Linear())

    def lane_tokens(self, bucket, even):
        return (8,) * (bucket.cp_size - 1) + (even * bucket.cp_size - 8 * (bucket.cp_size - 1),)

    def lane_seconds(self, stage, bucket, micro_batch):
        users = sum(one.cp_comm_type == NAME for one in micro_batch.buckets)
        even = sum(sample.seqlen for sample in bucket.samples) // bucket.cp_size
        seconds = users * np.outer((FORWARD_S, BACKWARD_S), self.lane_tokens(bucket, even))
        return LaneSeconds(seconds, np.zeros_like(seconds))

    def lane_parts(self, bucket, topology):
        return [{"holds": tokens} for tokens in self.lane_tokens(bucket, 16)]


@pytest.fixture(autouse=True)
def lopsided(monkeypatch):
    """What adding it takes: its name, that it implies an inner size of one, and the class."""
    monkeypatch.setitem(TRAITS, NAME, Traits("one"))
    monkeypatch.setitem(MECHANISMS, NAME, Lopsided())


TOPOLOGY = Topology(num_lanes=4, pp_size=2)


def problem_with(*names: str) -> Problem:
    return problem_of(TOPOLOGY, hardware=TINY_HARDWARE, max_tokens_per_rank=64, cp_comm_types=names)


def cost_model(*names: str) -> CostModel:
    return CostModel(problem_with(*names))


def plan_with(max_tokens_per_rank: int = 64) -> Plan:
    """Return 2 lanes that use it beside 2 that do not, then two groups that do."""
    first, second, third, fourth, fifth = samples_of([32, 7, 9, 32, 32])
    rows = (
        (Bucket(first_lane=0, cp_size=2, cp_comm_type=NAME, samples=(first,)),
         Bucket(first_lane=2, samples=(second,)), Bucket(first_lane=3, samples=(third,))),
        (Bucket(first_lane=0, cp_size=2, cp_comm_type=NAME, samples=(fourth,)),
         Bucket(first_lane=2, cp_size=2, cp_comm_type=NAME, samples=(fifth,))),
    )  # fmt: skip
    return plan_of_buckets(*rows, topology=TOPOLOGY, max_tokens_per_rank=max_tokens_per_rank)


def test_a_plan_is_written_read_and_compared():
    one = plan_with()
    assert loads(dumps(one)) == parse_plan(format_plan(one)) == one
    assert f"lanes 0-1 {NAME}: 0:32" in format_plan(one)
    ring = dumps(one).replace(NAME, "p2p")
    assert digest(loads(ring)) != digest(one)


def test_the_limit_is_that_of_its_fullest_lane():
    check_plan(plan_with(24))
    with pytest.raises(IllegalPlanError, match="24 padded tokens per rank, the limit is 23"):
        check_plan(plan_with(23))


def test_each_lane_gets_its_own_part_and_nothing_else():
    one = plan_with()
    facts = PlanFacts.of(PlannedBatch(plan=one, predicted_s=1.0, predicted_busy_s=(1.0,) * 4, reason="test"))
    decoded = [decode_lane(message) for message in encode_lanes(one, facts)]
    assert decoded == [lane_plan(one, lane, facts) for lane in range(4)]
    few, many = {"holds": 8}, {"holds": 24}
    assert [one.parts for one in decoded] == [{0: few, 1: few}, {0: many, 1: many}, {1: few}, {1: many}]
    assert json.dumps(many).encode() not in encode_lanes(one, facts)[0].replace(b":", b": ")


def test_lanes_are_priced_one_by_one_with_the_whole_micro_batch_in_view():
    model = cost_model("p2p", NAME)
    alone, both = (list(lane_costs(row, model)) for row in plan_with().micro_batches)
    assert [lanes for lanes, _ in alone] == [1, 1, 1, 1]
    assert alone[2][1] == model.bucket_cost(plan_with().micro_batches[0].buckets[1])
    for (_, one), tokens in zip(alone[:2], (8, 24), strict=True):
        # What a lane pays without attention: a lane with as many tokens, less its attention.
        rest = cost_model("p2p").cost(1, 0, tokens, 0)
        assert one.forward_s == pytest.approx(rest.forward_s + FORWARD_S * tokens, rel=1e-3)
        assert one.backward_s == pytest.approx(rest.backward_s + BACKWARD_S * tokens, rel=1e-3)
        assert one.p2p_s == rest.p2p_s
        assert one[3:] == rest[3:]
    for (_, one), tokens in zip(both, (8, 24, 8, 24), strict=True):
        assert one.forward_s == pytest.approx(2 * FORWARD_S * tokens, rel=0.01)


def test_the_simulator_lets_lanes_of_a_group_end_apart():
    model = cost_model("p2p", NAME)
    one = plan_with()
    timeline = simulate(one, model)
    assert timeline.makespan_ns == makespan_ns(one, model)
    first = next(span for span in timeline.spans if span.bucket.cp_comm_type == NAME)
    few, many = (end_ns - first.start_ns for end_ns in first.lane_ends_ns)
    assert many == pytest.approx(3 * few, rel=0.01)
    assert timeline.split.busy_ns[0, 1] > 2 * timeline.split.busy_ns[0, 0]
    assert peak_in_flight_tokens(lane_tokens_of(one), one.topology.pp_size)[0, 1] == 48


def test_memory_is_that_of_its_fullest_lane():
    def activations(one: Plan) -> int:
        return max(stage.activations_bytes for stage in MemoryModel(problem_with("p2p", NAME)).peak(one))

    even = loads(dumps(plan_with()).replace(NAME, "p2p"))
    assert activations(plan_with()) == pytest.approx(1.5 * activations(even), rel=0.1)


def test_packers_leave_it_alone_and_bounds_stay_below_it():
    samples = samples_of([200, 120, 60, 60, 30, 9])
    for names in (("p2p",), ("p2p", NAME)):
        plan = plan_problem(problem_with(*names), samples).plan
        assert {bucket.cp_comm_type for bucket in plan.buckets} == {"p2p"}
    ring, both = (lower_bound(samples, cost_model(*names)).seconds for names in (("p2p",), ("p2p", NAME)))
    # Its floor says that attention may be free: the bound must not count on the ring's.
    assert 0 < both < ring
