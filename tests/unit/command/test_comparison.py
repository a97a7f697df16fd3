"""Comparisons: parts add up, bounds hold, speed-ups are what they say, verdicts follow the numbers."""

from __future__ import annotations

import json
import math
import random
import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamic_cp.decide import cli, comparison
from dynamic_cp.decide.comparison import PART_LABELS, compare_policies, speedup_of, time_parts, to_dict, verdict_of
from dynamic_cp.decide.comparison.parts import prices_by_part
from dynamic_cp.decide.comparison.values import Speedup, t_quantile
from dynamic_cp.decide.comparison.verdict import MIN_GAIN, judged
from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.decide.sent import sent_by_plan
from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.search.search import POLICIES, plan_problem
from dynamic_cp.types import Experts, PlanOptions, Problem, Topology, with_exchanges
from tests.unit.support import CURVED_HARDWARE, TINY_HARDWARE, TINY_MODEL, problem_of, samples_of

TOPOLOGIES = [
    Topology(num_lanes=8, ranks_per_node=4),
    Topology(num_lanes=6, tp_size=2, sequence_parallel=True),
    Topology(num_lanes=4, pp_size=2, ranks_per_node=2),
    Topology(num_lanes=4, pp_size=2, vp_size=2, tp_size=2, sequence_parallel=True),
    Topology(num_lanes=1),
]
OPTIONS = PlanOptions(max_tokens_per_rank=1500, bytes_per_element=4, cp_comm_types=("p2p",))
PARTS = ("exchange_s", "compute_s")
FREE_LINKS = replace(
    CURVED_HARDWARE, bandwidth_in_node_bytes_per_s=1e15, bandwidth_across_nodes_bytes_per_s=1e15,
    exchange_latency_s_per_layer=0.0, ring_step_overhead_s_per_layer=0.0,
)  # fmt: skip


def batches(count=3, size=24, longest=1200, seed=0):
    generator = random.Random(seed)
    return [
        samples_of(max(1, min(longest, int(generator.lognormvariate(4.5, 1.3)))) for _ in range(size))
        for _ in range(count)
    ]


def compared(topology=TOPOLOGIES[0], given=None, options=OPTIONS, **more):
    arguments = {"model": TINY_MODEL, "hardware": CURVED_HARDWARE, "topology": topology, "options": options, **more}
    return compare_policies(given or batches(), **arguments)


def outcomes_of(comparison):
    """Return the outcomes of all policies, whose parts add up to the iteration and are no plan's below its bound."""
    outcomes = [outcome for policy in comparison.policies for outcome in policy.batches]
    assert len(outcomes) == len(comparison.policies) * len(comparison.batches) > 0
    for outcome in outcomes:
        parts = dict(outcome.parts)
        assert set(parts) == set(PART_LABELS)
        assert math.fsum(parts.values()) == pytest.approx(outcome.iteration_s, rel=1e-12)
        assert min(parts.values()) >= -1e-9, parts
        assert outcome.makespan_s >= outcome.lower_bound_s * (1 - 1e-9)
    return outcomes


def test_quantiles_of_t_go_on_behind_their_table() -> None:
    for degrees, value in ((10, 2.2281), (31, 2.0395), (1000, 1.9623)):
        assert t_quantile(degrees) == pytest.approx(value, abs=2e-4)


@pytest.mark.by_day("none-topology0", "none-topology3")
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=[f"topology{number}" for number in range(len(TOPOLOGIES))])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_add_up_and_none_is_negative(topology, recompute):
    options = replace(OPTIONS, recompute=recompute, cp_comm_types=("p2p", "all_gather"))
    comparison = compared(topology, options=options, policies=POLICIES)
    for outcome in outcomes_of(comparison):
        parts, split = outcome.parts, outcome.timeline.split
        assert outcome.iteration_s == outcome.timeline.iteration_s == outcome.planned.predicted_s
        assert parts.busy_s + parts.bubble_s + parts.gradient_reduction_s == pytest.approx(outcome.iteration_s)
        assert parts.bubble_s / outcome.makespan_s == pytest.approx(split.bubble_fraction, abs=1e-9)
        check_plan(outcome.planned.plan)
    for policy in comparison.policies:
        assert math.fsum(dict(policy.parts).values()) == pytest.approx(policy.iteration_s, rel=1e-12)


