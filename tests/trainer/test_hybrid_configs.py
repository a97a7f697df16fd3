"""What a config.json is read as, against what transformers makes of it: parameters of hybrids, and entries of all."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.models import entries, hugging_face, hybrids

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
DELTA = {"num_hidden_layers": 8, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 40}
MAMBA = {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
GRANITE = {"shared_intermediate_size": 48, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
NEMOTRON = {"head_dim": 16, "hybrid_override_pattern": "ME*EM-M*", "mamba_num_heads": 8, "mamba_head_dim": 8}
NEMOTRON |= {"n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 24}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3NextConfig": {**DELTA, **EXPERTS, "mlp_only_layers": [1]},
    "Qwen3_5TextConfig": DELTA,
    "Qwen3_5MoeTextConfig": {**DELTA, **EXPERTS},
    "NemotronHConfig": NEMOTRON,
    "GraniteMoeHybridConfig": {**MAMBA, **GRANITE, "num_local_experts": 4},
    "BambaConfig": {**MAMBA, "attn_layer_indices": [1]},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hybrid_has_as_many_parameters_as_in_transformers(name):
    values = SIZES | FAMILIES[name]
    if name == "Qwen3_5MoeTextConfig":
        del values["intermediate_size"]
    config = getattr(transformers, name)(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Norms of queries and keys are not counted.
    counted = sum(
        one.numel() for key, one in model.named_parameters() if not key.endswith(("q_norm.weight", "k_norm.weight"))
    )
    assert hugging_face.model_shape(name, config.to_dict()).num_parameters == counted


NO_ENTRIES = {
    *("get", "pop", "setdefault", "rope_type", "short_factor", "long_factor", "mscale_all_dim", "mrope_section"),
    *("full_attention", "sliding_attention", "is_sliding", "default_theta", "get_text_config", "_is_hf_initialized"),
    *("cu_seq_lens_q", "past_key_values", "token_type_ids", "mm_token_type_ids", "image", "video", "image_grid_thw"),
    *("video_grid_thw", "text_config", "vision_config", "image_token_id", "video_token_id", "mm_tokens_per_image"),
    *("depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size"),
    *("spatial_merge_size", "temporal_patch_size"),
}
"""What the same source reads of something else: entries of RoPE and of layer_types, arguments, and vision towers."""


def read_by(module: ModuleType, *of: str) -> Iterator[str]:
    """Yield the names of attributes and keys that the source of a module reads of variables called as in `of`."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            value = node.value
            if (isinstance(value, ast.Name) and value.id in of) or getattr(value, "attr", "") == "config":
                yield node.attr
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            where = {"getattr": 1, "hasattr": 1, "pop": 0, "get": 0, "setdefault": 0}.get(called, len(node.args))
            found = node.args[where] if where < len(node.args) else None
            if isinstance(found, ast.Constant) and isinstance(found.value, str):
                yield found.value


def test_an_entry_that_transformers_reads_of_a_family_is_known():
    """Every other changes nothing, whatever wrote it into a published file."""
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert (major, minor) == entries.LOOKED_THROUGH, "another release of transformers: look through its entries"
    kinds = transformers.CONFIG_MAPPING
    without = {"deepseek", *hugging_face.SAME_AS, *hugging_face._ENCODERS, *hybrids._TEXTS}
    families = [one for one in hugging_face.MODEL_TYPES if one not in without]
    num_read = 0
    for family in families:
        kind = kinds[family]
        module = kind.__module__
        modeling = importlib.import_module(module.replace("configuration", "modeling"))
        read = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
        read |= {*read_by(importlib.import_module(module), "self", "kwargs"), *read_by(modeling, "config")}
        read -= NO_ENTRIES | {name for name in dir(kind) if callable(getattr(kind, name))}
        num_read += len(read)
        assert read - hugging_face.known_entries(family) - entries.READ_BY_TRANSFORMERS.keys() == set(), family
    assert len(families) > 25
    assert num_read > 900


