"""Prices, bytes, FLOPs and memory of linear attention, by hand; and which buckets pass on states."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.plan_in_memory import plan_in_memory
from dynamic_cp.decide.sent import sent_by_bucket
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.learning.observations import Observation, PricedObservations
from dynamic_cp.memory.activations import activation_bytes, tokens_of_states
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.stretches import Stretches, room_for_states, samples_passed_on, states_kept
from dynamic_cp.pricing.allowed import problem_of_prices
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.linear_prices import BACKWARD_OVER_FORWARD, StageLinearAttention, sent_states
from dynamic_cp.pricing.stage import _linear_attention_of
from dynamic_cp.pricing.work import batch_flops
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import (
    IN_NODE,
    Bucket,
    LinearAttention,
    MicroBatch,
    Placement,
    Plan,
    PlanOptions,
    Problem,
    Topology,
    allowed_exchanges,
    parse_mask,
)
from tests.unit import support
from tests.unit.support import CURVED_HARDWARE, HOST_HARDWARE, TINY_MODEL, samples_of

SIZES = LinearAttention(kind="gated_delta_net", num_heads=8, num_groups=4, key_size=16, value_size=32)
MODEL = replace(TINY_MODEL, linear_attention=SIZES, linear_attention_freq=4)
HARDWARE = replace(CURVED_HARDWARE, linear_attention_flops_per_s=1e9, memory_bandwidth_bytes_per_s=1e9)


def problem_of(num_lanes: int = 4, hardware=HARDWARE, model=MODEL, **options: object) -> Problem:
    given = {"max_tokens_per_rank": 600, "cp_comm_types": ("p2p", "a2a"), **options}
    return support.problem_of(Topology(num_lanes=num_lanes), model, hardware, **given)


def stage_of(problem: Problem) -> StageLinearAttention:
    found = _linear_attention_of(problem.model.stages(1)[0], problem)
    assert found is not None
    return found


def test_one_lane_computes_products_in_chunks_convolves_and_copies_what_kernels_take():
    """Forward the convolution and a copy read and write all channels, and a norm the keys; backward the gradients."""
    forward, backward = stage_of(problem_of()).alone()
    core, once = 3 * SIZES.core_flops / 1e9, 3 * 2 / 1e9
    channels, keys = SIZES.convolved_channels, 2 * 4 * 16
    assert forward.linear == (0.0, pytest.approx(core + once * (4 * channels + 2 * keys)), 0.0)
    assert backward.linear.per_token == pytest.approx(BACKWARD_OVER_FORWARD * core + once * (6 * channels + 5 * keys))
    assert forward.per_sample == forward.host_s == 0.0


def test_lanes_that_exchange_heads_send_tokens_there_and_back():
    free = replace(HARDWARE, linear_attention_flops_per_s=1e18, memory_bandwidth_bytes_per_s=1e18)
    forward, backward = stage_of(problem_of(hardware=free)).by_heads(4, IN_NODE)
    sent = 2 * (2 * 4 * 16 + 2 * 256) + 4 * 16  # queries and keys; values and outputs; gates in float32
    per_token = 3 * sent / 4 * 3 / 4 / free.bandwidth_in_node_bytes_per_s
    assert forward.linear.constant == 2 * 3 * free.exchange_latency_s_per_layer
    assert forward.linear.per_token == pytest.approx(per_token, rel=1e-6)
    assert backward.linear.per_token == pytest.approx(per_token, rel=1e-6)


def test_the_lane_with_most_heads_decides_where_they_do_not_divide():
    slow = replace(HARDWARE, linear_attention_flops_per_s=1e3)
    uneven = replace(MODEL, linear_attention=replace(SIZES, num_heads=6, num_groups=6))
    linear = stage_of(problem_of(hardware=slow, model=uneven))
    alone, shared = (one[0].linear.per_token for one in (linear.alone(), linear.by_heads(4, IN_NODE)))
    assert shared == pytest.approx(alone * 2 / 6, rel=1e-3)


def test_states_cost_by_the_sample():
    problem = problem_of()
    linear, cost_model = stage_of(problem), CostModel(problem)
    (short,), (_, long) = samples_of([100]), samples_of([100, 200])

    def seconds(samples) -> float:
        by = {
            way: cost_model.bucket_cost(Bucket(first_lane=0, cp_size=2, samples=samples, state_exchange=way))
            for way in ("heads", "states")
        }
        return by["states"].forward_s - by["heads"].forward_s

    one, other = (way[0] for way in (linear.by_states(2, IN_NODE), linear.by_heads(2, IN_NODE)))
    shift = one.linear.plus(other.linear, -1.0)
    assert seconds((short,)) == pytest.approx(shift.constant + 100 * shift.per_token + one.per_sample)
    assert seconds((short, long)) == pytest.approx(shift.constant + 300 * shift.per_token + 2 * one.per_sample)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_repeats_the_exchange_of_states(recompute):
    problem = problem_of(recompute=recompute)
    shift = CostModel(problem).state_shifts[1, IN_NODE]
    plain = CostModel(problem_of()).state_shifts[1, IN_NODE]
    assert (shift[:, 0] == plain[:, 0]).all()
    assert shift[:, 1] == pytest.approx(plain[:, 1] + (recompute != "none") * plain[:, 0])


def test_ring_steps_and_latency_are_those_of_layers_with_attention():
    problem = problem_of()
    alone = replace(problem, model=replace(TINY_MODEL, num_layers=1))
    assert CostModel(problem).stage.attention.layers == 1
    assert CostModel(problem).stage.attention.latency_s == CostModel(alone).stage.attention.latency_s
    assert CostModel(problem).stage.attention.kv_bytes == CostModel(alone).stage.attention.kv_bytes


def test_a_host_launches_messages_of_linear_attention():
    hardware = replace(HOST_HARDWARE, host_message_s_per_layer=1.0)
    forward, _ = stage_of(problem_of(hardware=hardware)).by_states(2, IN_NODE)
    assert forward.host_s == 3 * 3


def test_a_pattern_costs_what_its_whole_layers_cost():
    halves = replace(MODEL, num_layers=8, linear_attention_freq=0, layer_pattern="G-G-G-*-")
    for cp_size in (1, 2, 4):
        costs = [CostModel(problem_of(model=model)).cost(cp_size, 0, 400, 90_000) for model in (MODEL, halves)]
        assert costs[0] == pytest.approx(costs[1])


def test_flops_of_attention_are_those_of_layers_that_have_it():
    flops = batch_flops(MODEL, 1000, 500_000.0)
    weights = sum(number * layer.linear_weights for number, layer in MODEL.stages(1)[0].layers)
    attention = 4 * 128 * 0.5 * 500_000 + 3 * SIZES.core_flops * 1000
    head = 2 * 128 * 257 * 1000
    assert flops.forward == pytest.approx(2 * weights * 1000 + attention + head)


@pytest.mark.parametrize("way", ["heads", "states"])
def test_bytes_of_a_bucket_are_those_of_its_formula(way):
    problem = problem_of()
    bucket = Bucket(first_lane=0, cp_size=4, samples=tuple(samples_of([400, 5])), state_exchange=way)
    attention = sent_by_bucket(bucket, replace(problem, model=replace(TINY_MODEL, num_layers=1)))
    forward, backward = (sent_by_bucket(bucket, problem).num_bytes - 0).sum(axis=1) - attention.num_bytes.sum(axis=1)
    if way == "heads":
        want = 3 * 408 * SIZES.heads_bytes(4, 2)
        assert (forward, backward) == (pytest.approx(want), pytest.approx(want))
        return
    halo = SIZES.halo_bytes(4, 2) * (1 + 16 / 18)  # where a chunk is a token, the lane itself has two of them
    assert forward == pytest.approx(3 * 4 * (2 * SIZES.states_bytes(4) + halo))
    assert backward == pytest.approx(3 * 4 * (2 * SIZES.states_bytes(4, backward=True) + halo))


def test_states_are_kept_for_each_sample_and_only_where_they_are_not_recomputed():
    topology = Topology(num_lanes=4, tp_size=2)
    (linear,) = (layer for _, layer in MODEL.stages(1)[0].layers if layer.linear_attention)
    options = PlanOptions(max_tokens_per_rank=64, cp_comm_types=("p2p",))
    kept = activation_bytes(MODEL, topology, options, linear)
    assert kept.states_per_layer == 2 * (SIZES.state_bytes + SIZES.summary_bytes) / 2
    again = activation_bytes(MODEL, topology, replace(options, recompute="selective"), linear)
    assert (again.states_per_layer, again.states_working) == (0.0, kept.states_per_layer)
    assert again.per_layer < kept.per_layer
    assert kept.working >= 4 * 4 * SIZES.value_channels / 2, "a gate and a norm that backward computes again in float32"


def test_memory_of_a_plan_has_the_states_of_its_samples():
    problem = problem_of(2)
    buckets = [
        Bucket(first_lane=0, cp_size=2, samples=tuple(samples_of([40] * 5)), state_exchange=way)
        for way in ("heads", "states")
    ]
    peaks = [
        MemoryModel(problem)
        .peak(Plan(topology=problem.topology, max_tokens_per_rank=600, micro_batches=(MicroBatch(buckets=(bucket,)),)))[
            0
        ]
        .exchange_bytes
        for bucket in buckets
    ]
    assert peaks[1] - peaks[0] == 5 * 3 * 2 * (SIZES.state_bytes + SIZES.summary_bytes)


def test_a_bucket_passes_on_states_where_that_is_faster_and_its_states_fit():
    problem = problem_of(hardware=replace(HARDWARE, linear_attention_flops_per_s=1e12), max_tokens_per_rank=20_000)
    batch = samples_of([60_000, 3000, 200])
    planned = {way: plan_problem(replace(problem, options=replace(problem.options, state_exchange=way)), batch)
               for way in ("auto", "heads", "states")}  # fmt: skip
    assert not any(bucket.exchanges_states for bucket in planned["heads"].plan.buckets)
    assert all(bucket.exchanges_states for bucket in planned["states"].plan.buckets if bucket.cp_size > 1)
    auto = planned["auto"]
    assert any(bucket.exchanges_states for bucket in auto.plan.buckets)
    assert auto.predicted_s <= 1.02 * min(one.predicted_s for one in planned.values())
    assert auto.predicted_s < planned["heads"].predicted_s
    assert "buckets pass on states" in auto.reason
    for way, one in planned.items():
        prices = CostModel(replace(problem, options=replace(problem.options, state_exchange=way)))
        assert simulate(one.plan, prices).iteration_s == one.predicted_s
        assert lower_bound(batch, prices).seconds <= one.predicted_s


@pytest.mark.parametrize("way", ["auto", "states"])
def test_no_bucket_passes_on_states_that_do_not_fit_though_a_run_asks_for_them(way):
    hardware = replace(HARDWARE, linear_attention_flops_per_s=1e12)
    problem = problem_of(hardware=hardware, max_tokens_per_rank=15_000, state_exchange=way)
    assert tokens_of_states(problem.model, problem.topology, problem.options) > 0
    planned = plan_problem(problem, samples_of([60_000]))
    assert [(bucket.cp_size, bucket.exchanges_states) for bucket in planned.plan.buckets] == [(4, False)]
    said = "; 0 of 1 shared buckets pass on states, those of 1 do not fit under the token limit"
    assert (said in planned.reason) == (way == "states")


def test_the_reason_of_a_plan_names_its_candidate_and_states_come_before_time():
    problem = problem_of(8, cp_comm_types=("p2p",), max_tokens_per_rank=3000, state_exchange="states")
    problem = replace(problem, hardware=replace(HARDWARE, linear_attention_flops_per_s=1e12))
    found = Counter()
    for seed in range(12):
        lengths = np.random.default_rng(seed).integers(100, 12_000, 14).tolist()
        batch = samples_of(lengths)
        planned = plan_problem(problem, batch)
        number = int(re.search(r"\bm=(\d+)", planned.reason).group(1))
        assert number == planned.plan.num_microbatches, planned.reason
        found["by heads, of" in planned.reason] += 1
    assert found[True]


def test_states_of_a_model_without_linear_attention_are_refused():
    bucket = Bucket(first_lane=0, cp_size=2, samples=tuple(samples_of([40])), state_exchange="states")
    with pytest.raises(UnsupportedFeatureError, match="the model has no linear attention"):
        CostModel(problem_of(model=TINY_MODEL)).bucket_cost(bucket)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_comm_types": ("blocks",), "state_exchange": "heads"}, "state_exchange heads needs equal chunks"),
        ({"pool": "auto"}, "a pool of attention servers"),
        ({"state_exchange": "both"}, "is unknown: use one of auto, heads, states"),
    ],
)
def test_what_does_not_go_with_linear_attention_is_refused_by_name(changes, message):
    with pytest.raises((UnsupportedFeatureError, InvalidInputError), match=message):
        plan_problem(problem_of(**changes), samples_of([40, 900]))


def test_masks_and_heads_that_tp_cannot_divide_are_refused():
    masked = [replace(one, mask=parse_mask("full")) for one in samples_of([40])]
    with pytest.raises(UnsupportedFeatureError, match="a state of linear attention has seen all tokens"):
        plan_problem(problem_of(), masked)
    with pytest.raises(InvalidInputError, match="TP 3 does not divide"):
        plan_problem(support.problem_of(Topology(num_lanes=1, tp_size=3), MODEL, HARDWARE), samples_of([40]))
    assert "blocks" not in allowed_exchanges("auto", MODEL, has_masks=True, state_exchange="heads")


def placed(*homes: tuple[int, int, int, int], num_lanes: int = 2) -> Bucket:
    """Return a bucket with these homes, (sample, first token, the one after the last, lane), and no attention."""
    lengths = {sample: stop for sample, _, stop, _ in homes}
    placement = Placement(np.array(homes, np.int32), np.zeros((0, 4), np.int32))
    samples = tuple(samples_of(lengths.values()))
    return Bucket(
        first_lane=0, cp_size=num_lanes, samples=samples, cp_comm_type="blocks", placement=placement,
        state_exchange="states",
    )  # fmt: skip


def test_homes_pay_for_runs_that_pass_on_states_and_for_what_they_send():
    stage, core = stage_of(problem_of(2)), 3 * SIZES.core_flops / 1e9
    apart = stage.of_homes(placed((0, 0, 40, 0), (0, 40, 100, 0), (1, 0, 300, 1)), 1, with_exchange=True)
    assert not apart.constant_s.any()
    assert apart.per_token_s.tolist() == [one.linear.per_token for one in stage.alone()]
    bucket = placed((0, 0, 100, 0), (0, 100, 300, 1), (1, 0, 500, 1))
    kernels = stage.of_homes(bucket, 1, with_exchange=False).constant_s
    # A chain of two runs is one step: the summary is written, sent and sorted in 9 passes, A copied, b passed on in 11.
    passes = 9 * SIZES.summary_bytes + 2 * (SIZES.summary_bytes - SIZES.state_bytes) + 11 * SIZES.state_bytes
    summary, carried = 3 * SIZES.summary_flops / 1e9, 3 * (SIZES.carrying_flops(2) + passes) / 1e9
    first = 100 * summary + 32 * (summary + core) + carried
    assert kernels[0].tolist() == pytest.approx([first, first + 100 * summary])
    assert kernels[1, 1] - kernels[1, 0] == pytest.approx(100 * BACKWARD_OVER_FORWARD * core)
    sent = sent_states(Stretches.of_placement(bucket), SIZES, 2)
    # Each has half of the heads: a summary there, a state back, of its run and of the other's; and 3 tokens to lane 1.
    states = (SIZES.summary_bytes + SIZES.state_bytes) / 2
    halo = 3 * SIZES.convolved_channels * 2
    assert sent.num_bytes.tolist() == [[states + halo, states], [SIZES.state_bytes, SIZES.state_bytes + halo]]
    seconds = stage.of_homes(bucket, 1, with_exchange=True).constant_s - kernels
    assert seconds[0, 0] - seconds[0, 1] == pytest.approx(3 * halo / HARDWARE.bandwidth_in_node_bytes_per_s)


def test_branches_count_as_runs_that_pass_on_states():
    tree = replace(samples_of([64])[0], mask=parse_mask("tree:16(16(8,8),16)"))
    bucket = Bucket(first_lane=0, cp_size=2, samples=(tree,), state_exchange="states")
    assert samples_passed_on(bucket) == 1 + 4 / 4
    # Chunks of 16 tokens: lane 0 has the first and, as two branches, the last; lane 1 the second and two leaves.
    assert list(states_kept(bucket)) == [2, 3]
    # Each of the five segments is half of a run that is passed on; by heads a lane has half of the heads.
    assert states_kept(replace(bucket, state_exchange="heads")) == [2, 2]
    assert states_kept(Bucket(first_lane=0, samples=(tree, *samples_of([9])))) == [3]
    assert states_kept(Bucket(first_lane=0, samples=tuple(samples_of([9])))) == [0]
    problem = problem_of(2)
    prices = CostModel(problem)
    plain = replace(bucket, samples=tuple(samples_of([64])))
    assert prices.bucket_cost(bucket).forward_s > prices.bucket_cost(plain).forward_s
    planned = plan_problem(problem_of(2, cp_comm_types=("a2a",), max_tokens_per_rank=4096), [tree])
    assert planned.plan.num_tokens == 64


def test_placed_plans_pass_on_states_for_which_memory_has_room():
    """A sample that fills all lanes is placed, too."""
    problem = problem_of(4, cp_comm_types=("blocks",), max_tokens_per_rank=2048)
    batch = samples_of([8192, 900, 64])
    planned = plan_problem(problem, batch)
    spread = [bucket for bucket in planned.plan.buckets if bucket.is_placed]
    assert spread
    assert all(bucket.exchanges_states for bucket in spread)
    prices = CostModel(problem_of_prices(problem))
    assert lower_bound(batch, prices).seconds <= planned.predicted_s
    assert max(max(states_kept(bucket)) for bucket in spread) <= room_for_states(2048) == 6
    memory = MemoryModel(problem)
    (peak,), (most,) = memory.peak(planned.plan), memory.peak_at(2048, 4)
    assert peak.total_bytes <= most.total_bytes
    without = MemoryModel(replace(problem, options=replace(problem.options, cp_comm_types=("p2p",))))
    assert memory.peak_at(2048, 1)[0].exchange_bytes - without.peak_at(2048, 1)[0].exchange_bytes == pytest.approx(
        6 * 3 * (SIZES.state_bytes + SIZES.summary_bytes)
    )


def test_measured_buckets_that_passed_on_states_are_priced_so():
    problem = problem_of()
    prices = CostModel(problem)
    bucket = Bucket(first_lane=0, cp_size=2, samples=tuple(samples_of([100, 60])), state_exchange="states")
    cost = prices.bucket_cost(bucket)
    seen = {"cp_size": 2, "first_lane": 0, "tokens": 160, "tokens_squared": 100**2 + 60**2}
    edges = cost.embedding_forward_s + cost.head_forward_s, cost.embedding_backward_s + cost.head_backward_s
    measured = Observation(
        forward_s=cost.forward_s + edges[0], backward_s=cost.backward_s + edges[1], num_states=2, **seen
    )
    priced = PricedObservations([measured], prices)
    assert priced.predicted_s(prices) == pytest.approx(priced.measured_s)
    assert PricedObservations([replace(measured, num_states=2.5)], prices).predicted_s(prices).min() > 0


def test_limits_leave_room_for_the_states_of_branches():
    problem = problem_of(4, cp_comm_types=("a2a",), max_tokens_per_rank=1)
    answers = replace(samples_of([36])[0], mask=parse_mask("shared_question:4," + ",".join(["4"] * 8)))
    batch = [replace(answers, sample_id=index) for index in range(300)]
    hardware = replace(HARDWARE, hbm_bytes=4e7)
    planned, memory = plan_in_memory(batch, replace(problem, hardware=hardware), limit_from_memory=True)
    (peak,) = memory.peak(planned.plan)
    assert 0.5 * memory.available_bytes < peak.total_bytes <= memory.available_bytes
    most = max(bucket.num_tokens / bucket.cp_size for bucket in planned.plan.buckets)
    assert most < 0.9 * planned.plan.max_tokens_per_rank, "no room was left"
