"""What a job's plans depend on, from each thing that can say it: names, files, dicts, configurations, the process."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamic_cp import ModelShape, load_hardware, load_model
from dynamic_cp.errors import DynamicCPError, UnsupportedFeatureError
from dynamic_cp.types import DataParallel, RecomputedLayers, Topology
from megatron.integrations.scheduler import config as of_config
from megatron.integrations.scheduler.job import HARDWARE, MODEL, PP, TP, job_of, job_of_environment

QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def configuration(**more: Any) -> SimpleNamespace:
    """Return the fields that a TransformerConfig of Qwen2.5-7B has."""
    fields: dict[str, Any] = {
        "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28,
        "num_query_groups": 4, "kv_channels": 128, "gated_linear_unit": True, "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": None, "sequence_parallel": True,
        "bf16": True, "vocab_size": 152064,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


def numbers(model: ModelShape | None) -> dict[str, Any]:
    assert model is not None
    return {name: getattr(model, name) for name in ModelShape.__dataclass_fields__ if name != "source"}


def test_a_name_a_file_a_dict_and_configurations_say_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    of_transformers = SimpleNamespace(model_type="qwen2", to_dict=lambda: dict(QWEN))
    expected = numbers(load_model("qwen2.5-7b"))
    given = ["qwen2.5-7b", path, QWEN, of_transformers, configuration(), load_model("qwen2.5-7b")]
    assert [numbers(job_of(one).model) for one in given] == [expected] * len(given)


def test_a_configuration_says_windows_latents_modules_and_stages() -> None:
    """What an earlier mapping of it dropped."""
    windowed = of_config.model_of(configuration(window_size=(127, 0), window_attn_skip_freq=2))
    assert (windowed.window_tokens, windowed.window_attn_skip_freq) == (128, 2)
    latent = of_config.model_of(
        configuration(
            multi_latent_attention=True, q_lora_rank=None, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64,
            v_head_dim=128,
        )
    )  # fmt: skip
    assert (latent.kv_lora_rank, latent.q_lora_rank, latent.kv_channels, latent.num_query_groups) == (512, 0, 192, 28)
    assert of_config.model_of(configuration(mtp_num_layers=1)).mtp_num_layers == 1
    uneven = of_config.model_of(configuration(num_layers_in_first_pipeline_stage=4))
    assert uneven.pipeline_layers == ((4,), (8,), (8,), (8,))
    experts = of_config.model_of(configuration(num_moe_experts=8, moe_router_topk=2)).experts
    assert of_config.model_of(configuration(num_experts=8, moe_router_topk=2)).experts == experts, "a loop's own name"
    assert experts is not None
    assert (experts.num_experts, experts.topk) == (8, 2)


def test_a_configuration_says_linear_attention_whose_heads_frameworks_exchange() -> None:
    delta = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
    delta |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "linear_attention_freq": 4}
    config = configuration(experimental_attention_variant="gated_delta_net", **delta)
    model = of_config.model_of(config)
    assert model.linear_layers == ((True, True, True, False) * 7)
    assert model.linear_attention is not None
    assert model.linear_attention.num_heads == 32
    problem = job_of(config, hardware="h100").problem(8, 1024)
    assert problem.options.state_exchange == "heads"
    with pytest.raises(UnsupportedFeatureError, match="no hybrid_override_pattern"):
        of_config.model_of(configuration(is_hybrid_model=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"bytes_per_element": 2, "fp32_residual": False}),
        ({"bf16": False}, {"bytes_per_element": 4, "fp32_residual": False}),
        ({"fp32_residual_connection": True}, {"bytes_per_element": 2, "fp32_residual": True}),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            {
                "bytes_per_element": 2,
                "fp32_residual": False,
                "recompute": "full",
                "recompute_layers": RecomputedLayers("block", 3),
            },
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["shared_experts", "mlp"]},
            {"bytes_per_element": 2, "fp32_residual": False, "recompute": "selective", "recompute_modules": ("mlp",)},
        ),
    ],
)
def test_a_configuration_says_recomputation_and_bytes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert of_config.options_of(configuration(**fields)) == expected
    job_of(configuration(**fields)).problem(8, 4096)


def test_all_of_it_reaches_the_planner() -> None:
    settings = configuration(
        recompute_granularity="full", fp32_residual_connection=True, use_distributed_optimizer=True,
        overlap_grad_reduce=True,
    )  # fmt: skip
    problem = job_of(settings, options={"search": "thorough", "max_cp_size": 4}).problem(8, 4096, 2)
    assert problem.topology == Topology(num_lanes=8, tp_size=2, pp_size=4, sequence_parallel=True)
    options = problem.options
    assert (options.recompute, options.fp32_residual, options.max_cp_size, options.min_cp_size) == ("full", True, 4, 2)
    assert options.search == "thorough"
    assert problem.data_parallel == DataParallel(overlap_grad_reduce=True)


def test_what_a_call_says_goes_before_what_run_is_given() -> None:
    job = job_of("llama-3-8b", layout={"pp_size": 2}, options={"max_cp_size": 2}).with_config(configuration())
    assert job.model == load_model("llama-3-8b")
    problem = job.problem(8, 4096)
    assert (problem.topology.tp_size, problem.topology.pp_size, problem.options.max_cp_size) == (2, 2, 2)


def test_a_loop_that_calls_no_run_plans_for_the_layout_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = ModuleType("megatron.core.parallel_state")
    sizes = {
        "model_parallel_is_initialized": True,
        "get_tensor_model_parallel_world_size": 2,
        "get_pipeline_model_parallel_world_size": 4,
        "get_virtual_pipeline_model_parallel_world_size": None,
        "get_expert_model_parallel_world_size": 1,
    }
    for name, size in sizes.items():
        setattr(state, name, lambda size=size: size)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    job = job_of("qwen2.5-7b")
    assert job.problem(4, 96).topology == Topology(num_lanes=4, tp_size=2, pp_size=4, sequence_parallel=True)
    state.model_parallel_is_initialized = lambda: False
    assert job.problem(4, 96).topology == Topology(num_lanes=4)


def test_the_environment_names_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {MODEL: "qwen2.5-7b", HARDWARE: "a100-80gb", TP: "2", PP: "4"}.items():
        monkeypatch.setenv(name, value)
    job = job_of_environment()
    assert (job.model, job.hardware) == (load_model("qwen2.5-7b"), load_hardware("a100-80gb"))
    assert (job.problem(4, 96).topology.tp_size, job.problem(4, 96).topology.pp_size) == (2, 4)
    monkeypatch.setenv(TP, "two")
    with pytest.raises(DynamicCPError, match="DYNAMIC_CP_TP is 'two'"):
        job_of_environment()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "qwen2.5-7"}, "none of the bundled models"),
        ({"model": {"model_type": "mamba2"}}, "mamba2"),
        ({"model": 7}, "model is a int: give a bundled name"),
        ({"hardware": "h1000"}, "none of the bundled hardware"),
        ({"layout": {"tp": 2}}, "layout has no tp: known are tp_size"),
        ({"options": {"max_tokens_per_rank": 8}}, "options has no max_tokens_per_rank"),
        ({"options": {"pool": "auto"}}, "options has no pool: known are max_cp_size"),
    ],
)
def test_what_is_unknown_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DynamicCPError, match=message) as caught:
        job_of(**given)
    assert "\n" not in str(caught.value)
