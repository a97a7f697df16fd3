"""Parameters of hybrids by their config.json, against those that transformers makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from dynamic_cp.models import hugging_face

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
