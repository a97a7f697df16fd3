"""blocks: plans whose micro-batches are placed, chosen when they are faster."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.decide.bounds.lower import lower_bound
from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.errors import (
    IllegalPlanError,
    InfeasibleSampleError,
    InvalidInputError,
    MemoryLimitError,
    UnsupportedFeatureError,
)
from dynamic_cp.mechanisms.blocks import MOST_FETCHED, why_too_much_fetched
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models import catalog
from dynamic_cp.placement.legal import why_misplaced
from dynamic_cp.placement.programme import Programme, buffer_tokens_of
from dynamic_cp.plans.lane_plan import PlanFacts, decode_lane, encode_lanes
from dynamic_cp.plans.padding import lane_tokens, padding_fraction
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.allowed import exchanges_of_policy, options_serving
from dynamic_cp.pricing.cost_model import CostModel, lane_costs
from dynamic_cp.search.planner_process import static_fallback
from dynamic_cp.search.search import check_feasible, plan_global_batch, plan_problem
from dynamic_cp.types import (
    CP_COMM_TYPES,
    FULL,
    Bucket,
    Lambda,
    MicroBatch,
    Placement,
    Plan,
    PlanOptions,
    Problem,
    Sample,
    Topology,
)
from dynamic_cp.types.placement import Lanes
from tests.placements import random_placement, random_samples
from tests.unit.placement.instances import placement_of
from tests.unit.support import CURVED_HARDWARE, TINY_HARDWARE, TINY_MODEL, plan_of_buckets, samples_of

MODEL = replace(TINY_MODEL, num_layers=8)
CHOICES = (("blocks",), (*CP_COMM_TYPES, "blocks"))


def job(num_lanes: int = 4, limit: int = 512, pp_size: int = 1, vp_size: int = 1, tp_size: int = 1, **options) -> dict:
    return {
        "topology": Topology(
            num_lanes=num_lanes, pp_size=pp_size, vp_size=vp_size, tp_size=tp_size, sequence_parallel=tp_size > 1,
            ranks_per_node=options.pop("ranks_per_node", 8),
        ),
        "model": MODEL,
        "hardware": CURVED_HARDWARE,
        "options": PlanOptions(**{"cp_comm_types": ("p2p",), "max_tokens_per_rank": limit, **options}),
    }  # fmt: skip


def placed_plan(samples: Sequence[Sample], placement: Placement | None, num_lanes: int, limit: int = 64) -> Plan:
    """Return a plan with one bucket, on all lanes."""
    bucket = Bucket(first_lane=0, cp_size=num_lanes, cp_comm_type="blocks", samples=tuple(samples), placement=placement)
    return plan_of_buckets([bucket], topology=Topology(num_lanes=num_lanes), max_tokens_per_rank=limit)


def test_the_choice_is_never_slower_than_without_them_and_faster_on_sparse_masks() -> None:
    ratios = []
    for rule in ("causal", "lambda:8,64", "shared_question:4x0.2"):
        mask_of = parse_mask_rule(rule)
        samples = [Sample(sample_id=i, seqlen=n, mask=mask_of(n)) for i, n in enumerate([6000, 2500, 900, 300, 60, 20])]
        with_blocks, without = (
            plan_global_batch(samples, **job(4, 3072, ranks_per_node=1, cp_comm_types=names)).predicted_s
            for names in ((*CP_COMM_TYPES, "blocks"), CP_COMM_TYPES)
        )
        ratios.append(without / with_blocks)
    assert min(ratios) >= 1.0
    assert min(ratios[1:]) >= 1.3


def test_one_lane_needs_no_placement() -> None:
    samples = [Sample(sample_id=i, seqlen=n, mask=Lambda(4, 16)) for i, n in enumerate([300, 120, 40])]
    plan = plan_global_batch(samples, **job(1, cp_comm_types=("blocks",))).plan
    check_plan(plan, samples)
    assert not any(bucket.placement for bucket in plan.buckets)


def test_each_lane_is_told_only_what_it_works_with() -> None:
    rng = np.random.default_rng(3)
    samples = random_samples(rng)
    placement = random_placement(rng, samples, 5, 2)
    plan = placed_plan(samples, placement, 5, 300)
    check_plan(plan, samples)
    planned = replace(plan_global_batch(samples_of([8]), **job()), plan=plan)
    facts = PlanFacts.of(planned)
    for lane, message in enumerate(encode_lanes(plan, facts)):
        one = decode_lane(message)
        programme = Programme.read(one.parts[0])
        assert one.buckets[0].placement is None
        assert [sample.sample_id for sample in one.buckets[0].samples] == placement.samples_of(lane)
        assert programme.num_tokens == placement.home_tokens(5)[lane]


def test_lanes_hold_whole_multiples_and_at_least_one() -> None:
    samples = samples_of([10])
    placement = placement_of([(0, 0, 7, 2), (0, 7, 10, 0)], [(0, 0, 2, 0), (1, 0, 0, 0), (1, 1, 0, 0)])
    plan = placed_plan(samples, placement, 3, 7)
    (bucket,) = plan.buckets
    assert lane_tokens(bucket) == (3, 1, 7)
    assert lane_tokens(bucket, 4) == (4, 4, 8)
    check_plan(plan, samples)
    assert padding_fraction(plan) == pytest.approx(1 / 11)
    with pytest.raises(IllegalPlanError, match="7 padded tokens per rank, the limit is 6"):
        check_plan(replace(plan, max_tokens_per_rank=6))


def test_an_illegal_placement_is_refused_where_plans_are_judged() -> None:
    samples = samples_of([10])
    sound = placement_of([(0, 0, 10, 0)], [(0, 0, 2, 0)])
    for placement, reason in (
        (replace(sound, homes=np.array([(0, 0, 9, 0)], np.int32)), "tokens 0 to 9"),
        (replace(sound, tiles=sound.tiles[:0]), "in 0 tiles"),
        (None, "it has no placement"),
    ):
        with pytest.raises(IllegalPlanError, match=reason):
            check_plan(placed_plan(samples, placement, 3))
    with pytest.raises(InvalidInputError, match="placement of 1 homes, which p2p does not have"):
        Bucket(first_lane=0, cp_size=2, samples=samples, placement=sound)
    with pytest.raises(InvalidInputError, match="cp_size is 1"):
        Bucket(first_lane=0, cp_size=1, cp_comm_type="blocks", samples=samples)


def test_buffers_keep_the_stated_limit_and_memory_knows_it() -> None:
    """One long document: the worst that lanes have to fetch."""
    limit = 300
    given = job(8, limit, ranks_per_node=1, cp_comm_types=("blocks",))
    samples = samples_of([2200, 40, 30])
    plan = plan_global_batch(samples, **given).plan
    buffers = [
        buffer_tokens_of(bucket.placement, bucket.samples, Lanes(bucket.cp_size, 0, 1))
        for bucket in plan.buckets
        if bucket.placement is not None
    ]
    assert buffers
    most = np.max(np.concatenate(buffers), axis=0)
    assert (most > 0).all()
    assert (most <= np.multiply(MOST_FETCHED, limit)).all()
    memory = MemoryModel(Problem(**given))
    ring = MemoryModel(Problem(**given | {"options": replace(given["options"], cp_comm_types=("p2p",))}))
    assert max(stage.exchange_bytes for stage in memory.peak(plan)) > 0
    assert memory.peak_at(limit, 8)[0].exchange_bytes > ring.peak_at(limit, 8)[0].exchange_bytes
    assert max(stage.exchange_bytes for stage in memory.peak(plan)) <= memory.peak_at(limit, 8)[0].exchange_bytes


def test_a_plan_whose_lanes_fetch_too_much_is_refused() -> None:
    """Ten lanes with ten tokens each, of which the last needs all that came before."""
    homes = [(0, 10 * lane, 10 * lane + 10, lane) for lane in range(10)]
    tiles = [(row, column, row, 0) for row in range(10) for column in range(row + 1)]
    plan = placed_plan(samples_of([100]), placement_of(homes, tiles), 10, 12)
    check_plan(plan)
    says = r"lane 9 of its placement fetches 90 tokens' keys at a time, .* 8 times 11"
    with pytest.raises(IllegalPlanError, match=says):
        check_plan(replace(plan, max_tokens_per_rank=11))


def test_heads_are_exchanged_where_that_is_faster_and_allowed() -> None:
    """Long causal samples on two nodes of 8 H100; inner groups have a size that divides 16 lanes."""
    samples = samples_of([140000, 9000])
    given = job(16, 16384, cp_comm_types=("blocks",))
    given |= {
        "model": replace(catalog.load_model("llama-3-8b"), num_layers=1),
        "hardware": catalog.load_hardware("h100"),
    }

    def planned(sizes: tuple[int, ...] | None) -> tuple[set[int], float]:
        options = replace(given["options"], inner_cp_sizes=sizes, search="thorough")
        batch = plan_global_batch(samples, **given | {"options": options})
        check_plan(batch.plan, samples)
        buckets = [bucket for bucket in batch.plan.buckets if bucket.placement is not None]
        for bucket in buckets:
            assert sum(lane_tokens(bucket)) >= bucket.num_tokens
            assert len(set(lane_tokens(bucket))) <= bucket.num_inner_groups
        return {bucket.inner_cp_size for bucket in buckets}, batch.predicted_s

    (any_sizes, any_s), (none, none_s), (two, two_s) = (planned(sizes) for sizes in (None, (), (2,)))
    assert none == {1}
    assert two == {2}
    assert max(any_sizes) > 2
    assert any_s < two_s < none_s


def shared_by(inner: int, first_lane: int = 0, num_lanes: int = 4) -> Plan:
    """Return a plan whose first lanes are by themselves, and the next four one bucket of two or four homes."""
    num_groups = 4 // inner
    homes = [(0, 10 * group, 10 * group + 10, group) for group in range(num_groups)]
    tiles = [(row, column, row, 0) for row in range(num_groups) for column in range(row + 1)]
    (sample,) = samples_of([10 * num_groups])
    bucket = Bucket(
        first_lane=first_lane, cp_size=4, cp_comm_type="blocks", inner_cp_size=inner, samples=(sample,),
        placement=placement_of(homes, tiles),
    )  # fmt: skip
    alone = tuple(Bucket(first_lane=lane) for lane in range(num_lanes) if lane not in bucket.lanes)
    row = sorted((bucket, *alone), key=lambda one: one.first_lane)
    return plan_of_buckets(row, topology=Topology(num_lanes=num_lanes), max_tokens_per_rank=12)


def test_inner_groups_lie_in_one_node_and_where_groups_are_made() -> None:
    check_plan(shared_by(2))
    check_plan(shared_by(2, first_lane=2, num_lanes=6))
    check_plan(shared_by(1, first_lane=1, num_lanes=6))
    with pytest.raises(IllegalPlanError, match="first_lane 1 is not a multiple of inner_cp_size 2"):
        check_plan(shared_by(2, first_lane=1, num_lanes=6))
    with pytest.raises(IllegalPlanError, match="inner_cp_size 2 does not divide the 3 lanes of a node"):
        check_plan(replace(shared_by(2, num_lanes=6), topology=Topology(num_lanes=6, ranks_per_node=3)))


def test_whole_samples_in_inner_groups_cost_as_much_as_a_bucket_of_a2a() -> None:
    """Two samples of 400 and 80 tokens on two lanes each: nothing but heads is exchanged."""
    samples = tuple(samples_of([400, 80]))
    placed = Bucket(
        first_lane=0, cp_size=4, cp_comm_type="blocks", inner_cp_size=2, samples=samples,
        placement=placement_of([(0, 0, 400, 0), (1, 0, 80, 1)], [(0, 0, 0, 0), (1, 1, 1, 0)]),
    )  # fmt: skip
    apart = tuple(
        Bucket(first_lane=2 * index, cp_size=2, cp_comm_type="a2a", samples=(sample,))
        for index, sample in enumerate(samples)
    )
    prices = CostModel(Problem(**job(4, 512, cp_comm_types=CHOICES[1])))
    found = [cost for _, cost in lane_costs(MicroBatch(buckets=(placed,)), prices)]
    expected = [prices.bucket_cost(bucket) for bucket in apart for _ in range(2)]
    for one, other in zip(found, expected, strict=True):
        # Placed squares count the diagonal, a token's pair with itself, as a whole one.
        assert (one.forward_s, one.backward_s) == pytest.approx((other.forward_s, other.backward_s), rel=5e-3)
    assert found[0].forward_s > found[2].forward_s


def test_keys_that_are_repeated_for_an_exchange_of_heads_need_room() -> None:
    (bucket,) = shared_by(2).micro_batches[0].buckets
    buffers = [(0, 0), (0, 10)]  # the second group fetches the first one's keys
    assert why_too_much_fetched(bucket, buffers, 1) is None
    # Its own 10 tokens' keys once more, and 10 fetched ones twice, on two lanes.
    assert why_too_much_fetched(bucket, buffers, 2, copies=2) is None
    reason = why_too_much_fetched(bucket, buffers, 1, copies=2)
    assert reason is not None
    assert "lane 1 of its placement fetches 15 tokens' keys at a time, the limit is 8 times 1" in reason


@pytest.mark.parametrize("how", [{"policy": "balanced", "static_cp_size": 4}, {"max_cp_size": 2}], ids=str)
def test_what_cannot_be_placed_is_never_computed_in_another_way(how: dict) -> None:
    policy = how.pop("policy", "dynamic")
    with pytest.raises(UnsupportedFeatureError, match="cp_comm_types blocks spans all 4 lanes"):
        plan_global_batch(samples_of([200]), policy=policy, **job(4, 100, cp_comm_types=("blocks",), **how))


def test_masks_that_packers_cannot_serve_are_placed() -> None:
    """Heads can be shared out over 2 lanes only, the sample needs 4."""
    sample = Sample(sample_id=0, seqlen=1500, mask=Lambda(8, 64))
    given = job(4, 512, cp_comm_types=("a2a", "blocks")) | {"model": replace(MODEL, num_attention_heads=2)}
    plan = plan_global_batch([sample], **given).plan
    check_plan(plan, [sample])
    assert [bucket.cp_comm_type for bucket in plan.buckets] == ["blocks"]
    with pytest.raises(UnsupportedFeatureError, match="the largest group that cp_comm_types a2a can serve holds"):
        plan_global_batch([sample], **given | {"options": replace(given["options"], cp_comm_types=("a2a",))})


def test_what_cannot_be_placed_is_planned_as_without_placed_attention() -> None:
    """Blocks serve the mask, but not with these sizes; the sample fits one lane, which exchanges nothing."""
    samples = [Sample(sample_id=0, seqlen=90, mask=FULL), Sample(sample_id=1, seqlen=60)]
    plans = [
        plan_global_batch(samples, **job(4, 100, max_cp_size=2, cp_comm_types=names)).plan
        for names in (("p2p", "blocks"), ("p2p",))
    ]
    assert plans[0] == plans[1]


def test_a_mask_that_fits_one_lane_is_placed_only_if_that_is_faster() -> None:
    """The ring cannot serve it; without placed attention it would be on a lane by itself."""
    samples = [Sample(sample_id=0, seqlen=64, mask=FULL)]
    given = job(10, 202, ranks_per_node=3, recompute="full") | {"model": TINY_MODEL, "hardware": TINY_HARDWARE}
    seconds = [
        plan_global_batch(samples, **given | {"options": replace(given["options"], cp_comm_types=names)}).predicted_s
        for names in (("p2p", "blocks"), ("blocks",), ("p2p",))
    ]
    assert max(seconds[:2]) <= seconds[2]


def test_a_run_of_placed_plans_has_a_static_one_to_fall_back_to() -> None:
    given = job(4, 512, cp_comm_types=("blocks",))
    fallback = static_fallback(Problem(**given), 1500)
    for mask, exchange in ((None, "p2p"), (Lambda(8, 64), "a2a")):
        samples = [Sample(sample_id=0, seqlen=1500, mask=mask), Sample(sample_id=1, seqlen=40)]
        plan = plan_problem(fallback, samples).plan
        check_plan(plan, samples)
        assert {bucket.cp_comm_type for bucket in plan.buckets if bucket.cp_size > 1} == {exchange}
        allowed = exchanges_of_policy("static", ("blocks",), MODEL, samples)
        assert allowed == options_serving(samples, MODEL, fallback.options).cp_comm_types, "as comparisons have it"


@pytest.mark.by_day("6-1-names1")
@pytest.mark.parametrize("names", [("blocks",), ("p2p", "blocks"), (*CP_COMM_TYPES, "blocks")])
@pytest.mark.parametrize(("lanes", "pp_size"), [(3, 1), (6, 1), (6, 2)])
def test_a_sample_that_only_all_lanes_hold_is_placed(names: tuple, lanes: int, pp_size: int) -> None:
    """No power of two of lanes does: 2 of 3, and 4 of 6."""
    given = job(lanes, 128, cp_comm_types=names)
    given["topology"] = replace(given["topology"], pp_size=pp_size)
    for longest in (128 * lanes, 128 * given["topology"].max_cp_size + 1, 128 * lanes * 9 // 10):
        samples = samples_of([longest, 100, 90, 17])
        check_feasible(longest, given["topology"], given["options"])
        for plan in (
            plan_global_batch(samples, **given).plan,
            plan_problem(static_fallback(Problem(**given), longest), samples).plan,
        ):
            check_plan(plan, samples)
            (bucket,) = [one for one in plan.buckets if any(sample.seqlen == longest for sample in one.samples)]
            assert (bucket.cp_comm_type, bucket.cp_size) == ("blocks", lanes)
            assert plan.max_tokens_per_rank == 128
    too_long = samples_of([128 * lanes + 1])
    with pytest.raises(InfeasibleSampleError, match=f"the largest allowed group of {lanes} lanes holds {128 * lanes} "):
        plan_global_batch(too_long, **given)
    with pytest.raises(InfeasibleSampleError, match=f"has {128 * lanes} tokens, the largest allowed group of"):
        plan_global_batch(samples_of([128 * lanes]), **given | {"options": replace(given["options"], max_cp_size=1)})


def test_memory_that_holds_a_sample_on_all_lanes_only_has_a_limit() -> None:
    given = job(6, 1, cp_comm_types=("blocks",))
    hardware = replace(CURVED_HARDWARE, hbm_bytes=1e9)
    memory = MemoryModel(Problem(**given | {"hardware": hardware}))
    limit = memory.max_tokens_per_rank()
    assert memory.max_tokens_per_rank(6 * limit) == limit
    with pytest.raises(MemoryLimitError, match=f"needs {limit + 1} tokens per rank at CP size 6, memory holds {limit}"):
        memory.max_tokens_per_rank(6 * limit + 1)


def test_models_with_full_attention_get_full_tiles() -> None:
    for names in CHOICES:
        given = job(4, 512, ranks_per_node=1, cp_comm_types=names)
        samples = samples_of([1500, 300, 20])
        causal = plan_global_batch(samples, **given)
        given["model"] = replace(given["model"], causal_attention=False)
        planned = plan_global_batch(samples, **given)
        check_plan(planned.plan, samples)
        assert lower_bound(samples, CostModel(Problem(**given))).proven_s <= planned.predicted_s * (1 + 1e-9)
        assert planned.predicted_s > causal.predicted_s
        for bucket in planned.plan.buckets if names == ("blocks",) else ():
            assert bucket.placement is not None
            assert why_misplaced(bucket.placement, bucket.samples, bucket.cp_size, FULL) is None
            assert why_misplaced(bucket.placement, bucket.samples, bucket.cp_size) is not None
