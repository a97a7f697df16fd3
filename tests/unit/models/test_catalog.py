"""Bundled files load and state their sources; malformed ones are named."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace

import pytest

from dynamic_cp.decide.config_json import hugging_face, rotation, written
from dynamic_cp.errors import DynamicCPError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.types import Experts, Hardware
from tests.unit.support import CASES

DATA = CASES.parents[1] / "dynamic_cp" / "data"


def test_every_number_of_every_hardware_has_a_source():
    gpus = "a100-40gb a100-80gb b200 cpu gb200 gb300 h100 h100-local h200 h200-local"
    assert set(catalog.hardware_names()) == set(gpus.split())
    coefficients = {field.name for field in fields(Hardware)} - {"name", "source"}
    for name in catalog.hardware_names():
        hardware = catalog.load_hardware(name)
        assert hardware.name == name
        data = json.loads((DATA / "hardware" / f"{name}.json").read_text())
        assert set(hardware.source) == coefficients
        assert "base" in data or data.keys() - {"name"} == coefficients, "a file states also those that have a default"
        assert hardware.linear_flops_per_s <= hardware.peak_flops_per_s


def test_models():
    assert catalog.load_model("llama-2-13b").linear_weights_per_layer == 317_194_240
    assert all(catalog.load_model(name).source for name in catalog.model_names())


# Published numbers of parameters; biases of Qwen2.5 and the head norms of Qwen3 are not in ours.
@pytest.mark.parametrize(
    ("name", "parameters", "tolerance"),
    [
        ("llama-2-7b", 6_738_415_616, 0), ("llama-2-13b", 13_015_864_320, 0), ("llama-2-70b", 68_976_648_192, 0),
        ("llama-3-8b", 8_030_261_248, 0), ("llama-3-70b", 70_553_706_496, 0), ("qwen2.5-7b", 7_615_616_512, 2e-5),
        ("qwen2.5-32b", 32_763_876_352, 2e-5), ("qwen3-8b", 8_190_735_360, 2e-5), ("mixtral-8x7b", 46_702_792_704, 0),
        ("qwen3-30b-a3b", 30_532_122_624, 2e-5),
    ],
)  # fmt: skip
def test_parameters_of_the_bundled_models(name, parameters, tolerance):
    model = catalog.load_model(name)
    assert model.num_parameters == pytest.approx(parameters, rel=tolerance, abs=0)
    assert model.causal_attention


def test_the_video_model_attends_without_a_mask():
    model = catalog.load_model("wan2.1-t2v-14b")
    assert not model.causal_attention
    # 40 layers of 351 million weights (14.0e9); the projections of the 512 text tokens are not counted: 2 of 14 h^2.
    assert model.linear_weights_per_layer == 4 * 5120**2 + 2 * 5120**2 + 2 * 5120 * 13824
    assert len(catalog.model_names()) == 13


LLAMA_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 500000.0,
}  # fmt: skip


def config_file(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in (LLAMA_CONFIG | changes).items() if value != "gone"}))
    return path


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"model_type": "qwen2"}, 0),
        ({"model_type": "qwen2", "use_sliding_window": True}, 1),  # from layer 28 on
        ({"model_type": "gemma2"}, 15),
        ({"model_type": "gemma3_text"}, 25),
    ],
)
def test_windows_of_configs_that_leave_out_which_layers_have_them(tmp_path, changes, number):
    model = catalog.load_model(config_file(tmp_path, num_hidden_layers=29, sliding_window=9, **changes))
    assert model.num_windowed_layers == number


def test_a_hugging_face_config(tmp_path):
    model = catalog.load_model(config_file(tmp_path))
    assert replace(model, source="") == replace(catalog.load_model("llama-3-8b"), source="")
    assert "model_type llama" in model.source
    assert catalog.load_model(config_file(tmp_path, num_key_value_heads="gone")).num_query_groups == 32
    assert catalog.load_model(config_file(tmp_path, head_dim=96)).kv_channels == 96
    assert catalog.load_model(config_file(tmp_path, tie_word_embeddings=True)).share_embeddings_and_output_weights
    qwen = config_file(tmp_path, model_type="qwen2", sliding_window=131072, use_sliding_window=False)
    assert catalog.load_model(qwen).kv_channels == 128
    assert catalog.load_model(config_file(tmp_path, model_type="mistral", sliding_window=None)).num_layers == 32


def test_a_model_file_with_windows(tmp_path):
    data = json.loads((DATA / "models" / "llama-3-8b.json").read_text())
    path = tmp_path / "model.json"
    pattern = [1, 0] * 16
    path.write_text(json.dumps(data | {"window_tokens": 128, "window_attn_skip_freq": pattern}))
    assert catalog.load_model(path).window_attn_skip_freq == tuple(pattern)
    path.write_text(json.dumps(data | {"window_tokens": 128, "window_attn_skip_freq": 2}))
    assert catalog.load_model(path).num_windowed_layers == 16
    for wrong, says in (("2", 'window_attn_skip_freq is "2", a whole number is needed'), ([1], "has 1 entries")):
        path.write_text(json.dumps(data | {"window_tokens": 128, "window_attn_skip_freq": wrong}))
        with pytest.raises(InvalidInputError, match=says):
            catalog.load_model(path)


EIGHT = Experts(num_experts=8, topk=2, ffn_hidden_size=48)
WINDOWED = {"use_sliding_window": True, "sliding_window": 1024}
YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 128, **EXPERTS}
OLD_DEEPSEEK = {"model_type": "deepseek", "n_routed_experts": 16, **EXPERTS}
LATENTS = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6,
    "head_dim": "gone",
}  # fmt: skip
OF_DEEPSEEK = {
    "n_routed_experts": 64, "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}  # fmt: skip
WRITTEN_BACK = {
    "llama": {},
    "tied": {"tie_word_embeddings": True, "rope_theta": 10000.0},
    "llama 3.1": {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, **rotation._LLAMA_3}},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": "gone"},
    "mistral": {"model_type": "mistral", "sliding_window": 4096, "head_dim": 64},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, late windows": {"model_type": "qwen2", "max_window_layers": 20, **WINDOWED},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-5},
    "qwen3, windows": {"model_type": "qwen3", "head_dim": 128, "max_window_layers": 0, **WINDOWED},
    "YaRN": {"rope_scaling": {**YARN, "beta_fast": 16.0, "truncate": False}},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, **EXPERTS},
    "qwen2_moe, no biases": {
        "model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, "qkv_bias": False, **EXPERTS,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True, "mlp_only_layers": [0, 5], **EXPERTS,
    },
    "deepseek_v2": {
        **LATENTS, **OF_DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "scoring_func": "softmax",
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **LATENTS, **OF_DEEPSEEK, "model_type": "deepseek_v3", "q_lora_rank": 24, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 128, "swiglu_limit": 5.0,
        "rope_scaling": {**YARN, "truncate": False}, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 16, "attention_bias": True,
    },
    "gpt_oss, plain": {
        "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 128,
        "attention_bias": True,
    },
    "deepseek_v3, dense": {**LATENTS, "model_type": "deepseek_v3", "q_lora_rank": 24, "first_k_dense_replace": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_BACK)
def test_a_config_that_is_written_says_what_was_read(name, tmp_path):
    path = config_file(tmp_path, max_position_embeddings=8192, **WRITTEN_BACK[name])
    shape, architecture = catalog.load_model(path), hugging_face.load_architecture(path)
    assert architecture.not_trained == ()
    config = written.config("here", shape, architecture)
    assert config["model_type"] == WRITTEN_BACK[name].get("model_type", "llama")
    assert replace(hugging_face.model_shape("there", config), source="") == replace(shape, source="")
    assert hugging_face.architecture("there", config) == architecture


@pytest.mark.parametrize(
    ("of_shape", "of_architecture", "says"),
    [
        (
            {"gated_linear_unit": False},
            {},
            "here has no gated MLP: none of llama, mistral, qwen2, qwen3, smollm3, glm, glm4, granite, gemma,",
        ),
        ({}, {"normalization": "LayerNorm"}, "no RMSNorm"),
        ({}, {"position_embedding_type": "none"}, "positions by none"),
        ({}, {"rotary_percent": 0.5}, "rotary_percent 0.5"),
        ({}, {"qk_layernorm": True, "add_qkv_bias": True}, "biases and norms of queries and keys"),
        ({"window_tokens": 8}, {"disable_bias_linear": False}, "biases and windows"),
        ({"window_tokens": 8, "window_attn_skip_freq": 2}, {}, "windows in some layers"),
        ({"mtp_num_layers": 1}, {}, "here has modules that predict further tokens"),
        ({}, {"softmax_type": "learnable"}, "softmax_type learnable"),
        ({"experts": EIGHT}, {}, "here has .*, which mixtral has not"),
        (
            {"experts": replace(EIGHT, shared_ffn_hidden_size=9)},
            {},
            "here has shared_gate False, which qwen2_moe has not",
        ),
        (
            {"experts": EIGHT},
            {"moe_router_score_function": "sigmoid", "qk_layernorm": True},
            "here has moe_router_score_function 'sigmoid', which qwen3_moe has not",
        ),
        ({"experts": EIGHT}, {"disable_bias_linear": False}, "biases and exper"),
    ],
)
def test_what_no_family_has_is_not_written(of_shape, of_architecture, says, tmp_path):
    path = config_file(tmp_path)
    shape, architecture = catalog.load_model(path), hugging_face.load_architecture(path)
    with pytest.raises(DynamicCPError, match=says):
        written.config(
            "here", replace(shape, **of_shape), replace(architecture, flags={**architecture.flags, **of_architecture})
        )


def test_which_layers_have_a_window(tmp_path):
    shape = catalog.load_model(config_file(tmp_path, num_hidden_layers=4))
    for window, skip, expected in ((0, 0, "0000"), (8, 0, "1111"), (8, 2, "1010"), (8, (0, 1, 1, 0), "0110")):
        one = replace(shape, window_tokens=window, window_attn_skip_freq=skip)
        assert "".join(str(int(has_one)) for has_one in one.windowed_layers) == expected
        assert sum(one.windowed_layers) == one.num_windowed_layers


def test_a_hugging_face_encoder_attends_to_whole_samples(tmp_path):
    # 12 layers of BERT-base: 85 million weights, in 4 matrices of attention and 2 of the MLP.
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    changes = {"num_key_value_heads": "gone", "tie_word_embeddings": "gone", **sizes}
    bert = catalog.load_model(config_file(tmp_path, model_type="bert", **changes))
    assert (bert.causal_attention, bert.share_embeddings_and_output_weights, bert.num_query_groups) == (False, True, 12)
    assert bert.num_layers * bert.linear_weights_per_layer == 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert catalog.load_model(config_file(tmp_path, model_type="bert", is_decoder=True, **changes)).causal_attention
    of_bert = hugging_face.load_architecture(tmp_path / "config.json")
    assert of_bert is not None
    assert "model_type bert: an encoder" in of_bert.not_trained
    changes |= {"model_type": "modernbert", "global_attn_every_n_layers": 1}
    modern = catalog.load_model(config_file(tmp_path, **changes))
    assert (modern.causal_attention, modern.gated_linear_unit) == (False, True)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": "gone", "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "first_k_dense_replace": 61, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "rope_scaling": None,
}  # fmt: skip
"""As published, but that no layer has experts."""


def test_latent_attention_of_a_config(tmp_path):
    path = config_file(tmp_path, **DEEPSEEK_V3)
    model = catalog.load_model(path)
    assert (model.q_lora_rank, model.kv_lora_rank, model.kv_channels, model.v_head_dim) == (1536, 512, 192, 128)
    assert (model.num_query_groups, model.mtp_num_layers) == (128, 1)
    # 187 107 328 weights of attention in a layer, 2048 of them of norms (arXiv 2412.19437, section 4.2, has the sizes).
    assert model.linear_weights_per_layer - model.mlp_weights_per_layer == 187_107_328 - 2048
    architecture = hugging_face.load_architecture(path)
    assert architecture is not None
    assert architecture["qk_layernorm"]
    assert not [one for one in architecture.not_trained if "expert" in one or "lora" in one or "head_dim" in one]
    lite = config_file(tmp_path, **DEEPSEEK_V3 | {"model_type": "deepseek_v2", "q_lora_rank": None, "head_dim": 64})
    model = catalog.load_model(lite)
    assert (model.q_lora_rank, model.kv_channels) == (0, 192)


def diffusers_file(tmp_path, **changes):
    path = tmp_path / "config.json"
    wan = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40, "model_type": None}
    data = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], **wan, **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "gone"}))
    return path


def test_a_diffusers_config(tmp_path):
    path = diffusers_file(tmp_path)
    wan = catalog.load_model(path)
    assert replace(wan, source="") == replace(catalog.load_model("wan2.1-t2v-14b"), source="")
    assert hugging_face.load_architecture(path) is None
    small = {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28, "ffn_dim": "gone"}
    image = catalog.load_model(diffusers_file(tmp_path, _class_name="DiTTransformer2DModel", **small))
    assert image.linear_weights_per_layer == 12 * 1152**2
    assert not image.causal_attention
    with pytest.raises(DynamicCPError, match=r"lacks ffn_dim: it needs num_layers, .*, ffn_dim"):
        catalog.load_model(diffusers_file(tmp_path, ffn_dim="gone"))
    with pytest.raises(DynamicCPError, match="_class_name is 'FluxTransformer2DModel', known are CogVideoX"):
        catalog.load_model(diffusers_file(tmp_path, _class_name="FluxTransformer2DModel"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "modernbert"}, "global_attn_every_n_layers is 3, only attention over whole sequences"),
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox', known are llama, mistral, qwen2, qwen3"),
        ({"model_type": "gone"}, "model_type is None"),
        ({"hidden_size": "gone"}, "lacks hidden_size"),
        ({"model_type": "mistral", "num_key_value_heads": "gone"}, "lacks num_key_value_heads"),
        ({"model_type": "qwen3"}, "lacks head_dim"),
        ({"sliding_window": 4096}, "sliding_window is 4096, which model_type llama does not have"),
        ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window is 'all', it must be a whole number"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1, it must be at least 0"),
        ({"model_type": "gemma2", "sliding_window": 9, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            {"model_type": "mistral", "sliding_window": 9, "layer_types": ["sliding_attention"]},
            "1 entries, num_hidden_l",
        ),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention, only full_attent",
        ),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', it must be a list"),
        ({"num_attention_heads": 30}, "hidden_size 4096 is not a multiple of num_attention_heads 30: give head_dim"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5, it must be a whole number"),
        ({"vocab_size": True}, "vocab_size is True, it must be a whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"num_key_value_heads": 5}, r"config.json: num_attention_heads 32 is not .* of num_key_value_heads 5"),
        ({"hidden_size": -4096}, "config.json: hidden_size is -4096, it must be at least 0"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0, the smallest allowed value is 1"),
        ({"model_type": "qwen3", "head_dim": 0}, "config.json: head_dim is 0, .*: give 1 <= head_dim"),
        ({"vocab_size": 2**40}, "config.json: vocab_size is 1099511627776, the largest allowed value"),
        ({"num_local_experts": 8}, r"'llama' has experts \(num_local_experts 8\), which cannot be priced yet"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        (
            DEEPSEEK_V3 | {"first_k_dense_replace": 3},
            "lacks moe_intermediate_size: it needs n_routed_experts, num_experts_per_tok",
        ),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "lacks kv_lora_rank: it needs kv_lora_rank, qk_nope_head_dim"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, it must be at"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers is 3, it must be a list of"),
        (OLD_DEEPSEEK | {"moe_layer_freq": 0}, "moe_layer_freq is 0, it must be at"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, it must be at least 1"),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": 0},
            "query_pre_attn_scalar is 0: scores are divided by its root",
        ),
    ],
)
def test_a_config_that_does_not_fit_names_the_key(tmp_path, changes, says):
    path = config_file(tmp_path, **changes)
    with pytest.raises(DynamicCPError, match=says):
        catalog.load_model(path), hugging_face.load_architecture(path)


@pytest.mark.parametrize("number", [10**30, 2**31 - 1])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"model_type": "mistral", "sliding_window": 9}, {"model_type": "smollm3"}, {"model_type": "qwen3_next"},
        {"model_type": "granitemoehybrid"},
    ],
)  # fmt: skip
def test_more_layers_than_can_be_listed_are_refused_at_once(tmp_path, changes, number):
    path = config_file(tmp_path, num_hidden_layers=number, **changes)
    for load in (
        catalog.load_model,
        *([hugging_face.load_architecture] if changes.get("model_type") == "smollm3" else ()),
    ):
        with pytest.raises(InvalidInputError, match=rf"num_hidden_layers is {number}, the largest allowed value is"):
            load(path)
    with pytest.raises(InvalidInputError, match=f"num_layers is {number}, the largest allowed value is"):
        replace(catalog.load_model("qwen3-next-80b-a3b"), num_layers=number)


SIXTEEN = Experts(num_experts=16, topk=4, ffn_hidden_size=48)


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            Experts(num_experts=8, topk=2, ffn_hidden_size=14336),
        ),
        (
            QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
            replace(SIXTEEN, layer_freq=(0, 0, *[0, 1] * 15)),
        ),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, **EXPERTS},
            replace(SIXTEEN, shared_ffn_hidden_size=96, shared_gate=True),
        ),
        (
            OLD_DEEPSEEK | {"n_shared_experts": 2, "first_k_dense_replace": 1},
            replace(SIXTEEN, shared_ffn_hidden_size=96, layer_freq=(0, *[1] * 31)),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_experts_of_a_config(tmp_path, changes, experts):
    model = catalog.load_model(config_file(tmp_path, **changes))
    assert model.experts == experts
    assert model.ffn_hidden_size == 14336


def test_gpt_oss_has_windows_and_experts(tmp_path):
    changes = {
        "num_hidden_layers": 4, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 64, "intermediate_size": 2880,
    }  # fmt: skip
    path = config_file(tmp_path, model_type="gpt_oss", **changes)
    model = catalog.load_model(path)
    assert (model.window_tokens, model.window_attn_skip_freq) == (128, 2)
    assert model.experts == Experts(num_experts=32, topk=4, ffn_hidden_size=2880)
    architecture = hugging_face.load_architecture(path)
    assert architecture["softmax_type"] == "learnable"
    assert architecture["quick_geglu"]
    assert not architecture["disable_bias_linear"]


def test_deepseek_v3_has_latents_and_experts(tmp_path):
    """As many parameters as its report says: 671 billion, 37 of them for each token (arXiv 2412.19437, section 4.2)."""
    experts = {"first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_shared_experts": 1}
    path = config_file(tmp_path, **DEEPSEEK_V3 | experts | {"num_experts_per_tok": 8, "num_nextn_predict_layers": 0})
    model = catalog.load_model(path)
    assert model.num_parameters / 1e9 == pytest.approx(671, abs=0.5)
    active = model.num_parameters - sum(model.moe_layers) * (256 - 8) * 3 * 7168 * 2048
    assert active / 1e9 == pytest.approx(37.5, abs=0.5)
    whole = catalog.load_model(config_file(tmp_path, **DEEPSEEK_V3 | experts | {"num_experts_per_tok": 8}))
    assert (whole.num_parameters - model.num_parameters) / 1e9 == pytest.approx(11.5, abs=0.5), "a layer with experts"
    assert hugging_face.load_architecture(path)["moe_router_score_function"] == "sigmoid"


def test_an_unknown_name_lists_the_known_ones():
    says = r"'h1000' is none .*did you mean .*: use a100-40gb, a100-80gb, b200, cpu, gb200, gb300, h100, h100-local"
    with pytest.raises(InvalidInputError, match=says):
        catalog.load_hardware("h1000")
    with pytest.raises(InvalidInputError, match="llama-2-13b, llama-2-70b, llama-2-7b, llama-3-70b, llama-3-8b"):
        catalog.load_model("gpt")


def test_a_pipe_gives_the_shape_and_the_architecture():
    """As of `--model <(command)`, which can be read once only."""
    readable, writable = os.pipe()
    with open(readable, "rb"), open(writable, "w") as pipe:
        pipe.write(json.dumps(LLAMA_CONFIG))
        pipe.close()
        model, architecture = (
            load(f"/dev/fd/{readable}") for load in (catalog.load_model, hugging_face.load_architecture)
        )
    assert (model.hidden_size, architecture["normalization"]) == (LLAMA_CONFIG["hidden_size"], "RMSNorm")
    with pytest.raises(TypeError, match="does not support item assignment"):
        architecture.flags["normalization"] = "LayerNorm"


def broken(kind, change):
    name = {"hardware": "cpu", "models": "llama-3-8b"}[kind]
    data = json.loads((DATA / kind / f"{name}.json").read_text())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("hardware", "", "is not JSON"),
        ("hardware", "[1]", "holds a list, an object is needed"),
        ("hardware", broken("hardware", lambda d: d.pop("peak_flops_per_s")), "lacks peak_flops_per_s"),
        ("hardware", broken("hardware", lambda d: d.update(colour="red")), "unknown entries colour"),
        ("hardware", broken("hardware", lambda d: d.update(name=3)), "name is 3"),
        ("hardware", broken("hardware", lambda d: d.update(peak_flops_per_s=1e9)), "must be {.value.: number"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value="1")), "'1', it must be a number"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value=-1)), "number >= 0"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(value=0)), "must be > 0"),
        ("hardware", broken("hardware", lambda d: d["linear_extra_tokens"].update(value=float("nan"))), "number >= 0"),
        ("hardware", broken("hardware", lambda d: d["peak_flops_per_s"].update(source=" ")), "has no source"),
        ("models", broken("models", lambda d: d.pop("num_layers")), "lacks num_layers"),
        ("models", broken("models", lambda d: d.update(num_layers=32.0)), "num_layers is 32.0"),
        ("models", broken("models", lambda d: d.update(num_layers=0)), "num_layers is 0"),
        ("models", broken("models", lambda d: d.update(colour=8)), "unknown entries colour"),
        ("models", broken("models", lambda d: d.update(experts=8)), "experts is 8, an object is needed"),
        ("models", broken("models", lambda d: d.update(experts={"topk": 1})), "experts lacks num_experts, ffn"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, kind, text, says):
    path = tmp_path / "broken.json"
    path.write_text(text)
    load = catalog.load_hardware if kind == "hardware" else catalog.load_model
    with pytest.raises(DynamicCPError, match=says):
        load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("norm_epsilon"), "architecture lacks norm_epsilon: known are normalization"),
        (lambda d: d.update(colour="red"), "architecture has unknown colour"),
        (lambda d: d.update(rotary_base=1.5), "rotary_base is 1.5, it must be of type int"),
        (lambda d: d.update(norm_epsilon="1e-5"), "norm_epsilon is '1e-5', it must be of type float"),
        (lambda d: d.update(add_qkv_bias=1), "add_qkv_bias is 1, it must be of type bool"),
        (lambda d: d.update(normalization="rms"), "normalization is 'rms', it must be one of LayerNorm, RMSNorm"),
    ],
)
def test_a_malformed_architecture_is_named(tmp_path, change, says):
    path = tmp_path / "broken.json"
    path.write_text(broken("models", lambda d: change(d["architecture"])))
    assert catalog.load_model(path).num_layers == 32
    with pytest.raises(InvalidInputError, match=says):
        hugging_face.load_architecture(path)
    assert hugging_face.load_architecture("wan2.1-t2v-14b") is None


def test_an_unreadable_file(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot read"):
        catalog.load_hardware(tmp_path / "missing.json")
    with pytest.raises(InvalidInputError, match="cannot read"):
        catalog.load_model(f"{tmp_path}/")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="is not JSON"):
        catalog.load_model(tmp_path / "binary.json")


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1, 2, 3]}, "kv_lora_rank": 512}, "linear attention"),
        ("jamba", {"mamba_d_state": 16, "num_experts": 16}, "state spaces"),
        ("lfm2_moe", {"conv_L_cache": 3, "num_experts": 32}, "short convolutions"),
        ("recurrent_gemma", {"lru_width": 2560}, "recurrent layers"),
        ("deepseek_v32", {"index_topk": 2048, "kv_lora_rank": 512, "n_routed_experts": 256}, "sparse attention"),
        ("deepseek_v3", {"index_topk": 2048, "kv_lora_rank": 512}, "sparse attention"),
        ("llama4_text", {"attention_chunk_size": 8192, "num_local_experts": 16}, "attention within chunks"),
        ("t5", {"is_encoder_decoder": True, "num_decoder_layers": 12}, "an encoder beside the decoder"),
        ("dbrx", {"ffn_config": {"moe_num_experts": 16}}, "experts"),
    ],
)
def test_a_refused_config_is_told_what_its_layers_are_first(tmp_path, model_type, changes, says):
    """Experts and latents of others are priced; what makes it another model is how its tokens meet."""
    path = config_file(tmp_path, model_type=model_type, **changes)
    with pytest.raises(UnsupportedFeatureError) as raised:
        catalog.load_model(path)
    has = re.search(rf"model_type '{model_type}' has (.*), which cannot be priced yet", str(raised.value))
    assert has is not None, raised.value
    assert re.fullmatch(rf"{says} \([a-zA-Z_]+( [0-9]+| True)?\)", has[1]), has[1]


def test_a_file_from_before_a_price_says_once_what_it_lacks(tmp_path, caplog):
    data = json.loads((DATA / "hardware" / "h100.json").read_text())
    old = {name: entry for name, entry in data.items() if not name.startswith("host_")}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    for _ in range(2):
        assert catalog.load_hardware(path).host_forward_s_per_layer == 0
    (said,) = caplog.messages
    assert "old.json states 37 of 43 numbers, without host_forward_s_per_layer, host_backward_s_per_layer" in said
    caplog.clear()
    path.write_text(json.dumps({**old, "name": "h100", "base": "h100"}))
    assert catalog.load_hardware(path).host_forward_s_per_layer > 0
    assert not caplog.messages
