"""Experts, latents and linear attention of a checkout: validated flags are checked, and what the model is planned as.

Also who builds a checkout's layers, and that its log has the losses of our routers.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.flags.experts import DEFAULTS
from megatron.dynamic_cp.repairs import releases
from megatron.dynamic_cp.step.schedule import LayerRouting, Routing
from megatron.integrations.lm_adaptor import counts, flags, hooks
from megatron.trainer.flags.validation import planning_settings
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.megatron_lm.test_flags import parse, planned
from tests.trainer.test_experts import parsed

SIZES = {
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 16,
    "padded_vocab_size": 128,
    "swiglu": True,
    "untie_embeddings_and_output_weights": False,
}
"""Of a small dense model, as a checkout has validated them."""


LATENT = {
    **SIZES,
    "multi_latent_attention": True,
    "num_layers": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
"""As Megatron-LM validates them: it does not say KV heads, and another width of a head."""


GATED_DELTA = {
    **SIZES,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_layers": 4,
}


def validated(**values: Any) -> Namespace:
    """Return arguments as Megatron-LM validates them: what is shared out as tensors are is said with a number."""
    args = parse("--dynamic-cp")
    theirs = {**DEFAULTS, "num_layers": 2, "add_bias_linear": False, "tensor_model_parallel_size": 1}
    theirs |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": False}
    theirs |= {"group_query_attention": False, "num_attention_heads": 4}
    positions = {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": None}
    positions |= {"use_rope_scaling": False, "no_rope_freq": None}
    return Namespace(**{**vars(args), **theirs, **positions, **values})


def hybrid(**values: Any) -> Namespace:
    return validated(**{**GATED_DELTA, **values})


EXPERTS = {"num_experts": 4}


@pytest.mark.parametrize(
    ("model", "values", "says"),
    [
        (
            EXPERTS,
            {"num_experts": 6, "expert_model_parallel_size": 4},
            "--num-experts 6 is not a multiple of --expert-model-pa",
        ),
        (
            EXPERTS,
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            "--expert-tensor-parallel-size 2 is not supported: experts are shared out whole; give 1",
        ),
        (EXPERTS, {"moe_router_load_balancing_type": "sinkhorn"}, "it would depend on what is packed together"),
        (
            EXPERTS,
            {"add_bias_linear": True, "swiglu": True, "bias_swiglu_fusion": True},
            "--num-experts with biases and --bias-swiglu-fusion is not supported",
        ),
        (EXPERTS, {"moe_permute_fusion": True}, "--moe-permute-fusion .* padding is never sent to experts"),
        (LATENT, {"qk_pos_emb_head_dim": 7}, "--qk-pos-emb-head-dim is 7, RoPE rotates pairs"),
        (LATENT, {"v_head_dim": 40}, "--v-head-dim is 40 and --kv-channels 32, queries and keys have 32 channels"),
        (
            LATENT,
            {"attention_output_gate": True},
            "--multi-latent-attention with --attention-output-gate is not supported",
        ),
        (
            LATENT,
            {"add_bias_linear": False, "add_qkv_bias": True},
            "--multi-latent-attention with --add-qkv-bias is not supported",
        ),
        (
            GATED_DELTA,
            {"experimental_attention_variant": "dsa"},
            "--experimental-attention-variant 'dsa' is not supported",
        ),
        (GATED_DELTA, {"linear_attention_freq": [1, 0]}, "linear-attention-freq. .* is of 2 layers, the model has 4"),
        (GATED_DELTA, {"swiglu": False}, "another activation than that of --swiglu"),
        (
            GATED_DELTA,
            {"recompute_modules": ["core_attn", "gdn_norm_out"]},
            "--recompute-modules gdn_norm_out is not supported: the TransformerConfig of checkouts knows it from 0.19",
        ),
        (
            GATED_DELTA,
            {"hybrid_override_pattern": "G*G-"},
            "--hybrid-override-pattern is not supported: checkouts train layers of a pattern from 0.18 on",
        ),
    ],
)
def test_validated_flags_are_checked(
    model: dict[str, Any], values: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "_imported", lambda: "0.16.1")
    flags.refuse_loaded(validated())
    flags.refuse_loaded(validated(**model))
    with pytest.raises(DynamicCPError, match=says):
        flags.refuse_loaded(validated(**model | values))


def test_a_checkouts_latents_are_planned() -> None:
    args = validated(**LATENT)
    flags.refuse_loaded(args)
    shape = flags.model_shape(args)
    assert (shape.kv_lora_rank, shape.q_lora_rank, shape.qk_head_dim, shape.v_head_dim) == (32, 0, 24, 16)
    assert (shape.num_query_groups, shape.kv_channels, flags.with_heads(args).kv_channels) == (4, 32, 32)
    assert (args.num_query_groups, args.kv_channels) == (1, 16), "Megatron-LM's own stay"


def test_biases_of_all_linear_layers_set_those_of_qkv_unasked() -> None:
    """As Megatron-LM validates a command line without --disable-bias-linear: nobody gave --add-qkv-bias."""
    flags.refuse_loaded(validated(**LATENT, add_bias_linear=True, add_qkv_bias=True))


@pytest.mark.parametrize("freq", [2, [1, 0, 1, 0]])
@pytest.mark.parametrize("name", ["gated_delta_net", "gdn"], ids=["until_0_19", "since_0_20"])
def test_a_checkouts_gated_delta_nets_are_planned(name: str, freq: int | list[int]) -> None:
    args = hybrid(experimental_attention_variant=name, linear_attention_freq=freq)
    flags.refuse_loaded(args)
    shape = flags.model_shape(args)
    linear = shape.linear_attention
    assert linear is not None
    assert (linear.kind, linear.num_heads, linear.num_groups) == ("gated_delta_net", 4, 2)
    assert (linear.key_size, linear.value_size, linear.kernel_size) == (8, 16, 4)
    assert shape.linear_attention_freq == (freq if isinstance(freq, int) else tuple(freq))


@pytest.mark.parametrize(
    ("symbols", "says"),
    [("M-M*", ""), ("M-|M*", r"has \|: its symbols are"), ("M-M*/M*", "has /: its symbols are")],
    ids=["supported", "borders_of_stages", "modules"],
)
def test_a_checkouts_pattern_is_planned(symbols: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.18 on; its flag of heads may be left out."""
    monkeypatch.setattr(releases, "_imported", lambda: "0.18.2")
    sizes = {"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_num_heads": None}
    names = {"hybrid_layer_pattern": symbols, "hybrid_override_pattern": None, "experimental_attention_variant": None}
    args = hybrid(**sizes, **names, swiglu=False, squared_relu=True)
    if says:
        with pytest.raises(DynamicCPError, match=says):
            flags.refuse_loaded(args)
        return
    flags.refuse_loaded(args)
    shape = flags.model_shape(args)
    assert shape.linear_attention is not None
    assert (shape.layer_pattern, shape.linear_attention.kind) == (symbols, "mamba2")
    assert (shape.linear_attention.num_heads, shape.linear_attention.key_size) == (8, 16)


