"""Gains under other prices: each set changes what it names, and a verdict that one of them turns says which."""

from __future__ import annotations

import shlex
from dataclasses import replace

import click
import pytest

from dynamic_cp.decide.cli.app import group
from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.comparison.values import OtherPrice, speedup_of
from dynamic_cp.decide.comparison.verdict import verdict_of
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep import Space, sweep
from dynamic_cp.decide.sweep.evaluate import PRICE_SETS, evaluate, under_other_prices
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import DataParallel, Experts, LinearAttention, Topology
from tests.unit.report.support import comparison
from tests.unit.support import samples_of

JOB = SweepJob(
    batches=(samples_of([9000, 500, 700, 4000] * 4), samples_of([6000, 300, 900, 2000] * 4)),
    max_seqlen=9000,
    model=load_model("llama-3-8b"),
    hardware=load_hardware("h100"),
    data_parallel=DataParallel(overlap_grad_reduce=True, overlap_param_gather=True),
)
STATIC = Setting(
    policy="static", topology=Topology(num_lanes=4, tp_size=2, sequence_parallel=True), recompute="none",
    max_tokens_per_rank=16384, cp_comm_types=("p2p",), static_cp_size=2,
)  # fmt: skip
DYNAMIC = replace(STATIC, policy="dynamic")


def seconds(setting: Setting, job: SweepJob, num_tokens: int) -> float:
    topology = replace(setting.topology, ep_size=4 if job.model.experts else 1)
    return CostModel(job.problem(replace(setting, topology=topology))).cost(2, 0, num_tokens, num_tokens**2).forward_s


LINEAR = LinearAttention(kind="gated_delta_net", num_heads=32, num_groups=16, key_size=128, value_size=128)
EXPERTS = Experts(num_experts=8, topk=2, ffn_hidden_size=1024, dispatcher="deepep")
DENSE_SETS = [one.name for one in PRICE_SETS if not one.name.startswith("linear") and "experts" not in one.name]
"""Those that change a job without linear attention and without experts."""


@pytest.mark.parametrize("prices", PRICE_SETS, ids=lambda prices: prices.name)
def test_each_set_changes_what_it_names(prices) -> None:
    job = JOB
    if prices.name not in DENSE_SETS:
        assert prices.change(job) == job
        linear = {"linear_attention": LINEAR, "linear_attention_freq": 4}
        job = replace(JOB, model=replace(JOB.model, **{"experts": EXPERTS} if "experts" in prices.name else linear))
    tokens = 200 if "host" in prices.name else 8000
    other = prices.change(job)
    ours, theirs = (seconds(setting, other, tokens) / seconds(setting, job, tokens) for setting in (DYNAMIC, STATIC))
    expected = {
        "TP collectives overlapped in all jobs": ours == theirs < 1,
        "TP collectives overlapped in static jobs alone": ours == 1 > theirs,
        "attention half as fast": ours == theirs > 1, "attention 30% faster": ours == theirs < 1,
        "linear attention half as fast": ours == theirs > 1, "linear attention twice as fast": ours == theirs < 1,
        "the host half as fast": ours == theirs > 1.5, "links half as fast": ours == theirs > 1,
        "all-to-all between experts": ours == theirs > 1, "HybridEP between experts, overlapped": ours == theirs < 1,
        "gradients reduced in the open": ours == theirs == 1
        and CostModel(other.problem(STATIC)).reduction.least_s > CostModel(JOB.problem(STATIC)).reduction.least_s,
    }  # fmt: skip
    assert expected[prices.name]
    assert len(expected) == len(PRICE_SETS)


def test_under_other_prices_the_dynamic_policy_also_takes_the_layout_of_the_static_job() -> None:
    """At its own limit it needs more micro-batches and takes longer than static CP."""
    static = replace(STATIC, policy="balanced", recompute="full")
    small = replace(static, policy="dynamic", static_cp_size=None, max_tokens_per_rank=4608)
    points = {one.policy: [evaluate(one, JOB)] for one in (small, static)}
    planned: list[Setting] = []

    def run(plan, settings, _name):
        planned.extend(settings)
        return [plan(setting, JOB) for setting in settings]

    gains = {one.name: one.speedup.ratio for one in under_other_prices(JOB, points, run)}
    assert gains.pop("TP collectives overlapped in static jobs alone") < 1.0
    assert len(gains) == len(DENSE_SETS) - 1
    assert min(gains.values()) >= 1.0, gains
    assert {(one.policy, one.max_tokens_per_rank) for one in planned} == {
        ("dynamic", 4608), ("dynamic", 16384), ("balanced", 16384),
    }  # fmt: skip