OF_4 = {
    "_name_or_path": "here", "_attn_implementation_autoset": True, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "float32", "transformers_version": "4.51.0",
    "use_cache": True, "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 100000, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip
LLAMA_OF_4 = OF_4 | {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1}
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama of 4.x": (LLAMA_OF_4, ()),
    "llama of 4.x with what is generated": (
        LLAMA_OF_4 | {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096},
        ("do_sample", "temperature", "top_p", "max_length"),
    ),
    "llama of 5.x": (
        LLAMA_OF_4
        | {"dtype": "float32", "transformers_version": "5.2.0", "rope_theta": None}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        (),
    ),
    "smollm2": (
        LLAMA_OF_4 | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        ("is_llama_config",),
    ),
    "unsloth": (
        LLAMA_OF_4 | {"unsloth_fixed": True, "unsloth_version": "2025.3.19", "pad_token_id": 3, "head_dim": 8},
        ("unsloth_fixed", "unsloth_version"),
    ),
    "gemma3 1b": (
        OF_4
        | {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16}
        | {"hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "rope_local_base_freq": 10000}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"rope_theta": 1000000, "sliding_window": 8, "sliding_window_pattern": 6},
        ("cache_implementation",),
    ),
    "nemotron-h 8b": (
        OF_4
        | {"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "head_dim": 16}
        | {"chunk_size": 16, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5}
        | {"mamba_hidden_act": "silu", "mamba_num_heads": 4, "mlp_hidden_act": "relu2", "n_groups": 2}
        | {"rescale_prenorm_residual": True, "residual_in_fp32": False, "ssm_state_size": 8, "time_step_floor": 1e-4}
        | {"time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 1e-9, "time_step_rank": 256}
        | {"use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "pad_token_id": 0}
        | {"num_logits_to_keep": 1, "mamba_head_dim": 16},
        ("time_step_rank",),
    ),
}  # fmt: skip
"""Entries as released, with small sizes -> those of them that nothing reads."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_trained_whole_and_what_nothing_reads_is_named(name):
    config, not_read = PUBLISHED[name]
    hugging_face.model_shape(name, config)
    found = hugging_face.architecture(name, config)
    assert (found.not_trained, found.not_imported, found.not_read) == ((), (), not_read)
    logits = []
    for left_out in ((), not_read):
        values = {key: value for key, value in config.items() if key not in ("model_type", *left_out)}
        torch.manual_seed(3)
        theirs = transformers.AutoConfig.for_model(config["model_type"], **values)
        model = AutoModelForCausalLM.from_config(theirs).eval()
        with torch.no_grad():
            logits.append(model(input_ids=torch.arange(4, 40)[None], use_cache=False).logits)
    assert torch.equal(*logits)


def test_an_entry_of_a_later_release_is_refused():
    for version, is_known in (("5.23.1", True), ("5.24.0.dev0", False), ("6.0", False), (None, True), (4, True)):
        found = hugging_face.architecture("it", LLAMA_OF_4 | {"transformers_version": version, "logit_scale": 2.0})
        assert found.not_read == (("logit_scale",) if is_known else ())
        assert ("logit_scale 2.0: not known here" in "".join(found.not_trained)) is not is_known


@pytest.mark.parametrize(
    "entry", [{"is_causal": False}, {"original_max_position_embeddings": 64}, {"resid_pdrop": 0.1}]
)
def test_an_entry_that_transformers_reads_and_no_layer_here_has_is_refused(entry):
    (why,) = hugging_face.architecture("it", LLAMA_OF_4 | entry).not_trained
    assert why.endswith(": not known here")


def test_kimi_k2_has_the_layers_of_deepseek_v3():
    experts = {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1}
    latents = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    config = OF_4 | experts | latents | {"v_head_dim": 128, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.827, "n_group": 1}
    config |= {
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_hidden_layers": 61,
        "num_key_value_heads": 4,
        "rope_theta": 5e4,
    }
    shapes, architectures = [], []
    for model_type in ("kimi_k2", "deepseek_v3"):
        values = config | {"model_type": model_type}
        shapes.append(dataclasses.replace(hugging_face.model_shape("it", values), source=""))
        architectures.append(hugging_face.architecture("it", values))
    assert shapes[0] == shapes[1]
    assert architectures[0] == architectures[1]
    assert architectures[0].not_trained == ()


BAD = ("x", -1, 0, 1.5, [], ["full_attention"], [None], {}, {"a": 1}, True, None, float("nan"), float("inf"), 10**30)


def test_a_bad_value_of_any_entry_is_read_or_refused():
    num_read, num_refused = 0, 0
    for config, _ in PUBLISHED.values():
        for key in (*config, "quantization_config", "layer_types", "mlp_only_layers"):
            for value in BAD:
                try:
                    hugging_face.model_shape("it", config | {key: value})
                    hugging_face.architecture("it", config | {key: value})
                    num_read += 1
                except DynamicCPError:
                    num_refused += 1
    assert min(num_read, num_refused) > 500