def test_norms_of_gated_delta_nets_are_recomputed_since_0_19(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_imported", lambda: "0.19.2")
    flags.refuse_loaded(hybrid(recompute_modules=["gdn_norm_out"]))


def test_the_stock_specs_of_patterns_may_be_named() -> None:
    args = hybrid(spec=["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"])
    flags.refuse_loaded(args)
    args.spec[1] = "gdp_stack_spec"
    with pytest.raises(DynamicCPError, match="--spec is not supported: --dynamic-cp has its own layer specification"):
        flags.refuse_loaded(args)


def test_a_pattern_has_a_model_of_its_own() -> None:
    """Its checkpoints are those of patterns, also of releases that would look for a class of theirs."""
    adaptor = hooks.Adaptor(get_args=Namespace)
    theirs = hooks.hybrid_model(adaptor, SimpleNamespace)
    assert theirs(size=1).size == 1
    assert isinstance(theirs(size=1), SimpleNamespace)
    assert hooks.gpt_to_hybrid_load(adaptor, lambda *given: given, "args", "saved", "model") == (
        "args",
        "saved",
        "model",
    )
    adaptor.asked = Namespace()
    ours, gpt = Namespace(hybrid_layer_pattern="M-M*"), Namespace(hybrid_layer_pattern=None)
    assert hooks.gpt_to_hybrid_load(adaptor, None, ours, Namespace(hybrid_override_pattern="M-M*"), []) == (None, False)
    with pytest.raises(DynamicCPError, match="the checkpoint is of a model without --hybrid-layer-pattern"):
        hooks.gpt_to_hybrid_load(adaptor, None, ours, gpt, [])
    assert hooks.gpt_to_hybrid_load(adaptor, lambda *given: given, gpt, ours, []) == (gpt, ours, [])


def test_a_way_to_share_layers_needs_some() -> None:
    with pytest.raises(DynamicCPError, match="--dynamic-cp-state-exchange states is for layers that this model does"):
        planned("--dynamic-cp-state-exchange", "states")


def test_specs_of_layers_are_the_checkouts_own_without_dynamic_cp() -> None:
    """Ours are made by GPTModel: the checkout's need TransformerEngine."""
    adaptor = hooks.Adaptor(get_args=Namespace)
    for asked, expected in ((None, ("config", 1)), (Namespace(), None)):
        adaptor.asked = asked
        assert (
            hooks.variant_spec(adaptor, lambda config, vp_stage: (config, vp_stage), "config", vp_stage=1) == expected
        )


def test_a_checkouts_experts_are_planned() -> None:
    arguments = parsed("--num-experts 8 --expert-model-parallel-size 2").arguments
    settings = planning_settings(Namespace(**arguments), auto_places=False)
    assert settings.topology.ep_size == 2


def logged_losses(num_micro_batches: int) -> dict[str, float]:
    """Return what Megatron-LM would log on a rank of two lanes: it divides by the micro-batches of its own count."""
    initialize_model_parallel()
    config = SimpleNamespace(moe_router_load_balancing_type="seq_aux_loss", num_layers=3)
    router = SimpleNamespace(layer_number=2, number_in_model=2, config=config, weight=torch.zeros(1))
    routing = Routing(
        layers={2: LayerRouting(aux_loss=1.25, z_loss=4.5, imbalance=2.0)}, has_aux_loss=True, has_z_loss=True
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(counts, "routers", lambda chunks: [router])
        counts.tell_tracker(routing, [], num_micro_batches)
    totals: dict[str, Any] = {}
    names = ["seq_load_balancing_loss", "z_loss"]
    if counts.checkout.TRACKER_OF_ROUTERS.here:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        report = get_moe_metrics_tracker().report
    else:
        report = moe_utils.track_moe_metrics
    report(
        loss_scale=1 / num_micro_batches,
        iteration=1,
        total_loss_dict=totals,
        force_initialize=True,
        track_names=names,
        num_layers=3,
        moe_layer_freq=[0, 1, 0],
    )
    return {name: float(value) for name, value in totals.items()}


def test_the_log_of_a_checkout_has_the_means_over_tokens() -> None:
    for logged in run_ranks(2, logged_losses, 5):
        assert logged == pytest.approx({"seq_load_balancing_loss": 1.25, "z_loss": 4.5})