@pytest.mark.parametrize(
    "topology", [Topology(num_lanes=4, ep_size=4), Topology(num_lanes=4, tp_size=2, pp_size=2, ep_size=2)], ids=str
)
def test_parts_of_experts_add_up(topology):
    """Alone in its lane EP sends among TP ranks and nobody waits; over lanes it does where they differ."""
    topology = replace(topology, sequence_parallel=topology.tp_size > 1)
    shape = replace(TINY_MODEL, experts=Experts(num_experts=8, topk=2, ffn_hidden_size=96))
    comparison = compared(topology, model=shape, policies=POLICIES)
    outcomes = outcomes_of(comparison)
    waits_s = [outcome.parts.expert_wait_s for outcome in outcomes]
    assert (max(waits_s) > 1e-6) == (topology.expert_lanes > 1)  # level rows hardly wait
    assert all(outcome.parts.expert_exchange_s > 0 for outcome in outcomes)
    dense = compared(Topology(num_lanes=4))
    assert all(one.parts.expert_exchange_s == one.parts.expert_wait_s == 0 for one in dense.policies)


def parts_of(topology, hardware, seqlens, cp_size, **options):
    given = {"max_tokens_per_rank": 4000, "bytes_per_element": 4, **options}
    problem = problem_of(topology, hardware=hardware, policy="static", static_cp_size=cp_size, **given)
    prices = prices_by_part(problem)
    return time_parts(simulate(plan_problem(problem, samples_of(seqlens)).plan, prices.all), prices)


def test_each_part_has_its_cause():
    lanes = Topology(num_lanes=4, ranks_per_node=2)
    alone = parts_of(lanes, TINY_HARDWARE, [400] * 4, 1)
    wide = parts_of(lanes, TINY_HARDWARE, [400] * 4, 4)
    assert alone.exchange_s == alone.padding_s == alone.tensor_parallel_s == alone.pipeline_bubble_s == 0
    assert wide.exchange_s > 0
    fast = replace(TINY_HARDWARE, bandwidth_across_nodes_bytes_per_s=1e15, exchange_latency_s_per_layer=0.0)
    assert parts_of(lanes, fast, [400] * 4, 4).exchange_s == pytest.approx(0, abs=1e-12)
    assert parts_of(lanes, TINY_HARDWARE, [401] * 4, 4).padding_s > 0  # 401 tokens become 408
    assert parts_of(lanes, TINY_HARDWARE, [400], 1).padding_s > 0  # three places without samples
    tensor = Topology(num_lanes=2, tp_size=2, sequence_parallel=True)
    assert parts_of(tensor, CURVED_HARDWARE, [400] * 2, 1).tensor_parallel_s > 0
    uneven = parts_of(lanes, TINY_HARDWARE, [3000, 1000, 1000, 1000], 1)
    assert uneven.dp_wait_s > 0.2 * uneven.iteration_s
    stages = Topology(num_lanes=2, pp_size=2)
    assert parts_of(stages, TINY_HARDWARE, [400] * 4, 1).pipeline_bubble_s > 0


PLACED_OPTIONS = replace(OPTIONS, cp_comm_types=("blocks",))


@pytest.mark.by_day("topology0")
@pytest.mark.parametrize("topology", TOPOLOGIES[:3], ids=["topology0", "topology1", "topology2"])
def test_parts_of_placed_attention_add_up_and_none_is_negative(topology):
    mask_of = parse_mask_rule("shared_question:4x0.2")
    given = [[replace(one, mask=mask_of(one.seqlen)) for one in batch] for batch in batches(2, size=12)]
    comparison = compared(topology, given, PLACED_OPTIONS, policies=("dynamic", "balanced", "megatron-dev"))
    dynamic, *others = comparison.policies
    assert all(bucket.placement for outcome in dynamic.batches for bucket in outcome.planned.plan.buckets)
    problem = Problem(topology=topology, model=TINY_MODEL, hardware=CURVED_HARDWARE, options=PLACED_OPTIONS)
    for outcome in outcomes_of(comparison):
        sent = outcome.sent_in_node_bytes, outcome.sent_across_nodes_bytes
        assert sent == sent_by_plan(outcome.planned.plan, problem)
        assert sum(sent) == outcome.sent_bytes > 0
    (as_json, *_), (outcome, *_) = to_dict(comparison)["policies"]["dynamic"]["batches"], dynamic.batches
    assert as_json["sent_in_node_bytes"] == outcome.sent_in_node_bytes
    for other in others:
        buckets = [bucket for outcome in other.batches for bucket in outcome.planned.plan.buckets]
        assert {bucket.cp_comm_type for bucket in buckets if bucket.cp_size > 1} == {"a2a"}
    exchange_s, compute_s = (sum(getattr(one.parts, name) for one in dynamic.batches) for name in PARTS)
    assert exchange_s > 0
    # The same work by other placements: only waiting for what others compute is left of the exchange.
    # Where lanes exchange heads for nothing, hardly that: works are even to a part of a tile.
    uneven = replace(PLACED_OPTIONS, inner_cp_sizes=())
    (unhindered,) = compared(topology, given, uneven, policies=("dynamic",), hardware=FREE_LINKS).policies
    waiting_s = sum(one.parts.exchange_s for one in unhindered.batches)
    assert 0.01 * exchange_s < waiting_s < 0.5 * exchange_s
    assert sum(one.parts.compute_s for one in unhindered.batches) == pytest.approx(compute_s, rel=0.1)


