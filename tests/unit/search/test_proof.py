"""`--search exact`: never slower than a thorough search, no faster than a bound, refused where it proves nothing."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest

from dynamic_cp.decide.bounds import lower_bound, proof
from dynamic_cp.decide.plan_arrays import plan_lengths
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import CP_COMM_TYPES, LinearAttention, PlannedBatch, PlanOptions, Problem, Topology
from tests.unit import support
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, samples_of

CASES = [(2, 1, (60, 50, 33, 20, 9)), (2, 2, (60, 33, 9)), (4, 1, (100, 50)), (2, 4, (60, 33))]


def problem_of(num_lanes: int, pp_size: int, search: str, **more) -> Problem:
    options = {"max_tokens_per_rank": 64, "bytes_per_element": 4, "cp_comm_types": CP_COMM_TYPES, **more}
    topology = Topology(num_lanes=num_lanes, pp_size=pp_size)
    return support.problem_of(topology, hardware=TINY_HARDWARE, search=search, **options)


def planned_both(num_lanes: int, pp_size: int, lengths: tuple[int, ...]) -> tuple[PlannedBatch, PlannedBatch]:
    """Return (thorough, exact)."""
    thorough, exact = (
        plan_problem(problem_of(num_lanes, pp_size, search), samples_of(lengths)) for search in ("thorough", "exact")
    )
    return thorough, exact


@pytest.mark.by_day("2-4")
@pytest.mark.parametrize(("num_lanes", "pp_size", "lengths"), CASES)
def test_bound_exact_thorough(num_lanes, pp_size, lengths):
    """lower bound <= exact <= thorough; nothing beats what is proven."""
    samples, cost_model = samples_of(lengths), CostModel(problem_of(num_lanes, pp_size, "fast"))
    thorough, exact = planned_both(num_lanes, pp_size, lengths)
    check_plan(exact.plan, samples)
    assert "proven the fastest" in exact.reason
    assert exact.predicted_s <= thorough.predicted_s
    assert lower_bound(samples, cost_model, "exhaustive").seconds <= makespan_ns(exact.plan, cost_model) / 1e9
    again = proof.prove(samples, cost_model, makespan_ns(exact.plan, cost_model), "as found")
    assert again.micro_batches is None
    assert again.reason == "as found; proven the fastest"


@pytest.mark.nightly
def test_a_faster_plan_is_found_where_there_is_one():
    slow = plan_problem(
        Problem(**{**fields_of(problem_of(2, 2, "fast", static_cp_size=2)), "policy": "static"}),
        samples_of(CASES[1][2]),
    )
    cost_model = CostModel(problem_of(2, 2, "fast"))
    known_ns = makespan_ns(slow.plan, cost_model)
    found = proof.prove(samples_of(CASES[1][2]), cost_model, known_ns, "static")
    assert found.makespan_ns < known_ns
    assert found.micro_batches
    assert re.fullmatch(r"exact m=\d+: [\d.]+ s, proven the fastest; before static", found.reason)


@pytest.mark.by_day("states")
@pytest.mark.parametrize("use", ["auto", "heads", "states"])
def test_plans_that_pass_on_states_are_proven(use):
    linear = LinearAttention(kind="mamba2", num_heads=8, num_groups=4, key_size=16, value_size=32)
    model = replace(TINY_MODEL, linear_attention=linear, linear_attention_freq=4)
    options = {"max_tokens_per_rank": 100, "cp_comm_types": ("p2p",), "state_exchange": use}
    problems = [replace(problem_of(2, 1, search, **options), model=model) for search in ("thorough", "exact")]
    thorough, exact = (plan_problem(problem, samples_of((150, 60))) for problem in problems)
    assert "proven the fastest" in exact.reason
    assert exact.predicted_s <= thorough.predicted_s
    with pytest.raises(UnsupportedFeatureError, match=f"x {3 if use == 'heads' else 4} ways of groups"):
        plan_problem(problems[1], samples_of((9,) * 13))


def fields_of(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in ("topology", "model", "hardware", "options")}


@pytest.mark.nightly
def test_a_proof_that_ends_early_says_how_much_faster_a_plan_could_be(monkeypatch):
    monkeypatch.setattr(proof, "MAX_NODES", 0)
    samples, cost_model = samples_of((60, 50, 41, 33, 20, 9)), CostModel(problem_of(2, 2, "fast"))
    reason = proof.prove(samples, cost_model, 10**12, "known").reason
    bound_s, gain = re.search(r"ended after 0 nodes: no plan is below ([\d.]+) s \(([\d.]+)% less\)", reason).groups()
    assert float(bound_s) > 0
    assert float(gain) > 0


@pytest.mark.parametrize(
    ("more", "lengths", "message"),
    [
        ({}, (9,) * 10, r"at most 450 choices, this one has 500 \(10 samples x 10 micro-batches x 5 ways of groups\)"),
        ({"cp_comm_types": ("p2p", "blocks")}, (9, 9), "does not know plans with blocks"),
    ],
)
def test_what_is_not_proven_is_refused(more, lengths, message):
    with pytest.raises(UnsupportedFeatureError, match=message) as caught:
        plan_problem(problem_of(2, 1, "exact", **more), samples_of(lengths))
    assert "--search thorough" in str(caught.value)


def test_a_pool_and_rounded_tokens_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="no plans with a pool"):
        PlanOptions(max_tokens_per_rank=64, search="exact", pool="auto", cp_comm_types=("p2p",))
    topology = Topology(num_lanes=2, tp_size=2, sequence_parallel=True)
    problem = Problem(**{**fields_of(problem_of(2, 1, "exact")), "topology": topology})
    with pytest.raises(UnsupportedFeatureError, match="are to a multiple of 2"):
        plan_problem(problem, samples_of((9, 9)))


def test_other_policies_have_nothing_to_prove():
    plans = [
        plan_problem(
            Problem(**fields_of(problem_of(2, 1, search, static_cp_size=1)), policy="static"), samples_of((9,) * 40)
        ).plan
        for search in ("thorough", "exact")
    ]
    assert plans[0] == plans[1]


def test_arrays_are_proven_too_and_what_is_missing_is_said(monkeypatch):
    job = {"num_lanes": 2, "max_tokens_per_rank": 64, "model": TINY_MODEL, "hardware": TINY_HARDWARE}
    job["cp_comm_types"] = "p2p"
    assert "proven the fastest" in plan_lengths([60, 33, 9], **job, search="exact").planned.reason
    monkeypatch.setitem(sys.modules, "pulp", None)
    with pytest.raises(UnsupportedFeatureError, match=r"pip install megatron-dynamic-cp\[exact\]"):
        plan_lengths([60, 33, 9], **job, search="exact")
