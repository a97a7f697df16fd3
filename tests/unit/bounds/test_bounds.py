"""No plan is faster than its bound: all plans of tiny batches, and the best plans known of the frozen ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp.decide.bounds import lower, lower_bound
from dynamic_cp.decide.bounds.ways import ratio_range, ways_of
from dynamic_cp.decide.bounds.work import least_work
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import CP_COMM_TYPES, Bucket, Topology
from tests.unit.bounds.brute_force import best_plan, exchanges_of, tiny_case
from tests.unit.packing.packings import DEEP_MODEL, deep_cost_model
from tests.unit.support import (
    CASES,
    HOST_HARDWARE,
    TINY_HARDWARE,
    causal,
    frozen_cost_model,
    plan_of_buckets,
    problem_of,
    samples_of,
    tiny_cost_model,
)


def check_tiny_cases(seeds: range, most_assignments: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        samples, model, counts = tiny_case(seed, most_assignments, tp_sizes=(1, 1, 2))
        best = best_plan(samples, model, counts)
        if best is None:
            seen["no plan"] += 1
            continue
        seen["plans"] += best.num_plans
        for effort in ("quick", "report", "exhaustive"):
            bound = lower_bound(samples, model, effort)
            assert bound.proven_s <= bound.seconds <= best.makespan_s, f"seed {seed}, {effort}"
            assert bound.seconds > 0.2 * best.makespan_s, f"seed {seed}, {effort}: a bound this low says nothing"
        assert bound.is_proven, f"seed {seed}"
        seen[bound.binds] += 1
        seen["tight" if bound.seconds > 0.999999 * best.makespan_s else "strict"] += 1
        seen["pipelined"] += model.topology.pp_size > 1
        seen["interleaved"] += model.topology.vp_size > 1
        seen["rounded tokens"] += model.topology.rank_token_multiple > 1
        seen["exchanges"] += len(model.options.cp_comm_types) > 1
        seen["above 0.8"] += bound.seconds > 0.8 * best.makespan_s
    return seen


def test_no_plan_of_a_tiny_batch_is_below_its_bound():
    seen = check_tiny_cases(range(40), 800)
    assert seen["tight"] >= 1
    assert seen["strict"] >= 10
    assert seen["plans"] > 500
    assert seen["pipelined"] >= 5


# case, seed, best known seconds, lower bound of the frozen bench
FROZEN = [
    ("github_pp1_n64_128k", 1, 1, 64, 16384, 53.31546279370948, 53.0067844556748),
    ("github_pp8_n32_128k", 8, 1, 32, 16384, 17.960881, 15.577868),
    ("github_pp8_vpp5_n32_128k", 8, 5, 32, 16384, 15.672914, 13.9388),
    ("real_webprose_ccfit_pp4_n32_32k", 4, 1, 32, 4096, 2.558, 2.389593),
]


@pytest.mark.parametrize(
    ("case", "effort"),
    # With 8 stages a proof for every number of micro-batches takes minutes.
    [
        (case, effort)
        for case in FROZEN
        for effort in ("quick", "report", "exhaustive")
        if case[1] < 8 or effort[0] != "e"
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_bound_of_frozen_case(case, effort):
    name, pp_size, vp_size, num_lanes, limit, known_s, frozen_s = case
    model = frozen_cost_model(limit, num_lanes=num_lanes, pp_size=pp_size, vp_size=vp_size)
    samples = samples_of(np.load(CASES / "lengths" / f"{name}.seed0.npy"))
    bound = lower_bound(samples, model, effort)
    assert bound.proven_s <= bound.seconds <= known_s
    assert bound.seconds >= (0.95 if effort == "quick" else 0.98) * frozen_s
    assert bound.binds == ("work" if pp_size == 1 else "schedule")
    assert bound.is_proven == (pp_size == 1 or effort == "exhaustive")


def test_one_sample_on_one_lane_is_bounded_by_its_own_time():
    model = tiny_cost_model(Topology(num_lanes=1))
    samples = samples_of([100])
    plan = plan_of_buckets([Bucket(first_lane=0, samples=samples)], topology=model.topology, max_tokens_per_rank=256)
    assert lower_bound(samples, model).seconds == pytest.approx(makespan_ns(plan, model) / 1e9, rel=1e-4)


@pytest.mark.parametrize(("pp_size", "vp_size"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_equal_samples_on_one_lane_come_close_to_the_closed_form(pp_size, vp_size):
    """m equal micro-batches take (m + (p - 1) / V) * (f + b), and so do m samples that need one each."""
    num_microbatches = 12
    model = tiny_cost_model(Topology(num_lanes=1, pp_size=pp_size, vp_size=vp_size), max_tokens_per_rank=200)
    samples = samples_of([200] * num_microbatches)
    cost = model.bucket_cost(Bucket(first_lane=0, samples=samples[:1]))
    closed_s = (num_microbatches + (pp_size - 1) / vp_size) * (cost.forward_s + cost.backward_s)
    bound = lower_bound(samples, model, "report")
    assert bound.num_microbatches >= num_microbatches
    assert bound.seconds == pytest.approx(closed_s, rel=1e-4)
    assert bound.seconds <= closed_s
    assert (bound.binds, bound.is_proven) == ("longest", True)


@pytest.mark.parametrize(("pp_size", "vp_size"), [(4, 1), (4, 2)])
def test_some_lane_must_hold_several_of_many_long_samples(pp_size, vp_size, monkeypatch):
    """Five samples of four lanes each on eight lanes: three of them share lanes, and pass all stages one by one."""
    topology = Topology(num_lanes=8, pp_size=pp_size, vp_size=vp_size)
    model = deep_cost_model(topology, max_tokens_per_rank=512)
    job = {"topology": topology, "model": DEEP_MODEL, "hardware": TINY_HARDWARE, "options": model.options}
    samples = samples_of([2048] * 5 + [40] * 20)
    costs = [model.bucket_cost(Bucket(first_lane=0, cp_size=cp, samples=samples[:1])) for cp in (4, 8)]
    makespan_s = [
        makespan_ns(plan_global_batch(samples, policy=policy, **job).plan, model) / 1e9
        for policy in ("dynamic", "static", "balanced")
    ]
    bound = lower_bound(samples, model)
    assert bound.proven_s <= bound.seconds <= min(makespan_s)
    # On eight lanes they would be five in a row, but shorter.
    together_s = [cost.forward_s + cost.backward_s for cost in costs]
    ramps = (pp_size - 1) / vp_size
    assert bound.longest_s >= 0.98 * min((3 + ramps) * together_s[0], (5 + ramps) * together_s[1])
    monkeypatch.setattr(lower, "giants_s", lambda *_: 0.0)
    assert bound.seconds > 1.1 * lower_bound(samples, model).seconds


def test_a_batch_without_samples_is_refused():
    with pytest.raises(InvalidInputError, match="0 samples, at least 1"):
        lower_bound((), tiny_cost_model(Topology(num_lanes=2)))


def test_a_sample_that_fits_nowhere_is_refused():
    with pytest.raises(InfeasibleSampleError, match=r"2049 tokens, a group of 8 lanes .* holds 2048"):
        lower_bound(samples_of([3, 2049]), tiny_cost_model(Topology(num_lanes=8)))


SEQLENS = st.lists(st.integers(1, 256), min_size=1, max_size=6)
EXCHANGES = st.sampled_from([("p2p",), ("all_gather", "p2p"), ("p2p", "a2a"), CP_COMM_TYPES])


@settings(max_examples=200)
@given(SEQLENS, EXCHANGES, st.sampled_from(["none", "selective", "full"]), st.floats(0, 1), st.integers(1, 8))
def test_a_bucket_costs_no_less_than_the_sum_of_its_samples(seqlens, exchanges, recompute, share, ranks_per_node):
    """The additive prices of a batch hold for every bucket that its samples can form."""
    topology = Topology(num_lanes=4, ranks_per_node=ranks_per_node)
    model = tiny_cost_model(topology, cp_comm_types=exchanges, recompute=recompute)
    ways = ways_of(model.table, model.options.max_tokens_per_rank)
    lengths = np.array(sorted(seqlens, reverse=True), np.float64)
    work = least_work(causal(lengths), ways, 1.0 - share, share)
    checked = 0
    for cp_size in (1, 2, 4):
        inside: list[int] = []
        for seqlen in sorted(seqlens):
            if sum(inside) + seqlen <= 256 * cp_size:
                inside.append(seqlen)
        if not inside:
            continue
        for exchange in exchanges_of(model, 0, cp_size.bit_length() - 1):
            cost = model.cost(cp_size, 0, sum(inside), sum(one * one for one in inside), *exchange)
            paid = (1.0 - share) * (cost.forward_s - ways.floors_s[0]) + share * (cost.backward_s - ways.floors_s[1])
            least = sum(
                min(
                    work.per_token[way] * one + work.per_token2[way] * one * one
                    for way in range(len(ways.cp_sizes))
                    if ways.cp_sizes[way] == cp_size
                )
                for one in inside
            )
            assert least <= cp_size * paid + 1e-12
            checked += 1
    assert checked


@settings(max_examples=100)
@given(
    SEQLENS, EXCHANGES, st.sampled_from(["none", "selective", "full"]), st.sampled_from([1, 2, 4]),
    st.sampled_from([TINY_HARDWARE, HOST_HARDWARE]),
)  # fmt: skip
def test_no_bucket_is_outside_the_range_of_backward_over_forward(seqlens, exchanges, recompute, cp_size, hardware):
    topology = Topology(num_lanes=4)
    model = CostModel(problem_of(topology, hardware=hardware, cp_comm_types=exchanges, recompute=recompute))
    ways = ways_of(model.table, model.options.max_tokens_per_rank)
    least, largest = ratio_range(ways, 256.0, 1.0, 1.0)
    assert 0 < least < largest
    while sum(seqlens) > 256 * cp_size:
        seqlens = seqlens[1:]
    for exchange in exchanges_of(model, 0, cp_size.bit_length() - 1):
        cost = model.cost(cp_size, 0, sum(seqlens), sum(one * one for one in seqlens), *exchange)
        forward, backward = cost.forward_s - ways.floors_s[0], cost.backward_s - ways.floors_s[1]
        assert least * forward * (1 - 1e-9) <= backward
        assert backward <= largest * forward * (1 + 1e-9)
