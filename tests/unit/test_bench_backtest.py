"""`python -m benchmarks.backtest`: published runs are read, built and priced as they were run, and limits bite."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.backtest import __main__ as command
from benchmarks.backtest import errors, layouts, variable
from benchmarks.backtest.recipes import ROPE_S
from benchmarks.backtest.runs import FILE, IN_FULL, Run, read_runs
from benchmarks.backtest.steps import modelled, plan_of, problem_of, slower
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.edges import Reduction, tensor_s_per_token
from dynamic_cp.types import StateDtypes


def run_of(name: str) -> Run:
    (run,) = (run for run in read_runs() if run.name == name)
    return run


def test_every_run_has_a_source_a_split_and_a_name_of_its_own() -> None:
    runs = read_runs()
    assert len(runs) >= errors.LEAST_RUNS
    assert len({run.name for run in runs}) == len(runs)
    assert all(run.source.url.startswith("https://") and run.split in ("fitted", "held_out") for run in runs)
    held_out = sum(run.split == "held_out" for run in runs)
    assert len(runs) / 5 < held_out < len(runs) / 2
    assert {run.group for run in runs} == set(errors.LIMITS)
    pairs = variable.read_variable()
    assert len(pairs) >= 5
    assert all(pair.source.url and pair.why and pair.gain for pair in pairs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "both"}, "split is 'both'"),
        ({"unit": "hours"}, "unit is 'hours'"),
        ({"published": 0}, "a published figure > 0"),
        ({"gpus": 12}, "do not share out a global batch of 128"),
        ({"source": None}, "source is missing"),
    ],
)
def test_a_run_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    (first,) = data["configurations"][:1]
    first["runs"] = [first["runs"][0] | change]
    if change == {"source": None}:
        del first["runs"][0]["source"], first["source"]
    path = tmp_path / "published.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_runs(path)


def test_plans_are_legal_and_hold_the_published_batch() -> None:
    for name in ("Llama-3.1-8B, 8 GPUs", "405B, 21 layers", "Nemotron-4 15B, 16 GPUs", "Qwen3-235B, 32k"):
        run = run_of(name)
        plan = plan_of(run)
        check_plan(plan)
        assert plan.num_tokens == run.global_batch_size * run.seqlen
        assert plan.num_microbatches * run.num_groups * run.micro_batch_size == run.global_batch_size
        assert plan.topology.world_size == run.gpus


def test_a_step_without_a_pipeline_is_the_sum_of_its_parts() -> None:
    """Llama-3-8B SFT on 8 GPUs: 4 micro-batches of 4096 tokens on each, without TP, CP or recomputation."""
    run = run_of("Llama-3-8B SFT, 8 GPUs")
    hardware, model, tokens = run.hardware, run.model, 4096
    linear_s = 2 * model.linear_weights_per_layer * (tokens + hardware.linear_extra_tokens)
    linear_s *= model.num_layers / hardware.linear_flops_per_s
    flops = 2 * model.query_size * tokens**2 * model.num_layers
    forward = flops / hardware.attention_flops_per_s * (1 + hardware.attention_extra_tokens / tokens)
    backward = 2.5 * flops / hardware.attention_backward_flops_per_s
    backward *= 1 + hardware.attention_backward_extra_tokens / tokens
    overheads = model.num_layers * (hardware.forward_overhead_s_per_layer + hardware.backward_overhead_s_per_layer)
    overheads += 2 * hardware.overhead_s_per_bucket_stage
    head = 3 * 2 * model.hidden_size * model.vocab_size * tokens / hardware.head_flops_per_s
    head += 36 * model.vocab_size * tokens / hardware.memory_bandwidth_bytes_per_s
    gradient_bytes = run.source.state.gradient_bytes
    embedding = (2 * 2 + 2 + 2 * gradient_bytes) * model.hidden_size * tokens / hardware.memory_bandwidth_bytes_per_s
    result = modelled(run)
    by_hand = 4 * (3 * linear_s + forward + backward + overheads + head + embedding)
    assert result.iteration_s - result.reduction_s == pytest.approx(by_hand, rel=1e-6)
    assert result.ratio == pytest.approx(result.iteration_s / 1.32)


def test_figures_become_seconds() -> None:
    assert run_of("Llama-3.1-8B, 8 GPUs").published_s == 12.78
    assert run_of("GPT-OSS-120B, MBS 1").published_s == pytest.approx(1280 * 4096 / 5824 / 64)
    # NeMo's tables count attention in full: 16934 tokens/s of Llama-2-7B are published as 780 TFLOP/s.
    run = run_of("Llama-2-7B, FP8")
    assert replace(run, published=780, unit=IN_FULL).published_s == pytest.approx(run.published_s, rel=2e-3)


def test_settings_of_a_run_reach_the_prices() -> None:
    run = run_of("Llama-3.1-70B, 64 GPUs")
    problem = problem_of(run)
    assert problem.data_parallel.overlap_grad_reduce
    assert problem.data_parallel.overlap_param_gather
    assert problem.data_parallel.state.gradient_bytes == 2
    in_the_open = replace(run, source=replace(run.source, flags=()))
    assert modelled(in_the_open).reduction_s > 5 * modelled(run).reduction_s
    assert tensor_s_per_token(problem) > 0 == tensor_s_per_token(problem_of(run_of("Llama-3.1-8B, 8 GPUs")))
    hidden = Reduction.of(problem)
    assert hidden.least_s == pytest.approx(hidden.slows * (hidden.reduce_s.max() + hidden.gather_s.max()))
    assert Reduction.of(problem_of(in_the_open)).least_s > hidden.least_s > 0
    fp8 = run_of("Llama-3.1-70B, FP8")
    assert problem_of(fp8).rates.linear_flops_per_s == pytest.approx(fp8.hardware.fp8_linear_flops_per_s)
    assert modelled(fp8).iteration_s < modelled(run).iteration_s


def test_experts_that_tp_ranks_split_travel_farther_and_are_gathered() -> None:
    """Grok-1, 8 layers, by hand: of 8 expert ranks 2 share a node, not 8; 3 other TP ranks have as much."""
    split = run_of("Grok-1, 8 layers")
    copies = 8192 / 2 / 4 * 2 * 6144 * 2
    in_node, across = 360e9, 40e9
    more_s = 2 * copies * ((1 / 8 - 7 / 8 + 3) / in_node + 6 / 8 / across)
    micro_batches, layers = 1024 / 8, 8
    without_host = dict.fromkeys((name for name in asdict(split.hardware) if name.startswith("host_")), 0.0)
    found = [modelled(run, replace(run.hardware, **without_host)) for run in (split, replace(split, expert_tp=1))]
    found_s, whole_s = (one.iteration_s - one.reduction_s for one in found)
    assert found_s - whole_s == pytest.approx(micro_batches * layers * 2 * more_s, rel=1e-5)


def test_packs_that_are_rotated_sample_by_sample_take_the_host() -> None:
    run = run_of("Moonlight-16B SFT, packs of 8k")
    fused = replace(run, source=replace(run.source, flags=[x for x in run.source.flags if x != "no_rope_fusion"]))
    assert run.hardware.host_forward_s_per_layer == fused.hardware.host_forward_s_per_layer + 22 * ROPE_S[0]
    assert run.hardware.host_backward_s_per_layer == fused.hardware.host_backward_s_per_layer + 22 * ROPE_S[1]
    assert 0.85 < modelled(run).ratio < 1.15
    assert modelled(fused).ratio < 0.65


@pytest.mark.nightly
def test_runs_would_not_fit_without_what_their_sources_say() -> None:
    """That they fit as they were run is a limit of the command."""
    runs = [run for run in read_runs() if run.group == "dense" and run.split == "fitted"]
    in_fp32 = [modelled(replace(run, source=replace(run.source, flags=()))).is_refused for run in runs]
    assert sum(in_fp32) >= 5, "what they were run with no longer matters"


def test_a_run_that_is_known_to_fail_is_refused() -> None:
    """By its page out of memory on fewer than 16 GPUs; by Megatron-Bridge's study of 2026-08-12 unless experts are
    recomputed (norms and activation functions failed in what CUDA graphs hold)."""
    run = run_of("Nemotron-4 15B, 16 GPUs")
    assert not modelled(run).is_refused
    assert modelled(replace(run, gpus=8, global_batch_size=32)).is_refused
    flags = ("cross_entropy_loss_fusion", "grad_reduce_in_bf16")
    fp8 = run_of("Nemotron-3-Nano, FP8")
    run = replace(fp8, source=replace(fp8.source, flags=flags), precision="bf16", global_batch_size=16)
    for names, fails in ((), 1), (("core_attn",), 1), (("moe_act",), 1), (("moe",), 0), (("moe", "layernorm"), 0):
        assert modelled(replace(run, recompute_modules=names)).is_refused == fails


def test_what_a_source_had_switched_on_reaches_memory() -> None:
    state = run_of("Nemotron-4 340B").source.state
    assert (state.grad_reduce_in_bf16, state.exp_avg_dtype, state.main_params_dtype) == (True, "bf16", "fp32")
    assert run_of("Nemotron-4 15B, 16 GPUs").source.state == StateDtypes()
    assert problem_of(run_of("Nemotron-4 340B")).data_parallel.state == state


@pytest.mark.nightly
def test_limits_hold_and_fail_when_a_price_is_doubled() -> None:
    runs = read_runs()
    assert errors.broken_limits([modelled(run) for run in runs]) == []
    doubled = errors.broken_limits([modelled(run, slower(run.hardware, 2)) for run in runs])
    assert len(doubled) >= len(errors.BF16), doubled
    assert any(line.startswith("dense: the median ratio") for line in doubled)
    name = "collective_bandwidth_in_node_bytes_per_s"
    dear = [modelled(run, replace(run.hardware, **{name: getattr(run.hardware, name) / 2})) for run in runs]
    assert any("dense" in line for line in errors.broken_limits(dear))
    assert errors.broken_limits([])
    assert "runs, at least" in errors.broken_limits([])[0]


@pytest.mark.nightly
def test_the_layout_that_was_published_is_among_the_fastest() -> None:
    results = layouts.measure(read_runs())
    assert len(results) > 100
    assert layouts.rank_of_published(results) >= 1
    assert 1 <= layouts.distance_of_published(results) < 1.05, "NVIDIA's choice is as good as the model's, or nearly"
    assert "(published)" in layouts.markdown(results)


def test_a_published_pair_is_priced_both_ways() -> None:
    (pair,) = (pair for pair in variable.read_variable() if pair.name == "verl, Qwen3-30B")
    figures = variable.measure(pair, seeds=(0,))
    assert set(figures) == set(variable.POLICIES)
    assert min(variable.gains_of(pair, figures, "dynamic")) >= min(variable.gains_of(pair, figures, "megatron-dev"))
    assert "337.16" in variable.markdown([pair], [figures])


@pytest.mark.nightly
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Limits hold, and the page has a place for every table."""
    assert command.main(["--check"]) == 0
    docs = tmp_path / "docs"
    page = docs / "figures" / "backtest.md"
    page.parent.mkdir(parents=True)
    shutil.copy(command.DOCS.parent / "README.md", tmp_path)
    shutil.copy(command.DOCS / "backtest.md", docs)
    shutil.copy(command.DOCS / "figures" / "backtest.md", page)
    monkeypatch.setattr(command, "DOCS", docs)
    assert command.main(["--markdown"]) == 0
    assert "Refused:" in capsys.readouterr().out
    for pair in variable.read_variable():
        assert f"| {pair.name} |" in page.read_text(encoding="utf-8")
