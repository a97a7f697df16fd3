"""Models whose layers have windows: priced by the pairs of each layer's mask, planned with what serves them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.sent import sent_by_bucket
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS, serving_windows
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.placement.cuts import narrowed
from dynamic_cp.plans.lane_plan import PlanFacts
from dynamic_cp.plans.serialize import dumps, loads
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.work import batch_flops, length_sums, plan_flops
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import (
    CAUSAL,
    CP_COMM_TYPES,
    FULL,
    Bucket,
    CausalBlockwise,
    Lambda,
    MicroBatch,
    Sample,
    SharedQuestion,
    Topology,
    exchanges_of,
)
from dynamic_cp.types.placement import Lanes
from tests.unit.placement.instances import dense
from tests.unit.support import TINY_MODEL, problem_of

WINDOW = 48
DEEP = replace(TINY_MODEL, num_layers=8)
WINDOWED = replace(DEEP, window_tokens=WINDOW)
EVERY_SECOND = replace(WINDOWED, window_attn_skip_freq=2)


def samples_of(*lengths: int) -> list[Sample]:
    return [Sample(sample_id=index, seqlen=length) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(("skip", "windowed"), [(0, 8), (1, 0), (2, 4), (3, 6), (9, 8), ((1, 1, 0, 0, 0, 0, 0, 1), 3)])
def test_work_is_counted_in_pairs_of_each_layer(skip, windowed):
    model = replace(WINDOWED, window_attn_skip_freq=skip)
    assert model.num_windowed_layers == windowed
    assert (model.window is None) == (windowed == 0)
    for seqlen in (1, WINDOW - 1, WINDOW, WINDOW + 1, 200):
        rows, columns = np.indices((seqlen, seqlen))
        whole = int((columns <= rows).sum())
        in_window = int(((columns <= rows) & (rows - columns < WINDOW)).sum())
        pairs = windowed * in_window + (8 - windowed) * whole
        # The pair of a token with itself counts half, as in all FLOPs of causal attention.
        sample = Sample(sample_id=0, seqlen=seqlen)
        tokens, squares = length_sums([sample], model)
        assert squares == (2 * pairs - 8 * seqlen) / 8
        assert model.density(sample) == squares / seqlen**2
        more = batch_flops(model, tokens, squares).forward - batch_flops(model, tokens, 0).forward
        assert more == 4 * model.query_size * (pairs - 8 * seqlen / 2)
    assert model.density(Sample(sample_id=0, seqlen=WINDOW)) == 1.0


def test_a_sink_is_seen_besides_the_window():
    model = replace(EVERY_SECOND, window_sink_tokens=5)
    assert model.window == Lambda(5, WINDOW)
    assert model.layer_masks == (CAUSAL, Lambda(5, WINDOW))
    assert model.windows_in_words == "4 of the 8 layers have a window of 48 tokens and a sink of 5 tokens"
    for seqlen in (1, WINDOW + 4, WINDOW + 5, WINDOW + 6, 200):
        rows, columns = np.indices((seqlen, seqlen))
        seen = (columns <= rows) & ((rows - columns < WINDOW) | (columns < 5))
        pairs = 4 * int(seen.sum()) + 4 * seqlen * (seqlen + 1) // 2
        sample = Sample(sample_id=0, seqlen=seqlen)
        assert model.squared_tokens(sample) == (2 * pairs - 8 * seqlen) / 8
        assert (model.density(sample) < 1.0) == (seqlen > WINDOW + 5)


def test_windows_of_all_layers_plan_as_samples_with_that_mask():
    lengths = [900, 700, 300, 200, 100, 50, 50, 20] * 2
    masked = [Sample(sample_id=i, seqlen=n, mask=Lambda(0, WINDOW)) for i, n in enumerate(lengths)]
    windowed, deep = (
        problem_of(Topology(num_lanes=4), model, max_tokens_per_rank=512, cp_comm_types=("a2a",))
        for model in (WINDOWED, DEEP)
    )
    of_model, of_samples = plan_problem(windowed, samples_of(*lengths)), plan_problem(deep, masked)
    assert of_model.predicted_s == of_samples.predicted_s
    assert PlanFacts.of(of_model, WINDOWED).seqlen_squared_sum == PlanFacts.of(of_samples).seqlen_squared_sum
    assert plan_flops(WINDOWED, of_model.plan) == plan_flops(DEEP, of_samples.plan)
    bound = lower_bound(masked, CostModel(deep))
    assert lower_bound(samples_of(*lengths), CostModel(windowed)).seconds == bound.seconds


@pytest.mark.by_day("all layers-names1", "every second-names0", "and a sink-names2")
@pytest.mark.parametrize("names", [("a2a",), ("blocks",), ("a2a", "blocks")])
@pytest.mark.parametrize(
    "model",
    [WINDOWED, EVERY_SECOND, replace(WINDOWED, window_sink_tokens=4)],
    ids=["all layers", "every second", "and a sink"],
)
def test_windows_cut_the_masks_that_samples_bring(model, names):
    """Prompts with answers, and others: work is counted pair by pair, plans are legal and above their bound."""
    answers, few = SharedQuestion(150, (300, 200, 250)), SharedQuestion(9, (9,))
    masked = ((900, answers), (700, None), (500, Lambda(3, 200)), (260, CausalBlockwise(16, 4)), (18, few))
    samples = [Sample(sample_id=i, seqlen=seqlen, mask=mask) for i, (seqlen, mask) in enumerate(masked)]
    windowed = model.num_windowed_layers
    for sample in samples:
        own = sample.mask or CAUSAL
        positions = own.positions(sample.seqlen)
        at = np.arange(sample.seqlen) if positions is None else positions
        seen = dense(sample)
        near = seen & ((at[:, None] - at < WINDOW) | (at < model.window_sink_tokens))
        pairs = windowed * int(near.sum()) + (8 - windowed) * int(seen.sum())
        assert model.squared_tokens(sample) * 8 == 2 * pairs - 8 * sample.seqlen
        assert (near < seen).any() == (at.max() >= WINDOW + model.window_sink_tokens)
    problem = problem_of(Topology(num_lanes=4), model, max_tokens_per_rank=512, cp_comm_types=names)
    planned = plan_problem(problem, samples)
    check_plan(planned.plan, samples)
    assert loads(dumps(planned.plan)) == planned.plan
    assert lower_bound(samples, CostModel(problem)).seconds <= planned.predicted_s
    used = {bucket.cp_comm_type for bucket in planned.plan.buckets if bucket.cp_size > 1}
    assert used <= set(names)
    assert used
    flops = plan_flops(model, planned.plan)[0].forward
    squares = sum(model.squared_tokens(sample) for sample in samples)
    assert flops == pytest.approx(batch_flops(model, sum(sample.seqlen for sample in samples), squares).forward)


@pytest.mark.parametrize(("cp_size", "exchange"), [(1, "p2p"), (4, "a2a"), (4, "all_gather")])
def test_a_layer_without_a_window_costs_what_it_did(cp_size, exchange):
    """With every second layer windowed, attention is the mean of that of all layers and of none."""
    bucket = Bucket(first_lane=0, cp_size=cp_size, samples=tuple(samples_of(800, 64, 8)), cp_comm_type=exchange)
    costs = [
        CostModel(problem_of(Topology(num_lanes=4), model, cp_comm_types=CP_COMM_TYPES)).bucket_cost(bucket)
        for model in (DEEP, EVERY_SECOND, WINDOWED)
    ]
    for whole, half, all_windowed in zip(*costs, strict=True):
        assert half == pytest.approx((whole + all_windowed) / 2, rel=1e-12)
    assert costs[0].forward_s > costs[1].forward_s > costs[2].forward_s


@pytest.mark.by_day("40")
@pytest.mark.parametrize("sink", [0, 40])
def test_placed_layers_cost_what_those_of_each_mask_cost(sink):
    """Attention of a placed bucket is that of its layers without a window and of its layers with one, added up."""
    samples = samples_of(2000, 700, 300, 64, 8)
    topology, options = Topology(num_lanes=4, ranks_per_node=2), {"max_tokens_per_rank": 1024}
    model = replace(EVERY_SECOND, window_sink_tokens=sink)
    problem = problem_of(topology, model, cp_comm_types=("blocks",), **options)
    bucket = next(one for one in plan_problem(problem, samples).plan.buckets if one.placement)
    placement, window = bucket.placement, model.window
    assert placement is not None
    assert window is not None
    assert placement.layer_masks == (CAUSAL, window)
    causal = replace(bucket, placement=replace(placement, layer_masks=()))
    windowed = replace(bucket, placement=narrowed(placement, bucket.samples, window, Lanes(4, 0, 2)))
    halves = [
        (bucket, model),
        (causal, replace(DEEP, num_layers=4)),
        (windowed, replace(model, num_layers=4, window_attn_skip_freq=0)),
    ]
    attention = []
    for one, of_model in halves:
        stage = StageAttention(of_model.stages(1)[0], replace(problem, model=of_model), 2)
        seconds = MECHANISMS["blocks"].lane_seconds(stage, one, MicroBatch(buckets=(one,))).attention
        kernels = MECHANISMS["blocks"].kernel_seconds(stage, one)
        assert (seconds >= kernels).all()
        attention.append(np.stack((seconds, kernels)))
    assert attention[0] == pytest.approx(attention[1] + attention[2], rel=1e-12)
    assert attention[1].sum() > 1.5 * attention[2].sum()
    sent = [sent_by_bucket(one, replace(problem, model=of_model)).num_bytes.sum() for one, of_model in halves]
    assert sent[0] == sent[1] + sent[2]
    assert sent[1] > sent[2] > 0


@pytest.mark.by_day("4")
@pytest.mark.parametrize("sink", [0, 4])
def test_blocks_are_chosen_where_they_pay_and_can_be_forced(sink):
    """A long sample among short ones, over two nodes: exchanged heads and gathered keys send more than the window."""
    samples = samples_of(2000, 900, 700, 300, 100, 50, 50, 20)
    topology = Topology(num_lanes=4, ranks_per_node=2)
    model, seconds = replace(EVERY_SECOND, window_sink_tokens=sink), {}
    for names in (exchanges_of("auto", has_windows=True), exchanges_of("auto"), exchanges_of("blocks")):
        planned = plan_problem(problem_of(topology, model, max_tokens_per_rank=1024, cp_comm_types=names), samples)
        seconds[names] = planned.predicted_s
        assert ("blocks" in {bucket.cp_comm_type for bucket in planned.plan.buckets}) == ("blocks" in names)
    auto, without, alone = seconds.values()
    assert auto <= alone
    assert without > 1.2 * auto


def test_what_serves_no_windows_is_told():
    assert serving_windows() == ("all_gather", "a2a", "blocks")
    given = {"max_tokens_per_rank": 64, "cp_comm_types": ("p2p", "a2a+p2p")}
    ring = problem_of(Topology(num_lanes=4), EVERY_SECOND, **given)
    assert set(plan_problem(ring, samples_of(64, 20)).plan.cp_histogram) == {1}
    with pytest.raises(UnsupportedFeatureError) as caught:
        plan_problem(ring, samples_of(65, 20))
    assert str(caught.value) == (
        "4 of the 8 layers have a window of 48 tokens, which p2p a2a+p2p cannot serve on several lanes, and the "
        "longest of its batch has 65 tokens, a lane holds 64: allow all_gather or a2a or blocks (--cp-comm-type), or "
        "raise --max-seqlen-per-dp-cp-rank"
    )
    static = replace(ring, options=replace(ring.options, static_cp_size=2), policy="static")
    with pytest.raises(UnsupportedFeatureError, match="have windows, which only all_gather, a2a and blocks serve"):
        plan_problem(static, samples_of(64, 20))
    masked = [Sample(sample_id=3, seqlen=9, mask=FULL)]
    with pytest.raises(
        UnsupportedFeatureError,
        match=r"sample 3 has the mask full, but 4 of the 8 layers .* window of 48 tokens: its tokens see later ones",
    ):
        plan_problem(ring, masked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window_tokens": -1}, "window_tokens is -1, the smallest allowed value is 0"),
        ({"window_tokens": 0, "window_attn_skip_freq": 2}, "window_attn_skip_freq is 2 and window_tokens 0"),
        ({"window_attn_skip_freq": -1}, "window_attn_skip_freq is -1"),
        ({"window_attn_skip_freq": [1, 0]}, r"\[1, 0\] has 2 entries, the model has 8 layers"),
        ({"window_attn_skip_freq": [2] * 8}, "give 1 .a window. or 0"),
        ({"causal_attention": False}, "window_tokens is 48 and causal_attention false"),
        ({"window_sink_tokens": -1}, "window_sink_tokens is -1, the smallest allowed value is 0"),
        ({"window_sink_tokens": 4, "window_tokens": 0}, "window_sink_tokens is 4 and window_tokens 0: give the window"),
    ],
)
def test_windows_that_contradict_the_model_are_refused(changes, says):
    with pytest.raises(InvalidInputError, match=says):
        replace(WINDOWED, **changes)
