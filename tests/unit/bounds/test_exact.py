"""The exact search agrees with brute force over all plans, and with the optima of an independent program."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest

from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.bounds.exact import exact_plan
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import CP_COMM_TYPES, Experts, LinearAttention, Topology
from tests.unit.bounds.brute_force import best_plan, tiny_case
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, frozen_cost_model, problem_of, samples_of, tiny_cost_model


def check_against_brute_force(seeds: range, most_assignments: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        samples, model, counts = tiny_case(seed, most_assignments)
        best = best_plan(samples, model, counts)
        limits = {"counts": (counts[0], counts[-1])}
        if best is None:
            with pytest.raises(InvalidInputError, match="no plan with"):
                exact_plan(samples, model, **limits)
            continue
        exact = exact_plan(samples, model, **limits)
        check_plan(exact.plan, samples)
        assert exact.status == "optimal", f"seed {seed}"
        assert exact.makespan_s == pytest.approx(best.makespan_s, rel=1e-6), f"seed {seed}"
        assert exact.makespan_s == makespan_ns(exact.plan, model) / 1e9
        assert exact.bound_s <= best.makespan_s * (1 + 1e-6)
        assert lower_bound(samples, model, "exhaustive").seconds <= exact.makespan_s, f"seed {seed}"
        seen["cases"] += 1
        seen["choices"] += best.num_plans > 10
        seen["pipelined"] += model.topology.pp_size > 1
        seen["interleaved"] += model.topology.vp_size > 1
        seen["with CP"] += max(exact.plan.cp_histogram) > 1
        seen["empty places"] += any(not bucket.samples for bucket in exact.plan.buckets)
        seen["mixed exchanges"] += len(model.options.cp_comm_types) > 1
    return seen


@pytest.mark.by_day("30-48")
@pytest.mark.parametrize(("first", "stop"), [(30, 48), (48, 65)])
def test_exact_is_what_brute_force_finds(first, stop):
    seen = check_against_brute_force(range(first, stop), 250)
    assert seen["cases"] >= 14
    assert min(seen[name] for name in ("choices", "pipelined", "with CP", "empty places", "mixed exchanges")) >= 1, seen


@pytest.mark.by_day("4-2-1")
@pytest.mark.parametrize(
    ("num_lanes", "ep_size", "pp_size", "lengths"),
    [
        (2, 2, 1, (60, 30, 20, 9)), (2, 2, 2, (60, 30, 9)), (4, 2, 1, (100, 40, 7)), (4, 4, 1, (200, 40, 30)),
        (4, 4, 2, (60, 50)), (4, 2, 2, (100, 9)),
    ],
)  # fmt: skip
def test_exact_is_what_brute_force_finds_where_lanes_share_experts(num_lanes, ep_size, pp_size, lengths):
    """bound <= exact = brute force <= plan."""
    topology = Topology(num_lanes=num_lanes, ep_size=ep_size, pp_size=pp_size)
    shape = replace(TINY_MODEL, experts=Experts(num_experts=8, topk=2, ffn_hidden_size=128))
    hardware = replace(TINY_HARDWARE, memory_bandwidth_bytes_per_s=1e9, expert_extra_tokens=2)
    problem = problem_of(topology, shape, hardware, max_tokens_per_rank=64, bytes_per_element=4)
    model, samples = CostModel(problem), samples_of(lengths)
    best = best_plan(samples, model, range(1, 3))
    exact = exact_plan(samples, model, counts=(1, 2))
    check_plan(exact.plan, samples)
    assert exact.status == "optimal"
    assert exact.makespan_s == pytest.approx(best.makespan_s, rel=1e-6)
    assert exact.bound_s <= best.makespan_s * (1 + 1e-6)
    bound_s = lower_bound(samples, model, "exhaustive").seconds
    planned = plan_problem(problem, samples)
    found_s = makespan_ns(planned.plan, model) / 1e9
    assert 0.5 * best.makespan_s < bound_s <= best.makespan_s
    assert found_s <= 1.02 * best.makespan_s
    assert found_s >= best.makespan_s * (1 - 1e-9) or planned.plan.num_microbatches > 2


@pytest.mark.parametrize(
    ("num_lanes", "pp_size", "use", "lengths", "rate", "ways"),
    [
        (2, 1, "auto", (6000, 3000, 200), 1e12, {"states"}),
        (2, 2, "auto", (6000, 3000, 200), 1e12, {"states"}),
        (2, 1, "auto", (9000, 40, 40), 3e9, {"heads"}),
        (2, 1, "auto", (11990, 40), 1e12, {"heads"}),  # states of the long one do not fit, those of the other cost more
        (2, 1, "states", (11000, 11995), 1e9, {"heads", "states"}),
        (4, 1, "auto", (20000, 7000, 7000), 4e9, {"heads", "states"}),
    ],
)
def test_exact_is_what_brute_force_finds_with_linear_attention(num_lanes, pp_size, use, lengths, rate, ways):
    """bound <= exact = brute force <= plan, whichever way buckets share such layers."""
    topology = Topology(num_lanes=num_lanes, pp_size=pp_size, ranks_per_node=2)
    hardware = replace(TINY_HARDWARE, memory_bandwidth_bytes_per_s=1e9, linear_attention_flops_per_s=rate)
    sizes = LinearAttention(kind="gated_delta_net", num_heads=8, num_groups=4, key_size=16, value_size=32)
    shape, options = replace(TINY_MODEL, linear_attention=sizes, linear_attention_freq=4), {"max_tokens_per_rank": 6000}
    problem = problem_of(topology, shape, hardware, bytes_per_element=4, state_exchange=use, **options)
    model, samples = CostModel(problem), samples_of(lengths)
    best = best_plan(samples, model, range(1, 3))
    exact = exact_plan(samples, model, counts=(1, 2))
    check_plan(exact.plan, samples)
    assert exact.status == "optimal"
    assert exact.makespan_s == pytest.approx(best.makespan_s, rel=1e-6)
    assert {bucket.state_exchange for bucket in exact.plan.buckets if bucket.cp_size > 1} == ways
    assert lower_bound(samples, model, "exhaustive").seconds <= best.makespan_s
    planned = plan_problem(problem, samples)
    assert planned.predicted_s >= best.makespan_s * (1 - 1e-9) or planned.plan.num_microbatches > 2


@pytest.mark.by_day("lengths1-2")
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("lengths", [(120,), (100, 9), (128, 20, 3)])
def test_a_hierarchy_is_found_where_it_pays(lengths, pp_size):
    """Two nodes of two lanes with a slow link: bound <= brute force = exact <= plan, and all of them use a2a+p2p."""
    topology = Topology(num_lanes=4, ranks_per_node=2, pp_size=pp_size)
    hardware, options = replace(TINY_HARDWARE, attention_flops_per_s=1e12), {"cp_comm_types": CP_COMM_TYPES}
    problem = problem_of(topology, hardware=hardware, max_tokens_per_rank=32, bytes_per_element=4, **options)
    model = CostModel(problem)
    samples, counts = samples_of(lengths), range(1, 3)
    best = best_plan(samples, model, counts)
    exact = exact_plan(samples, model, counts=(counts[0], counts[-1]))
    assert exact.makespan_s == pytest.approx(best.makespan_s, rel=1e-6)
    planned = plan_problem(problem, samples)
    check_plan(exact.plan, samples)
    assert lower_bound(samples, model, "exhaustive").seconds <= best.makespan_s <= planned.predicted_s * (1 + 1e-9)
    assert planned.predicted_s <= best.makespan_s * 1.02
    for plan in (best.plan, exact.plan, planned.plan):
        (long,) = (bucket for bucket in plan.buckets if bucket.cp_size == 4)
        assert (long.cp_comm_type, long.inner_cp_size) == ("a2a+p2p", 2)


@pytest.mark.nightly
def test_exact_is_what_brute_force_finds_on_larger_batches():
    seen = check_against_brute_force(range(2000, 2080), 4000)
    assert seen["cases"] >= 60
    assert min(seen[name] for name in ("choices", "interleaved", "with CP", "empty places")) >= 5, seen


# pp, lanes, tokens per rank, lengths, optimum of an independent program (frozen bench; no empty places, no padding)
FROZEN = [
    (1, 2, 8192, [14693, 10989, 2391, 1485, 1260, 582], 3.398406885097333),
    (1, 2, 8192, [6863, 5202, 2235, 1789, 1420, 1044, 683, 447], 1.8975576628891444),
    (2, 2, 8192, [12383, 8813, 6591, 4909, 3899, 277], 2.4336959055536336),
    (1, 4, 8192, [18116, 18104, 7214, 3891, 3630, 2752, 1474, 985], 3.409424161155766),
    (2, 2, 4096, [8192, 5286, 2688, 758, 675, 661, 383, 96], 1.304997739191157),
    (4, 2, 8192, [9409, 3240, 3109, 2776, 1055, 343], 1.152251251044188),
]


@pytest.mark.by_day("1-2-8192")
@pytest.mark.parametrize(
    ("pp_size", "num_lanes", "limit", "lengths", "optimum_s"),
    [*FROZEN[:3], *(pytest.param(*case, marks=pytest.mark.nightly) for case in FROZEN[3:])],
    ids=lambda value: f"{len(value)} samples" if isinstance(value, list) else None,
)
def test_exact_reproduces_the_frozen_optimum(pp_size, num_lanes, limit, lengths, optimum_s):
    model = frozen_cost_model(limit, num_lanes=num_lanes, pp_size=pp_size)
    exact = exact_plan(samples_of(lengths), model, allow_empty=False, padded=False)
    assert exact.status == "optimal"
    assert exact.makespan_s == pytest.approx(optimum_s, rel=2e-4)
    assert lower_bound(samples_of(lengths), model, "exhaustive").proven_s <= exact.makespan_s
    assert all(bucket.samples for bucket in exact.plan.buckets)


def test_a_known_plan_is_only_improved():
    model = tiny_cost_model(Topology(num_lanes=2), max_tokens_per_rank=64)
    samples = samples_of([100, 60, 9])
    best = exact_plan(samples, model)
    again = exact_plan(samples, model, known_s=best.makespan_s)
    assert again.plan is None
    assert again.status == "optimal"
    assert again.makespan_s == best.makespan_s
    worse = exact_plan(samples, model, known_s=best.makespan_s * 1.5)
    assert worse.makespan_s == best.makespan_s


@pytest.mark.nightly
def test_a_search_that_is_cut_short_says_so_and_bounds():
    model = tiny_cost_model(Topology(num_lanes=4, pp_size=2), max_tokens_per_rank=64)
    samples = samples_of([200, 60, 50, 40, 30, 20, 9, 8])
    cut = exact_plan(samples, model, counts=(3, 3), max_nodes=1)
    assert cut.status == "limit"
    assert 0 < cut.bound_s < cut.makespan_s


def test_rounded_rank_tokens_are_refused():
    model = tiny_cost_model(Topology(num_lanes=2, tp_size=2, sequence_parallel=True))
    with pytest.raises(InvalidInputError, match="multiple of 2, the exact search needs 1"):
        exact_plan(samples_of([3]), model)


@pytest.mark.parametrize("name", ["pulp", "highspy"])
def test_without_its_solver_the_remedy_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedFeatureError, match=rf"needs {name}, .*pip install megatron-dynamic-cp\[exact\]"):
        exact_plan(samples_of([3]), tiny_cost_model(Topology(num_lanes=1)))