def test_launches_are_what_an_empty_bucket_costs():
    lanes = Topology(num_lanes=1)
    parts = parts_of(lanes, TINY_HARDWARE, [4000, 4000], 1)
    assert parts.launch_s == pytest.approx(2 * parts_of(lanes, TINY_HARDWARE, [4000], 1).launch_s)
    free = replace(
        TINY_HARDWARE, forward_overhead_s_per_layer=0.0, backward_overhead_s_per_layer=0.0,
        overhead_s_per_bucket_stage=0.0, linear_extra_tokens=0,
    )  # fmt: skip
    assert parts_of(lanes, free, [4000, 4000], 1).launch_s == 0


def test_a_static_policy_has_the_fastest_cp_size_of_all_batches():
    given = batches(4)
    chosen = compared(given=given, policies=("balanced",)).policy("balanced")
    times = {}
    for cp_size in (1, 2, 4, 8):
        alone = compared(given=given, policies=("balanced",), options=replace(OPTIONS, static_cp_size=cp_size))
        times[cp_size] = alone.policy("balanced").iteration_s
    assert len(set(times.values())) > 1
    assert chosen.iteration_s == min(times.values())
    assert times[chosen.static_cp_size] == chosen.iteration_s
    assert all(set(one.planned.plan.cp_histogram) == {chosen.static_cp_size} for one in chosen.batches)


def test_the_limit_follows_from_memory_for_each_policy():
    hardware = replace(CURVED_HARDWARE, hbm_bytes=3e7, communicator_bytes_per_group=1e6)
    comparison = compared(hardware=hardware, limit_from_memory=True)
    limits = {one.policy: one.max_tokens_per_rank for one in comparison.policies}
    assert limits["dynamic"] == comparison.problem.options.max_tokens_per_rank > 200
    # One CP size is one communicator of CP groups; of several each has its own.
    assert limits["balanced"] > limits["dynamic"]
    assert limits["balanced"] != limits["megatron-dev"]
    for one in comparison.policies:
        assert one.fits_memory
        assert one.peak_bytes <= one.available_bytes
    tight = compared(hardware=hardware, options=replace(OPTIONS, max_tokens_per_rank=40000), given=[samples_of([9000])])
    assert not tight.policy("dynamic").fits_memory
    verdict = verdict_of(tight)
    ours = tight.policy("dynamic")
    needed = f"{ours.peak_bytes / 1e9:.1f} of {ours.available_bytes / 1e9:.1f} GB at limit 40000"
    assert (verdict.pays, verdict.headline) == ("no", f"the dynamic plan does not fit: {needed}")
    assert not tight.policy(verdict.baseline).fits_memory
    assert verdict.reason.startswith("No static policy fits either: ")
    assert to_dict(tight)["verdict"]["pays"] == "no"
    assert "gain" not in verdict.text
    with pytest.raises(MemoryLimitError):
        compared(hardware=replace(hardware, hbm_bytes=1e6), limit_from_memory=True)


