"""config.json of hybrids: which layers have linear attention, as transformers would have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamic_cp.decide.config_json import hugging_face, written
from dynamic_cp.decide.config_json.hugging_face import load_architecture
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_model
from dynamic_cp.types import LinearAttention

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 4,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 256, "norm_topk_prob": True,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 151936, "use_cache": True,
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "output_router_logits": False, "rope_scaling": None, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "transformers_version": "4.57.0.dev0",
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": False,
    "hybrid_override_pattern": load_model("nemotron-3-nano").layer_pattern, "num_hidden_layers": 52,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "use_conv_bias": True,
    "max_position_embeddings": 262144, "initializer_range": 0.014, "chunk_size": 128, "expand": 2,
    "time_step_limit": [0.0, float("inf")], "time_step_min": 0.001, "rope_theta": 10000,
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"a": "b"}, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_dropout": 0.0,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "mlp_bias": False, "norm_eps": 1e-5,
    "num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "sliding_window": None, "time_step_floor": 0.0001, "time_step_max": 0.1, "torch_dtype": "bfloat16",
    "transformers_version": "4.55.4", "use_bias": False, "use_cache": True, "use_mamba_kernels": True,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "num_hidden_layers": 2, "shared_intermediate_size": 48,
    "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8, "mamba_d_state": 16,
    "layer_types": ["mamba", "attention"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), [("qwen3-next-80b-a3b", QWEN3_NEXT), ("nemotron-3-nano", NEMOTRON)])
def test_published_configs_are_the_models_of_the_catalog(name, config):
    assert replace(hugging_face.model_shape("there", config), source="") == replace(load_model(name), source="")
    assert hugging_face.architecture("there", config) == load_architecture(name)


def test_catalog_models_are_as_large_as_their_names_say():
    assert round(load_model("qwen3-next-80b-a3b").num_parameters / 1e9) == 80
    assert round(load_model("nemotron-3-nano").num_parameters / 1e9, 1) == 31.6


@pytest.mark.parametrize(
    ("layers", "freq"),
    [
        (["linear_attention"] * 3 + ["full_attention"], 4),
        (["full_attention"] + ["linear_attention"] * 3, (0, 1, 1, 1)),
        (["linear_attention", "full_attention"] * 2, 2),
    ],
)
def test_a_list_of_layers_is_one_number_where_it_can_be(layers, freq):
    config = {**QWEN3_NEXT, "num_hidden_layers": 4, "layer_types": layers}
    assert hugging_face.model_shape("there", config).linear_attention_freq == freq


def test_the_text_of_a_model_with_a_tower_is_read():
    text = {key: value for key, value in QWEN3_NEXT.items() if key not in ("model_type", "num_experts")}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 27}, "tie_word_embeddings": True}
    shape = hugging_face.model_shape("there", config)
    assert shape.experts is None
    assert shape.share_embeddings_and_output_weights is False  # its text says so
    assert hugging_face.architecture("there", config)["rotary_percent"] == 0.25
    moe = {"model_type": "qwen3_5_moe", "text_config": {**text, "num_experts": 256, "intermediate_size": None}}
    assert hugging_face.model_shape("there", moe).ffn_hidden_size == 512


def test_a_layer_of_granite_is_a_mixer_and_experts_one_after_the_other():
    shape = hugging_face.model_shape("there", GRANITE)
    assert shape.layer_pattern == "ME*E"
    assert shape.linear_attention == LinearAttention(
        kind="mamba2", num_heads=8, num_groups=1, key_size=16, value_size=16
    )
    dense = {**GRANITE, "num_local_experts": 0}
    assert hugging_face.model_shape("there", dense).layer_pattern == "M-*-"
    bamba = {**dense, "model_type": "bamba", "layer_types": None, "attn_layer_indices": [0]}
    assert hugging_face.model_shape("there", bamba).layer_pattern == "*-M-"


def test_lists_of_nemotron_say_the_same_as_its_pattern():
    listed = ["mamba", "moe", "attention", "mlp"]
    config = {**NEMOTRON, "layers_block_type": listed, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*-"}
    assert hugging_face.model_shape("there", config).layer_pattern == "ME*-"


def test_a_nemotron_without_experts_routes_nothing():
    """transformers write how many experts a layer had, whatever layers there are."""
    config = NEMOTRON | {"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4}
    assert hugging_face.architecture("there", config)["moe_router_score_function"] == "softmax"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (QWEN3_NEXT | {"layer_types": ["linear_attention"] * 4}, "layer_types has 4 entries, num_hidden_layers is 48"),
        (QWEN3_NEXT | {"layer_types": ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        (QWEN3_NEXT | {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (QWEN3_NEXT | {"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "qwen3_5"}, "text_config is None"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "lacks layers_block_type and hybrid_override_pattern"),
        (NEMOTRON | {"hybrid_override_pattern": "MX*", "num_hidden_layers": 3}, "has X: its symbols"),
        (NEMOTRON | {"num_hidden_layers": 10}, "hybrid_override_pattern has 52 entries, num_hidden_layers is 10"),
        (
            NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": None},
            "layers_block_type and hybrid_override_pattern say other layers",
        ),
        (
            QWEN3_NEXT | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "moe"]},
            "has 'moe', layers are linear_attention, full_attention$",
        ),
        (GRANITE | {"layer_types": ["mamba", "moe"]}, "layer_types has 'moe'"),
        (NEMOTRON | {"moe_latent_size": 64}, "experts of latents are not priced"),
        (QWEN3_NEXT | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, it must be at least 1"),
        (GRANITE | {"mamba_n_heads": 0}, "num_heads"),
        (GRANITE | {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        (GRANITE | {"model_type": "bamba", "layer_types": None, "attn_layer_indices": 3}, "must be a list of layers"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(config, says):
    with pytest.raises((InvalidInputError, UnsupportedFeatureError), match=says):
        hugging_face.model_shape("there", config)


@pytest.mark.parametrize(
    "config",
    [
        NEMOTRON | {"head_dim": None, "attention_head_dim": 128, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        {
            "model_type": "qwen3_5",
            "text_config": QWEN3_NEXT
            | {
                "attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish",
                "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
            },
        },
    ],
)  # fmt: skip
def test_entries_that_say_what_layers_do_anyway_are_read(config):
    assert hugging_face.architecture("there", config).not_trained == ()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (QWEN3_NEXT | {"attention_bias": True}, "attention_bias True: layers of hybrids have none"),
        (QWEN3_NEXT | {"is_causal": False}, "is_causal False: not known here"),
        (QWEN3_NEXT | {"logit_cap": 30, "transformers_version": "6.0.0"}, "logit_cap 30: not known here"),
        (QWEN3_NEXT | {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid': it is swish"),
        (QWEN3_NEXT | {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16': it is float32"),
        (QWEN3_NEXT | {"hidden_act": "relu2"}, "hidden_act 'relu2': it is silu"),
        (
            QWEN3_NEXT | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}},
            "partial_rotary_factor 0.25 with YaRN: YaRN rotates whole heads",
        ),
        (NEMOTRON | {"norm_eps": 1e-6}, "norm_eps 1e-06: layer_norm_epsilon is 1e-05"),
        (NEMOTRON | {"head_dim": None, "attention_head_dim": 64}, "attention_head_dim 64: head_dim is 128"),
        (NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu': it is relu2"),
        (NEMOTRON | {"time_step_limit": [0.001, 0.1]}, "steps of Mamba-2 have no limits"),
        (NEMOTRON | {"num_experts_per_tok": 1}, "scores of several experts have sum 1"),
        (GRANITE, "were never compared with those of transformers"),
    ],
)
def test_what_is_not_trained_is_said(config, says):
    assert any(says in why for why in hugging_face.architecture("there", config).not_trained)


@pytest.mark.parametrize(("name", "family"), [("qwen3-next-80b-a3b", "qwen3_next"), ("nemotron-3-nano", "nemotron_h")])
def test_a_config_that_is_written_is_read_as_the_model(name, family):
    shape, architecture = load_model(name), load_architecture(name)
    values = written.config("it", shape, architecture)
    assert values["model_type"] == family
    assert replace(hugging_face.model_shape("it", values), source="") == replace(shape, source="")
    with pytest.raises(UnsupportedFeatureError, match=f"has normalization 'LayerNorm', which {family} has not"):
        written.config("it", shape, replace(architecture, flags={**architecture.flags, "normalization": "LayerNorm"}))
