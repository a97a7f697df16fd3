"""Plans for samples with masks of their own: legal, exact, deterministic, above their bound, kept in every form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamic_cp.decide.plan_arrays import plan_lengths
from dynamic_cp.errors import IllegalPlanError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.work import length_sums, plan_flops
from dynamic_cp.search.planner_process import Request, answer
from dynamic_cp.types import CAUSAL, FULL, Bucket, KeyRanges, Lambda, MicroBatch, Plan, Sample, SharedQuestion, Topology
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL, problem_of


def test_masks_of_less_work_make_faster_plans_and_less_flops() -> None:
    lengths = [900, 700, 300, 200, 100, 50, 50, 20] * 3
    job = {"num_lanes": 4, "max_tokens_per_rank": 512, "model": TINY_MODEL, "hardware": CURVED_HARDWARE}
    masks = ("full", None, "shared_question:4x0.2", "lambda:8,64", "causal_blockwise:16,1")
    plans = [plan_lengths(lengths, masks=mask, cp_comm_types="a2a", check_memory=False, **job) for mask in masks]
    seconds = [one.predicted_s for one in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(seconds)
    flops = [plan_flops(TINY_MODEL, one.planned.plan)[0].forward for one in plans]
    assert flops == sorted(flops, reverse=True)


def test_shared_questions_are_less_work_than_their_samples_apart() -> None:
    mask = SharedQuestion(600, (100, 60, 40))
    together = Sample(sample_id=0, seqlen=800, mask=mask)
    apart = [Sample(sample_id=i, seqlen=600 + answer) for i, answer in enumerate(mask.answers)]
    tokens, squared = length_sums([together], TINY_MODEL)
    assert tokens <= 0.4 * length_sums(apart, TINY_MODEL)[0]
    assert squared < 0.5 * length_sums(apart, TINY_MODEL)[1]
    # Every pair of an answer is there once; those inside the prompt once instead of three times.
    pairs = sum(CAUSAL.num_pairs(one.seqlen) for one in apart) - 2 * CAUSAL.num_pairs(600)
    assert mask.num_pairs(800) == pairs


def test_a_plan_says_no_to_masks_that_its_mechanism_cannot_serve() -> None:
    samples = (Sample(sample_id=0, seqlen=40, mask=Lambda(1, 2)),)
    bucket = Bucket(first_lane=0, cp_size=2, samples=samples, cp_comm_type="p2p")
    plan = Plan(topology=Topology(num_lanes=2), max_tokens_per_rank=40, micro_batches=(MicroBatch(buckets=(bucket,)),))
    with pytest.raises(IllegalPlanError, match=r"sample 0 has the mask lambda:1,2, which p2p cannot serve on 2 lanes"):
        check_plan(plan)
    served = replace(plan, micro_batches=(MicroBatch(buckets=(replace(bucket, cp_comm_type="a2a"),)),))
    check_plan(served, samples)
    with pytest.raises(IllegalPlanError, match="has the mask lambda:1,2 here but None was given"):
        check_plan(served, [Sample(sample_id=0, seqlen=40)])


def test_masks_that_nothing_serves_are_refused_before_planning() -> None:
    job = {"num_lanes": 4, "max_tokens_per_rank": 64, "model": TINY_MODEL, "hardware": CURVED_HARDWARE}
    job |= {"check_memory": False, "cp_comm_types": "p2p"}
    says = r"sample 0 has the mask full, which p2p cannot serve .* allow a2a"
    with pytest.raises(UnsupportedFeatureError, match=says):
        plan_lengths([100, 20], masks="full", **job)
    assert set(plan_lengths([64, 20], masks="full", max_cp_size=1, **job).planned.plan.cp_histogram) == {1}
    with pytest.raises(UnsupportedFeatureError, match="attend to all of their sample: give samples no masks"):
        plan_lengths([9], masks="lambda:1,2", **(job | {"model": replace(TINY_MODEL, causal_attention=False)}))
    with pytest.raises(InvalidInputError, match="there are 1 masks for 2 samples"):
        plan_lengths([9, 8], masks=[None], **job)
    for masks, message in (
        ("shared_question:1000000x0.2", "fits no sample: the longest has 9 tokens, 8 of them for 1000000"),
        (["full", "shared_question:4x0.2"], "sample 1: mask 'shared_question:4x0.2' is unknown: use causal, full"),
        ([None, "shared_question:4,3"], "sample 1 cannot have the mask shared_question:4,3: prompt and answers have 7"),
        ([None, 3], "sample 1 has the mask 3, a Mask, its text or None is needed"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            plan_lengths([9, 8], masks=masks, **job)
    with pytest.raises(UnsupportedFeatureError, match=r"holds 256: no other serves masks: raise max_tokens_per_rank"):
        plan_lengths([300], masks="full", **(job | {"num_lanes": 8, "cp_comm_types": "auto"}))
    with pytest.raises(InvalidInputError, match=r"sample 3 cannot .*: prompt and answers have 9 tokens, the sample 8"):
        Sample(sample_id=3, seqlen=8, mask=SharedQuestion(4, (3, 2)))
    with pytest.raises(InvalidInputError, match="key ranges of 5 tokens, the sample has 8"):
        Sample(sample_id=3, seqlen=8, mask=KeyRanges.of(CAUSAL.key_ranges(5)))


def test_a_run_whose_exchange_serves_no_masks_plans_a_lane_for_each_sample_or_is_told_both_numbers() -> None:
    problem = problem_of(Topology(num_lanes=2), max_tokens_per_rank=64)
    samples = [Sample(sample_id=4, seqlen=64), Sample(sample_id=7, seqlen=60, mask=FULL)]
    found = answer(problem, Request.of("a", samples))
    assert found.facts is not None
    assert found.facts.cp_histogram == {1: 2}
    error = answer(problem, Request.of("a", [Sample(sample_id=4, seqlen=65), samples[1]])).error
    assert isinstance(error, UnsupportedFeatureError)
    assert str(error) == (
        "sample 7 has the mask full, which p2p cannot serve on several lanes, and the longest of its batch has 65 "
        "tokens, a lane holds 64: allow a2a or blocks (--cp-comm-type), or raise --max-seqlen-per-dp-cp-rank"
    )
    several = replace(problem, options=replace(problem.options, min_cp_size=2))
    said = str(answer(several, Request.of("a", samples)).error)
    assert "and plans use at least 2: allow a2a or blocks (--cp-comm-type), or lower --min-dynamic-cp-size to 1" in said
    # A sample that brings no mask keeps its exchange.
    assert answer(problem, Request.of("a", [Sample(sample_id=4, seqlen=65)])).facts.cp_histogram == {2: 1}