def test_a_verdict_where_only_the_dynamic_plan_fits():
    comparison = compared(policies=("dynamic", "balanced"))
    policies = tuple(
        replace(
            one,
            available_bytes=2e9,
            batches=tuple(replace(b, peak_bytes=3e9 if one.policy == "balanced" else 1e9) for b in one.batches),
        )
        for one in comparison.policies
    )
    verdict = verdict_of(replace(comparison, policies=policies))
    assert verdict.pays == "yes"
    assert verdict.headline.startswith("only dynamic CP fits in memory: no static policy does (balanced CP ")
    assert "3.0 of 2.0 GB at limit 1500" in verdict.headline


def test_reserved_memory_is_no_reason_to_lose():
    """Communicators of large groups cost memory; dynamic CP may do without those that no sample needs."""
    hardware = replace(CURVED_HARDWARE, hbm_bytes=3e7, communicator_bytes_per_group=3e6)
    given = [samples_of([100] * 64)] * 2
    comparison = compared(hardware=hardware, limit_from_memory=True, given=given, policies=("dynamic", "balanced"))
    ours, theirs = comparison.policy("dynamic"), comparison.policy("balanced")
    assert ours.setting.max_cp_size is not None
    assert ours.setting.max_cp_size < 8
    assert ours.fits_memory
    assert ours.iteration_s <= theirs.iteration_s * (1 + 1e-9)
    problem = Problem(topology=TOPOLOGIES[0], model=TINY_MODEL, hardware=hardware, options=OPTIONS)
    assert ours.max_tokens_per_rank > MemoryModel(problem).max_tokens_per_rank(100)
    assert to_dict(comparison)["policies"]["dynamic"]["max_cp_size"] == comparison.problem.options.max_cp_size


def test_no_better_plan_is_claimed_only_where_dynamic_cp_is_none_the_worse():
    comparison = compared(given=[samples_of([300] * 32)] * 2)
    reason = verdict_of(comparison).reason
    assert "With 1500 tokens per rank no plan can be noticeably better" in reason
    slower = replace(
        comparison.policy("dynamic"),
        batches=tuple(replace(one, iteration_s=1.01 * one.iteration_s) for one in comparison.policy("dynamic").batches),
    )
    worse = replace(
        comparison, policies=tuple(slower if one.policy == "dynamic" else one for one in comparison.policies)
    )
    assert verdict_of(worse).pays == "no"
    assert "noticeably better" not in verdict_of(worse).reason


def test_progress_counts_to_the_end():
    calls = []
    compared(progress=lambda *call: calls.append(call))
    done = [done for done, _, _ in calls]
    assert done == sorted(done)
    assert set(done) == set(range(4 * 3 + 1))
    assert calls[0] == (0, 12, "dynamic")
    assert calls[-1] == (12, 12, "done")


def test_what_cannot_be_compared():
    with pytest.raises(InvalidInputError, match="0 global batches"):
        compare_policies([], topology=TOPOLOGIES[0], model=TINY_MODEL, hardware=TINY_HARDWARE, options=OPTIONS)
    with pytest.raises(InvalidInputError, match="did you mean 'balanced'"):
        compared(policies=("ballanced",))


