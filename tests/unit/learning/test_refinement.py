"""Refinement finds planted factors under noise; which iteration is planned with which, also after a resume."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.learning.multipliers import MOST, TERMS, Coefficients, Multipliers
from dynamic_cp.learning.observations import Observation, PricedObservations
from dynamic_cp.learning.refinement import MIN_OBSERVATIONS, MOST_AT_ONCE, RefinedHardware, refine
from dynamic_cp.plans.padding import round_up
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Hardware, PlanOptions, Problem, Topology
from tests.unit.support import CURVED_HARDWARE, TINY_HARDWARE, TINY_MODEL, problem_of, samples_of

TOPOLOGY = Topology(num_lanes=8, ranks_per_node=8)
OPTIONS = PlanOptions(max_tokens_per_rank=4096, bytes_per_element=4, cp_comm_types=("p2p",))
# Like a real machine's: a few layers of overhead weigh as much as a hundred tokens, an exchange as much as attention.
HARDWARE = replace(
    TINY_HARDWARE, source={"linear_flops_per_s": "measured last week"}, bandwidth_in_node_bytes_per_s=4e7,
    forward_overhead_s_per_layer=2e-4, backward_overhead_s_per_layer=4e-4,
)  # fmt: skip
PLANTED = Multipliers(linear=1.4, attention=0.7, exchange=1.5, overhead=0.75, linear_backward=1.2)


def somewhere(rng: random.Random, topology: Topology, cp_size: int, lengths: list[int]) -> Observation:
    """Return a bucket of these lengths that takes a second on lanes, stage and chunk drawn at random."""
    return Observation(
        cp_size=cp_size, first_lane=rng.randrange(topology.num_lanes // cp_size) * cp_size, tokens=sum(lengths),
        tokens_squared=sum(length**2 for length in lengths), forward_s=1.0, backward_s=1.0,
        stage=rng.randrange(topology.pp_size), chunk=rng.randrange(topology.vp_size),
    )  # fmt: skip


def observe(
    truth: Multipliers, *, num: int = 300, noise: float = 0.05, outliers: float = 0.0,
    cp_sizes: tuple[int, ...] = (1, 2, 4, 8), topology: Topology = TOPOLOGY, hardware: Hardware = HARDWARE,
    seed: int = 1,
) -> list[Observation]:  # fmt: skip
    """Return measurements of a machine on which `truth` holds: log-normal noise, outliers 2 to 10 times too long."""
    rng = random.Random(seed)
    problem = Problem(topology=topology, model=TINY_MODEL, hardware=truth.apply(hardware), options=OPTIONS)
    cost_model = CostModel(problem)
    observations = []
    for _ in range(num):
        cp_size = rng.choice(cp_sizes)
        lengths = [
            round_up(int(10 ** rng.uniform(1, 3.6)) * cp_size, 2 * cp_size) for _ in range(rng.choice((1, 1, 2, 8)))
        ]
        one = somewhere(rng, topology, cp_size, lengths)
        ((forward_s, backward_s),) = PricedObservations([one], cost_model).predicted_s(cost_model)
        factors = [math.exp(rng.gauss(0, noise)) for _ in range(2)]
        if rng.random() < outliers:
            factors = [factor * rng.uniform(2, 10) for factor in factors]
        observations.append(replace(one, forward_s=forward_s * factors[0], backward_s=backward_s * factors[1]))
    return observations


def refined(observations: list[Observation], **changes: object) -> RefinedHardware:
    settings = {"model": TINY_MODEL, "topology": TOPOLOGY, "options": OPTIONS, "iterations": (1, 50), **changes}
    return refine(changes.pop("base", HARDWARE), observations, **{k: v for k, v in settings.items() if k != "base"})


@pytest.mark.by_day("1-0.0", "2-0.1")
@pytest.mark.parametrize("outliers", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_planted_factors_are_found(outliers: float, seed: int) -> None:
    result = refined(observe(PLANTED, outliers=outliers, seed=seed))
    for name, found, planted in zip(TERMS, result.multipliers.values, PLANTED.values, strict=True):
        assert found == pytest.approx(planted, rel=0.08), name
    assert result.before.median > 0.15
    assert result.after.median < 0.06
    assert result.after.predicted_over_measured == pytest.approx(1, abs=0.02 if not outliers else 0.6)
    assert result.at_bound == ()
    assert result.reason == ""


@pytest.mark.by_day("1.4-exchange", "0.7-linear_backward")
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("value", [0.7, 1.4])
def test_every_factor_can_be_found_alone(value: float, name: str) -> None:
    truth = Multipliers(**{name: value})
    found = refined(observe(truth, noise=0.02, outliers=0.05)).multipliers
    assert getattr(found, name) == pytest.approx(value, rel=0.08)
    others = [getattr(found, other) for other in TERMS if other != name]
    assert others == pytest.approx([1.0] * len(others), abs=0.08)


def test_factors_that_nothing_shows_stay_exactly() -> None:
    """No group of several lanes: nothing is exchanged. Nothing but one length: the terms cannot be told apart."""
    truth = replace(PLANTED, exchange=2.0)
    found = refined(observe(truth, cp_sizes=(1,))).multipliers
    assert found.exchange == 1
    assert found.linear == pytest.approx(truth.linear, rel=0.1)
    learned = refined(observe(truth, cp_sizes=(1,)), present=replace(PLANTED, exchange=1.3)).multipliers
    assert learned.exchange == 1.3, "what was learned earlier was forgotten"


def test_terms_that_look_alike_share_a_change() -> None:
    """All buckets alike: only the sum is known, and no term runs away to explain it."""
    one = observe(PLANTED, num=1, cp_sizes=(1,))[0]
    rng = random.Random(1)
    cost_model = CostModel(Problem(topology=TOPOLOGY, model=TINY_MODEL, hardware=HARDWARE, options=OPTIONS))
    predicted = PricedObservations([one], cost_model).predicted_s(cost_model)[0]
    same = [
        replace(one, forward_s=1.3 * predicted[0] * noise, backward_s=1.3 * predicted[1] * noise)
        for noise in (math.exp(rng.gauss(0, 0.03)) for _ in range(100))
    ]
    result = refined(same)
    assert result.after.median < 0.04
    assert max(result.multipliers.values) < 1.6
    assert min(result.multipliers.values) > 0.95


def test_bounds_hold_step_by_step() -> None:
    observations = observe(Multipliers(linear=4, attention=4, exchange=4, overhead=4), noise=0.01)
    far = [replace(o, forward_s=3 * o.forward_s, backward_s=3 * o.backward_s) for o in observations]
    present = Multipliers()
    for round_number in range(1, 5):
        result = refined(far, present=present)
        for before, after in zip(present.values, result.multipliers.values, strict=True):
            assert before / MOST_AT_ONCE - 1e-4 <= after <= before * MOST_AT_ONCE + 1e-4
            assert 1 / MOST <= after <= MOST
        if round_number == 1:
            assert "linear" in result.at_bound
            assert "at their bound" in result.describe()
        present = result.multipliers
    assert present.linear == MOST
    assert present.overhead == MOST


def test_nonsense_is_ignored_and_counted() -> None:
    good = observe(PLANTED)
    nan, inf = float("nan"), float("inf")
    bad_times = [(0.0, 1.0), (1.0, 0.0), (nan, 1.0), (1.0, nan), (-1.0, 1.0), (inf, 1.0), (1.0, -inf)]
    bad = [replace(good[0], forward_s=f, backward_s=b) for f, b in bad_times]
    wrong = [{"cp_size": 3}, {"cp_size": 16}, {"cp_size": 2, "first_lane": 1}, {"cp_size": 1, "first_lane": 8}]
    wrong += [{"first_lane": -1}, {"tokens": 0}, {"tokens_squared": 1}, {"stage": 1}, {"chunk": -1}]
    wrong += [{"cp_size": 4, "first_lane": 0, "cp_comm_type": name} for name in ("all_gather", "carrier pigeon")]
    bad += [replace(good[0], **changes) for changes in wrong]
    mixed = refined(bad[:9] + good + bad[9:])
    assert mixed.num_ignored == len(bad)
    assert mixed.multipliers == refined(good).multipliers
    nothing = refined(bad)
    assert nothing.multipliers == Multipliers()
    assert nothing.hardware == HARDWARE
    assert f"{len(bad)} ignored" in nothing.describe()
    assert "no bucket compared" in nothing.describe()


@pytest.mark.parametrize("num", [0, MIN_OBSERVATIONS - 1])
def test_too_few_change_nothing(num: int) -> None:
    result = refined(observe(PLANTED, num=num), present=PLANTED)
    assert result.multipliers == PLANTED
    assert result.hardware == PLANTED.apply(HARDWARE)
    assert "at least 16 are needed" in result.describe()


def test_refined_hardware_is_normal_and_tells_its_source() -> None:
    result = refined(observe(PLANTED), iterations=(51, 100))
    hardware, found = result.hardware, result.multipliers
    assert hardware.name == HARDWARE.name
    assert hardware.linear_flops_per_s == pytest.approx(HARDWARE.linear_flops_per_s / found.linear)
    assert hardware.hbm_bytes == HARDWARE.hbm_bytes
    assert hardware.source["linear_flops_per_s"] == (
        f"measured last week; x {1 / found.linear:.4g}, refined from 300 buckets of iterations 51 to 100"
    )
    assert hardware.attention_full_flops_per_s == 0
    assert "attention_full_flops_per_s" not in hardware.source
    assert hardware.peak_flops_per_s == HARDWARE.peak_flops_per_s
    assert result.describe().startswith("hardware tiny refined from 300 buckets (0 ignored): median error ")
    assert "linear x1." in result.describe()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_factors_scale_the_terms_they_name(recompute: str) -> None:
    """A factor on all terms is a factor on the price."""
    options = replace(OPTIONS, recompute=recompute)
    half = Multipliers(linear=2.0, attention=2.0, exchange=2.0, overhead=2.0)
    base = replace(CURVED_HARDWARE, memory_bandwidth_bytes_per_s=0.0, collective_bandwidth_in_node_bytes_per_s=0.0)
    slow, fast = (
        CostModel(Problem(topology=TOPOLOGY, model=TINY_MODEL, hardware=h, options=options))
        for h in (half.apply(base), base)
    )
    for cp_size in (1, 4):
        slower, faster = slow.cost(cp_size, 0, 4096, 4096**2), fast.cost(cp_size, 0, 4096, 4096**2)
        for name in ("forward_s", "backward_s", "head_forward_s", "head_backward_s"):
            assert getattr(slower, name) == pytest.approx(2 * getattr(faster, name), rel=1e-12)


def test_predictions_are_the_cost_models() -> None:
    rng = random.Random(0)
    topology = Topology(num_lanes=12, pp_size=2, vp_size=2, ranks_per_node=6)
    options = {"cp_comm_types": ("p2p", "all_gather", "a2a"), "recompute": "selective"}
    cost_model = CostModel(problem_of(topology, **options))
    seen = set()
    for _ in range(200):
        cp_size = rng.choice((1, 2, 4, 8))
        exchange = rng.choice(options["cp_comm_types"] if cp_size <= 2 else ("p2p", "all_gather"))
        lengths = [rng.randrange(1, 4000) * 2 * cp_size for _ in range(rng.randrange(1, 5))]
        one = replace(somewhere(rng, topology, cp_size, lengths), cp_comm_type=exchange)
        cost = cost_model.cost(cp_size, one.first_lane, one.tokens, one.tokens_squared, exchange)
        first, last = (one.stage, one.chunk) == (0, 0), (one.stage, one.chunk) == (1, 1)
        expected = [
            cost.forward_s / 2 + first * cost.embedding_forward_s + last * cost.head_forward_s,
            cost.backward_s / 2 + first * cost.embedding_backward_s + last * cost.head_backward_s,
        ]
        (predicted,) = PricedObservations([one], cost_model).predicted_s(cost_model)
        assert predicted.tolist() == pytest.approx(expected, rel=1e-12)
        seen.add((cp_size, exchange, first, last))
    assert len(seen) > 20


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    coefficients = Coefficients(base=TINY_HARDWARE)
    for number in range(1, 50):
        factors = Multipliers(linear=1 + number / 100)
        coefficients = coefficients.changed(20 * number + 3, factors, oldest=20 * number)
        assert len(coefficients.changes) <= 2
        assert coefficients.multipliers(20 * number).linear == (1 + (number - 1) / 100 if number > 1 else 1)


def test_unpriced_head_does_not_pass_for_slow_layers() -> None:
    topology = Topology(num_lanes=8, pp_size=4)
    observations = [
        replace(one, forward_s=one.forward_s * (1.5 if one.stage == 3 else 1.0))
        for one in observe(Multipliers(), topology=topology, noise=0.02)
    ]
    result = refined(observations, topology=topology)
    assert result.multipliers.values == pytest.approx([1.0] * len(TERMS), abs=0.03)
    assert result.before.num_observations == 300 > result.multipliers.num_observations > 200


def test_plans_with_refined_hardware_are_legal_and_avoid_what_became_dear() -> None:
    samples = samples_of([2000, 1500, 900, 700] + [60 + 7 * index for index in range(40)])
    base = replace(HARDWARE, attention_flops_per_s=4e9, bandwidth_in_node_bytes_per_s=4e6)

    def mean_cp(exchange: float) -> float:
        observed = observe(Multipliers(exchange=exchange), hardware=base, noise=0.02)
        hardware = refined(observed, base=base).hardware
        problem = Problem(topology=TOPOLOGY, model=TINY_MODEL, hardware=hardware, options=OPTIONS)
        planned = plan_problem(problem, samples)
        check_plan(planned.plan, samples)
        tokens = sum(bucket.num_tokens for bucket in planned.plan.buckets)
        return sum(bucket.cp_size * bucket.num_tokens for bucket in planned.plan.buckets) / tokens

    assert mean_cp(1.9) < mean_cp(1.0) < mean_cp(0.55)


def test_error_figures_by_hand() -> None:
    cost_model = CostModel(Problem(topology=TOPOLOGY, model=TINY_MODEL, hardware=HARDWARE, options=OPTIONS))
    one = observe(Multipliers(), num=1, noise=0.0)[0]
    slow = [replace(one, forward_s=f * one.forward_s, backward_s=f * one.backward_s) for f in (1.0, 1.25, 2.0)]
    error = PricedObservations(slow, cost_model).error(cost_model)
    assert error.num_observations == 3
    assert error.median == pytest.approx(0.2)
    assert error.p95 == pytest.approx(np.percentile([0, 0.2, 0.5], 95))
    assert error.predicted_over_measured == pytest.approx(3 / 4.25)
    assert "median error 20.0%" in error.describe()
    assert PricedObservations([], cost_model).error(cost_model).describe() == "no bucket compared"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear": 5.0}, "multiplier linear is 5.0"),
        ({"attention": float("nan")}, "multiplier attention is nan"),
        ({"overhead": "1"}, "multiplier overhead is '1'"),
        ({"exchange": 0.0}, "multiplier exchange is 0.0"),
        ({"last_iteration": -1}, "last_iteration of the multipliers is -1"),
        ({"unknown": 1}, "they are of another version"),
    ],
)
def test_bad_multipliers_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Multipliers.from_dict({**Multipliers().to_dict(), **changes})


FIRST, SECOND = Multipliers(linear=1.5), Multipliers(linear=1.25, exchange=2.0)


def test_each_iteration_has_the_latest_change_before_it() -> None:
    coefficients = Coefficients(base=TINY_HARDWARE).changed(23, FIRST).changed(43, SECOND)
    expected = {1: Multipliers(), 22: Multipliers(), 23: FIRST, 42: FIRST, 43: SECOND, 1000: SECOND}
    assert {iteration: coefficients.multipliers(iteration) for iteration in expected} == expected
    assert coefficients.hardware(22) == TINY_HARDWARE
    assert coefficients.hardware(23) == FIRST.apply(TINY_HARDWARE) != TINY_HARDWARE


def test_a_resumed_run_plans_what_was_in_flight_as_before() -> None:
    """Measured up to 40, in use from 43 on (look-ahead 2), saved at 41: 42 is planned with the older factors again."""
    coefficients = Coefficients(base=TINY_HARDWARE).changed(23, FIRST).changed(43, SECOND, oldest=41)
    resumed = Coefficients.from_dict(TINY_HARDWARE, json.loads(json.dumps(coefficients.to_dict())))
    assert resumed == coefficients
    assert [resumed.multipliers(iteration) for iteration in (41, 42, 43)] == [FIRST, FIRST, SECOND]


@pytest.mark.parametrize("first", [0, -1, 22, 23, True, "24"])
def test_changes_go_forward(first: object) -> None:
    with pytest.raises(InvalidInputError, match="coefficients change at iterations"):
        Coefficients(base=TINY_HARDWARE).changed(23, FIRST).changed(first, SECOND)


@pytest.mark.parametrize(
    "data", [{}, [], {"changes": 1}, {"changes": [[1]]}, {"changes": [[1, 2]]}, {"changes": [[1, {"linear": 2.0}]]}]
)
def test_nonsense_is_refused(data: object) -> None:
    with pytest.raises(InvalidInputError, match="saved"):
        Coefficients.from_dict(TINY_HARDWARE, data)