@pytest.mark.nightly
def test_a_sweep_has_the_gain_under_all_prices() -> None:
    space = Space(num_gpus=8, ranks_per_node=8, tp_sizes=(2,), pp_sizes=(1,), recompute=("none",))
    found = sweep(space, JOB, policies=("static", "dynamic"))
    assert [one.name for one in found.other_prices] == DENSE_SETS
    shipped = found.best["static"].iteration_s / found.best["dynamic"].iteration_s
    gains = {one.name: one.speedup.ratio for one in found.other_prices}
    assert gains["TP collectives overlapped in static jobs alone"] < shipped
    assert gains["TP collectives overlapped in static jobs alone"] < gains["TP collectives overlapped in all jobs"]
    assert sweep(space, JOB, policies=("dynamic",)).other_prices == ()
    in_the_open = replace(JOB, data_parallel=DataParallel())
    names = [one.name for one in sweep(space, in_the_open, policies=("static", "dynamic")).other_prices]
    assert names == [name for name in DENSE_SETS if name != "gradients reduced in the open"], "the job's own"


def gain(name: str, ratio: float) -> OtherPrice:
    return OtherPrice(name, speedup_of("dynamic", [1.0, 1.0, 1.0], "static", [ratio, ratio, ratio]))


def test_prices_that_decide_are_named() -> None:
    shipped = comparison()
    before = verdict_of(shipped)
    assert before is not None
    assert before.pays == "yes"
    same = verdict_of(replace(shipped, other_prices=(gain("slow links", 1.2), gain("fast attention", 1.1))))
    assert same is not None
    assert (same.pays, same.headline) == (before.pays, before.headline)
    assert "1.10x (with fast attention) to 1.20x (with slow links)" in same.other_prices
    turned = verdict_of(replace(shipped, other_prices=(gain("slow links", 1.2), gain("fast attention", 1.01))))
    assert turned is not None
    assert turned.pays == "unclear"
    assert "dynamic CP may pay" in turned.headline
    assert "Prices decide whether it pays: with fast attention 1.01x" in turned.other_prices


def test_what_is_open_comes_with_what_would_settle_it() -> None:
    """Each price that decides once, with a command where one measures it; and what both settings cost side by side."""
    shipped = replace(comparison(), model_name="llama-3-8b", hardware_name="h100-local", is_tuned=True)
    decided = verdict_of(replace(shipped, other_prices=(gain("links half as fast", 1.2),)))
    assert decided is not None
    assert decided.settled_by == (), "nothing is open"
    names = ["links half as fast", "attention half as fast", "the host half as fast"]
    names += [*(one.name for one in PRICE_SETS[:2]), "gradients reduced in the open"]
    turned = verdict_of(replace(shipped, other_prices=tuple(gain(name, 1.01) for name in names)))
    assert turned is not None
    links, attention, *questions, both = turned.settled_by
    num_gpus = shipped.problem.topology.world_size
    assert num_gpus > 8
    assert links.what.startswith("links: on 2 nodes, about 5 minutes, 1.3 GPU hours; ")
    assert links.command[0].startswith("torchrun --nnodes 2 --node-rank $NODE_RANK ")
    assert links.command[0].endswith(" --nproc-per-node 8")
    assert attention.command[0] == "dynamic-cp profile"
    for way in (links, attention):
        assert way.command[-2:] == (
            f"--model llama-3-8b --tp {shipped.problem.topology.tp_size}",
            "--hardware h100-local --output measured.json",
        )  # fmt: skip
    assert [way.what.partition(":")[0] for way in questions] == ["TP collectives", "TP collectives", "gradients"]
    ours, theirs = shipped.policy("dynamic"), shipped.policy(turned.baseline)
    steps = 30 * (ours.iteration_s + theirs.iteration_s) / (theirs.iteration_s - ours.iteration_s)
    hours = 30 * num_gpus * (ours.iteration_s + theirs.iteration_s) / 3600
    assert both.what.startswith(f"both settings, 30 steps each on {num_gpus} GPUs: ")
    assert f" and {hours:.2f} GPU hours without start-up" in both.what
    assert f"a run has that back after {round(steps)} steps" in both.what

    engine = verdict_of(replace(shipped, hardware_name="h100", other_prices=(gain("attention half as fast", 1.01),)))
    assert engine is not None
    assert len(engine.settled_by) == 1, "a profile measures local layers: TransformerEngine's are run"


def test_each_set_of_prices_is_known_or_run() -> None:
    """What a new set of prices needs is decided once, here."""
    shipped = replace(comparison(), hardware_name="h100-local")
    for prices in PRICE_SETS:
        turned = verdict_of(replace(shipped, other_prices=(gain(prices.name, 1.01),)))
        assert turned is not None
        assert len(turned.settled_by) == 2, prices.name


def test_the_command_of_a_profile_is_one() -> None:
    """The words that are printed are taken by the commands that they name."""
    shipped = replace(comparison(), model_name="llama-3-8b", hardware_name="h100-local")
    turned = verdict_of(replace(shipped, other_prices=(gain("attention half as fast", 1.01),)))
    assert turned is not None
    words = shlex.split(" ".join(turned.settled_by[0].command))
    assert words[:2] == ["dynamic-cp", "profile"]
    command = group.get_command(click.Context(group), "profile")
    assert command is not None
    command.make_context("profile", words[2:])