def test_a_speedup_has_its_estimate_inside_and_narrows():
    generator = random.Random(3)
    ours = [generator.uniform(1, 2) for _ in range(64)]
    theirs = [one * generator.uniform(1.1, 1.5) for one in ours]
    widths = []
    for count in (2, 4, 16, 64):
        one = speedup_of("dynamic", ours[:count], "static", theirs[:count])
        assert one.low < one.ratio < one.high
        assert one.ratio == pytest.approx(sum(theirs[:count]) / sum(ours[:count]))
        widths.append(one.high - one.low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[0] / 8
    alone = speedup_of("dynamic", ours[:1], "static", theirs[:1])
    assert (alone.low, alone.high) == (None, None)
    same = speedup_of("dynamic", ours, "static", ours)
    assert (same.low, same.ratio, same.high) == (1, 1, 1)
    # Which of the two is slower only turns the ratio around.
    back = speedup_of("static", theirs, "dynamic", ours)
    there = speedup_of("dynamic", ours, "static", theirs)
    assert (back.low, back.high) == (pytest.approx(1 / there.high), pytest.approx(1 / there.low))


@pytest.mark.parametrize(
    ("num_batches", "spread", "least"), [(4, 0.1, 0.93), (4, 0.2, 0.93), (8, 0.2, 0.92), (8, 0.5, 0.86), (32, 0.5, 0.9)]
)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(num_batches, spread, least):
    """Batches differ in length, and the gain with it: the truth is the ratio of the expected seconds."""
    generator = random.Random(5)
    num_inside, truth = 0, 1.2 * math.exp(0.5 * (0.1**2 + 2 * 0.1 * spread))  # the gain grows with the length
    for _ in range(3000):
        sizes = [generator.gauss(0, 1) for _ in range(num_batches)]
        ours = [math.exp(spread * size) for size in sizes]
        theirs = [1.2 * math.exp((spread + 0.1) * size) for size in sizes]
        one = speedup_of("a", ours, "b", theirs)
        num_inside += one.low <= truth <= one.high
    assert least < num_inside / 3000 < 0.965


def test_all_figures_of_a_row_agree():
    """A long batch counts for what it takes: rates and gains are those of all batches together."""
    comparison = compared(given=[samples_of([1200] * 60), *batches(3)], policies=("dynamic", "balanced"))
    ours, theirs = comparison.policy("dynamic"), comparison.policy("balanced")
    (speedup,) = comparison.speedups
    assert max(speedup.per_batch) > 1.05 * min(speedup.per_batch)
    assert speedup.ratio == pytest.approx(theirs.iteration_s / ours.iteration_s)
    for name in ("tokens_per_s_per_gpu", "tflops_per_gpu"):
        assert ours.mean(name) / theirs.mean(name) == pytest.approx(speedup.ratio)
    num_tokens = sum(one.num_tokens for one in ours.batches)
    seconds = sum(one.iteration_s for one in ours.batches)
    assert ours.mean("tokens_per_s_per_gpu") == pytest.approx(
        num_tokens / seconds / comparison.problem.topology.world_size
    )
    bound_s = sum(one.lower_bound_s for one in ours.batches)
    assert ours.mean("time_over_bound") == pytest.approx(sum(one.makespan_s for one in ours.batches) / bound_s)
    mean = to_dict(comparison)["policies"]["dynamic"]["mean"]
    assert mean["busy_fraction"] == pytest.approx(ours.parts.busy_s / ours.iteration_s)
    assert mean["tokens_per_s_per_gpu"] == ours.mean("tokens_per_s_per_gpu")


def test_a_verdict_where_it_pays():
    comparison = compared(given=batches(6, 96), options=replace(OPTIONS, max_tokens_per_rank=300))
    verdict = verdict_of(comparison)
    speedup = next(one for one in comparison.speedups if one.baseline == verdict.baseline)
    assert verdict.pays == "yes"
    assert speedup.low >= MIN_GAIN
    assert f"{speedup.ratio:.2f}x (95% {speedup.low:.2f}..{speedup.high:.2f})" in verdict.headline
    # The first part it names is the largest that was saved.
    theirs, ours = comparison.policy(verdict.baseline).parts, comparison.policy("dynamic").parts
    saved = {name: seconds - dict(ours)[name] for name, seconds in theirs}
    assert dict(verdict.saved_s) == pytest.approx(saved)
    largest = max(saved, key=saved.get)
    named = {name: verdict.reason.find(label) for name, label in PART_LABELS.items() if label in verdict.reason}
    assert min(named, key=named.get) == largest
    assert sum(saved.values()) == pytest.approx(
        comparison.policy(verdict.baseline).iteration_s - comparison.policy("dynamic").iteration_s
    )


def test_the_reason_follows_the_cause():
    """Without a price of the exchange, the exchange is no reason; with a slow network it is the first."""
    given = [samples_of([900, *[60] * 40]) for _ in range(2)]
    slow = replace(CURVED_HARDWARE, bandwidth_in_node_bytes_per_s=2e7, bandwidth_across_nodes_bytes_per_s=4e6)
    reason = verdict_of(compared(given=given, hardware=slow, options=replace(OPTIONS, max_tokens_per_rank=300))).reason
    assert "CP exchange" in reason.partition(" -> ")[0]
    options = replace(OPTIONS, max_tokens_per_rank=300)
    reason = verdict_of(compared(given=given, hardware=FREE_LINKS, options=options)).reason
    assert "CP exchange" not in reason.partition(" -> ")[0]


def test_a_verdict_where_it_does_not_pay():
    verdict = verdict_of(compared(given=[samples_of([300] * 32)] * 2))
    assert verdict.pays == "no"
    assert "does not pay here" in verdict.headline
    assert verdict.reason.startswith("All samples have 300 tokens")
    assert "no part of it changes. " in verdict.reason
    assert re.search(r"Dynamic CP runs its tokens at CP (\d) \(100%\), balanced all at CP \1\.", verdict.reason)


def test_no_verdict_without_a_comparison():
    assert verdict_of(compared(policies=("dynamic",))) is None
    assert verdict_of(compared(policies=("static", "balanced"))) is None


@pytest.mark.parametrize(
    ("factors", "pays"),
    [
        ((1.01, None, None), "no"),
        ((1.034, None, None), "no"),  # 1.03x is what is shown
        ((1.036, None, None), "unclear"),  # one batch
        ((1.5, None, None), "unclear"), ((1.02, 1.01, 1.03), "no"), ((1.034, 1.02, 1.05), "no"),
        ((1.10, 1.034, 1.2), "unclear"), ((1.02, 0.95, 1.10), "unclear"), ((1.10, 1.04, 1.2), "yes"),
        ((0.98, 0.97, 0.99), "no"),
    ],
)  # fmt: skip
def test_a_gain_of_up_to_three_percent_is_too_small_to_recommend(factors, pays):
    ratio, low, high = factors
    assert (
        judged(Speedup(policy="dynamic", baseline="static", ratio=ratio, low=low, high=high, per_batch=(ratio,)))
        == pays
    )


class Asked(Exception):
    """What `compare_policies` was called with."""


def asked_by(monkeypatch, run):
    """Return what is compared, in the place of comparing it."""

    def compare(given, **arguments):
        raise Asked({"batches": [[sample.seqlen for sample in batch] for batch in given], **arguments}, given)

    monkeypatch.setattr(comparison, "compare_policies", compare)
    with pytest.raises(Asked) as caught:
        run()
    asked, given = caught.value.args
    samples = [sample for batch in given for sample in batch]
    return {**asked, "options": with_exchanges(asked["options"], asked["model"], samples)}


GITHUB = "--lengths github --global-batch-size 128"
VIDEO = "--lengths video_dit --global-batch-size 64"


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("does_it_pay", f"{GITHUB} --batches 4 --max-seqlen 65536 --lanes 8 --tp 2 --pp 2"),
        ("slower_network", f"{GITHUB} --batches 2 --lanes 32"),
        ("video_planning", f"{VIDEO} --batches 4 --lanes 16 --tp 4 --model wan2.1-t2v-14b"),
        ("my_jsonl", f"{GITHUB} --lanes 16 --model qwen3-8b"),
    ],
)
def test_an_example_asks_what_the_command_asks(example, words, monkeypatch):
    """So that both give one gain: a comparison is a function of these."""
    path = Path(__file__).parents[3] / "examples" / f"{example}.py"
    monkeypatch.setattr("sys.argv", [str(path)])
    ours = asked_by(monkeypatch, lambda: runpy.run_path(str(path), run_name="__main__"))
    theirs = asked_by(monkeypatch, lambda: cli.main(["simulate", *words.split(), "--recompute", "full"]))
    compared = {"topology", "model", "hardware", "options", "limit_from_memory", "data_parallel"}
    compared |= set() if example == "my_jsonl" else {"batches"}  # its own documents
    for name in compared:
        assert ours.get(name, theirs[name] if name == "data_parallel" else None) == theirs[name], name
    assert set(ours["policies"]) <= set(theirs["policies"])


def test_plan_and_simulate_give_one_job_the_same_seconds_at_the_edge_of_memory(tmp_path, capsys):
    """Both leave out CP sizes whose communicators take memory from tokens, and say which."""
    lengths = [25000, *np.random.default_rng(0).integers(200, 6000, 63)]
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    found = {}
    for command, more in (("plan", []), ("simulate", ["--policy", "dynamic"])):
        words = [command, "--lengths", str(tmp_path / "lengths.txt"), "--lanes", "32", *more]
        assert cli.main([*words, "--json", "-"]) == 0
        found[command] = json.loads(capsys.readouterr().out)
    ours, names = found["simulate"]["policies"]["dynamic"], ("max_tokens_per_rank", "max_cp_size")
    assert [found["plan"][name] for name in names] == [ours[name] for name in names]
    assert found["plan"]["predicted_s"] == pytest.approx(ours["mean"]["iteration_s"], rel=1e-12)
    assert found["plan"]["max_cp_size"] < 32
