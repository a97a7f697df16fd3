"""Megatron-LM's command line with our flags: added, refused, translated, and validated with the checkout's own."""

import argparse
import logging
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from dynamic_cp.errors import DynamicCPError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import CP_COMM_TYPES, RecomputedLayers
from megatron.dynamic_cp.flags.experts import DEFAULTS
from megatron.dynamic_cp.flags.supported import UNSUPPORTED
from megatron.dynamic_cp.repairs import releases
from megatron.dynamic_cp.step.schedule import LayerRouting, Routing
from megatron.integrations.lm_adaptor import counts, flags, hooks
from megatron.trainer.flags.validation import planning_settings
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.trainer.commandline import parsed


def theirs() -> argparse.ArgumentParser:
    """Return a parser with Megatron-LM's forms of flags that we have, too."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cp-comm-type", nargs="+", type=str, default=["p2p"])
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int, default=None)
    parser.add_argument("--distributed-backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--hybrid-context-parallel", action="store_true")
    parser.add_argument("--micro-batch-size", type=int, default=None)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--fp8-format", dest="fp8", default=None)
    parser.add_argument("--num-experts", type=int, default=None)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--rerun-mode", default="validate_results")
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--no-create-attention-mask-in-dataloader", action="store_false", default=True)
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--fim-data", action="store_true")
    parser.add_argument("--iterations-to-skip", nargs="+", type=int, default=[])
    parser.add_argument("--dataloader-type", choices=["single", "cyclic", "external"], default=None)
    parser.add_argument(
        "--transformer-impl",
        choices=["local", "transformer_engine", "inference_optimized"],
        default="transformer_engine",
    )
    return parser


def parse(*argv: str) -> argparse.Namespace:
    return flags.add_flags(flags.accept_auto(theirs())).parse_args(["--attention-dropout", "0", *argv])


def test_flags_of_both_keep_megatron_lms_form() -> None:
    args = parse("--dynamic-cp", "--cp-comm-type", "p2p", "a2a", "--max-seqlen-per-dp-cp-rank", "auto")
    assert args.cp_comm_type == ["p2p", "a2a"]
    assert args.distributed_backend == "nccl"
    assert (args.dynamic_cp, args.max_seqlen_per_dp_cp_rank, args.dynamic_cp_lookahead) == (True, "auto", 2)
    assert args.hybrid_context_parallel is False, "a flag of Megatron-LM was replaced by a refusal"


def test_translation_says_one_to_megatron_lm_and_remembers_the_rest() -> None:
    args = parse("--dynamic-cp", "--context-parallel-size", "4", "--max-seqlen-per-dp-cp-rank", "64")
    asked = flags.translate(args)
    assert (asked.context_parallel_size, asked.max_seqlen_per_dp_cp_rank) == (4, 64)
    assert {s.name: getattr(args, s.name) for s in flags.FORCED if hasattr(args, s.name)} == {
        "context_parallel_size": 1, "cp_comm_type": ["p2p"], "max_seqlen_per_dp_cp_rank": None,
        "calculate_per_token_loss": True, "moe_token_dispatcher_type": "alltoall", "rerun_mode": "disabled",
    }  # fmt: skip
    assert args.micro_batch_size == 1


def test_what_was_given_and_is_overridden_is_said() -> None:
    """With both values and the reason; what nobody gave, and what is so already, is not."""
    argv = ("--dynamic-cp", "--rerun-mode", "validate_results", "--moe-token-dispatcher-type=flex", "--cp-comm-type")
    argv += ("a2a", "--context-parallel-size", "4", "--no-create-attention-mask-in-dataloader")
    args = parse(*argv)
    said = flags.overridden(flags.translate(args), argv)
    assert said == [
        (
            logging.INFO,
            "--context-parallel-size 4 is for plans, Megatron-LM gets 1: every micro-batch brings its own CP group; "
            "the flag's value is the CP size of the static plan",
        ),
        (logging.INFO, "--cp-comm-type a2a is for plans, Megatron-LM gets p2p: each bucket of the plan has its own"),
        (
            logging.WARNING,
            "--moe-token-dispatcher-type flex becomes alltoall: megatron-core accepts variable_seq_lengths with it "
            "only, also without experts",
        ),
        (
            logging.WARNING,
            "--rerun-mode validate_results becomes disabled: a step cannot be run again from its micro-batches; "
            "losses are still checked for NaN",
        ),
    ]
    assert flags.overridden(flags.translate(parse("--dynamic-cp")), ["--dynamic-cp"]) == []
    same = ("--dynamic-cp", "--rerun-mode", "disabled", "--context-parallel-size", "1")
    assert flags.overridden(flags.translate(parse(*same)), same) == []


def test_every_override_names_the_flag_that_sets_it() -> None:
    actions = {option: action.dest for action in theirs()._actions for option in action.option_strings}
    named = {setting.flag: setting.name for setting in flags.FORCED}
    assert {flag: name.replace("create", "no_create") for flag, name in named.items()} == {
        flag: actions[flag] for flag in named
    }


def test_the_token_limit_is_a_number_or_auto() -> None:
    assert parse("--max-seqlen-per-dp-cp-rank", "96").max_seqlen_per_dp_cp_rank == 96
    with pytest.raises(SystemExit):
        parse("--max-seqlen-per-dp-cp-rank", "many")


def test_an_exchange_is_named_as_megatron_lm_does() -> None:
    assert flags.exchange_of(parse("--dynamic-cp", "--cp-comm-type", "allgather")) == "all_gather"


def planned(*argv: str, **validated: Any) -> flags.Planned:
    asked = flags.translate(args := parse("--dynamic-cp", "--max-seqlen-per-dp-cp-rank", "auto", *argv))
    values = {
        "world_size": 2, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None, "sequence_parallel": False, "num_attention_heads": 4,
        "group_query_attention": False, "seq_length": 64, "global_batch_size": 4, "num_layers": 4,
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "bf16": True,
        "fp32_residual_connection": False, "use_distributed_optimizer": False, "overlap_grad_reduce": False,
        "overlap_param_gather": False, "distributed_timeout_minutes": 10,
    }  # fmt: skip
    return flags.planned(asked, argparse.Namespace(**{**vars(args), **values, **validated}))


def test_auto_is_found_once_the_memory_is_known() -> None:
    found = planned()
    assert found.settings.max_tokens_per_rank is None
    assert found.arguments["max_seqlen_per_dp_cp_rank"] == "auto", "Megatron-LM itself gets none"
    full = {"recompute_granularity": "full", "recompute_num_layers": 1}
    assert planned(**full, recompute_method="uniform").settings.max_tokens_per_rank is None
    assert planned(**full, recompute_method="block").settings.recompute_layers == RecomputedLayers("block", 1)
    few = {"pipeline_model_parallel_size": 2, "num_layers": 4, "recompute_method": "block"}
    with pytest.raises(InvalidInputError, match=r"--recompute-num-layers 3 is more than the 2 layers .* at most 2"):
        planned(**full | few | {"recompute_num_layers": 3})


def test_without_grouped_queries_every_head_has_its_own_keys() -> None:
    """Megatron-LM leaves --num-query-groups as it was given, or at 1."""
    args = argparse.Namespace(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=3,
        group_query_attention=False, kv_channels=16, padded_vocab_size=128, swiglu=False,
        untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    assert flags.model_shape(args).num_query_groups == 4
    args.group_query_attention, args.num_query_groups = True, 2
    assert flags.model_shape(args).num_query_groups == 2


def test_latents_of_a_checkout_are_exchanged() -> None:
    latent = {"multi_latent_attention": True, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8}
    found = planned("--cp-comm-type", "auto", **latent).settings
    assert found.exchanges == (*CP_COMM_TYPES, "latent")
    assert planned("--cp-comm-type", "latent", **latent).settings.exchanges == ("latent",)
    with pytest.raises(InvalidInputError, match=r"latent can serve none .*only multi-latent attention has latents"):
        planned("--cp-comm-type", "latent")


def test_windows_of_a_checkout_are_not_placed() -> None:
    """Samples of a foreign iterator go to groups of lanes; our own trainer's `auto` has blocks, too."""
    found = planned("--cp-comm-type", "auto", window_size=(15, 0), num_layers=4).settings
    assert found.has_windows
    assert found.exchanges == found.options(64).cp_comm_types == ("a2a", "all_gather")
    with pytest.raises(UnsupportedFeatureError, match="use --cp-comm-type all_gather or a2a or auto, or --max-dynamic"):
        planned("--cp-comm-type", "p2p", window_size=(15, 0), num_layers=4)


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (("--attention-dropout", "0.1"), "set it to 0"),  # Megatron-LM's default
        (("--fp8-format", "e4m3"), ""), (("--hybrid-context-parallel",), ""), (("--iterations-to-skip", "3"), ""),
        (("--dataloader-type", "cyclic"), ""), (("--transformer-impl", "inference_optimized"), ""),
    ],
)  # fmt: skip
def test_unsupported_features_are_refused_by_flag(argv: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{argv[0]}.* is not supported.*{remedy}"):
        flags.translate(parse("--dynamic-cp", *argv))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--micro-batch-size", "2"), "--micro-batch-size is 2"),
        (("--cp-comm-type", "p2p", "a2a"), "has 2 values"),
        (("--cp-comm-type", "ring"), "ring is unknown"),
        (("--use-varlen-dataset", "--sft"), "excludes --sft"),
        (("--dynamic-cp-lookahead", "-1"), "--dynamic-cp-lookahead is -1, it must be at least 0"),
        (("--dynamic-cp-refine", "-2"), "--dynamic-cp-refine is -2, it must be at least 0"),
        (("--dynamic-cp-plan-timeout", "0"), "--dynamic-cp-plan-timeout is 0.0, it must be greater than 0"),
    ],
)
def test_values_that_cannot_be(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        flags.translate(parse("--dynamic-cp", *argv))


@pytest.mark.parametrize(
    "argv",
    [
        ("--dynamic-cp-dump", "there"), ("--dynamic-cp-replay", "there"), ("--dynamic-cp-refine", "5"),
        ("--window-sink-tokens", "4"), ("--loss-chunk-tokens", "auto"), ("--use-varlen-dataset",),
        ("--max-seqlen-per-dp-cp-rank", "auto"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_without_dynamic_cp_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match=f"{argv[0]}( auto)? needs --dynamic-cp in a checkout"):
        flags.refuse_without_effect(parse(*argv))
    flags.refuse_without_effect(parse())
    flags.refuse_without_effect(parse("--dynamic-cp", *argv))


@pytest.mark.parametrize("argv", [("--eod-id", "0"), ("--varlen-mock-dataset-config-json", "{}")])
@pytest.mark.parametrize("more", [(), ("--dynamic-cp",)])
def test_what_only_varlen_data_take_is_refused_without_them(argv: tuple[str, ...], more: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match=f"{argv[0]} needs --use-varlen-dataset"):
        flags.refuse_without_effect(parse(*argv, *more))
    flags.refuse_without_effect(parse(*argv, "--dynamic-cp", "--use-varlen-dataset"))


def test_a_worker_that_would_never_write_is_refused_on_cpu_ranks() -> None:
    flags.refuse_on_cpu(argparse.Namespace(use_persistent_ckpt_worker=False))
    flags.refuse_on_cpu(argparse.Namespace())
    with pytest.raises(UnsupportedFeatureError, match="--use-persistent-ckpt-worker is not supported: on CPU ranks"):
        flags.refuse_on_cpu(argparse.Namespace(use_persistent_ckpt_worker=True))


def test_every_feature_that_our_trainer_refuses_is_refused_here() -> None:
    assert all(feature in flags.REFUSED for feature in UNSUPPORTED)
    assert len({feature.flag for feature in flags.REFUSED}) >= len(UNSUPPORTED) + 10


@pytest.mark.parametrize("feature", flags.REFUSED, ids=lambda feature: feature.flag)
def test_every_refusal_looks_at_its_own_value(feature: Any) -> None:
    args = parse("--dynamic-cp")
    flags.refuse(args)
    setattr(args, flags.destination(feature.flag), "on")
    with pytest.raises(UnsupportedFeatureError, match=feature.flag):
        flags.refuse(args)


def test_evaluation_has_the_global_batch_of_training_which_lanes_need_not_divide() -> None:
    """Newer releases validate a global batch for evaluation, by default training's."""
    args = argparse.Namespace(world_size=4, global_batch_size=7, eval_global_batch_size=None)
    with flags.any_evaluation_batch(args):
        assert args.eval_global_batch_size % 4 == 0
    assert args.eval_global_batch_size == 7
    older = argparse.Namespace(world_size=4, global_batch_size=7)
    with flags.any_evaluation_batch(older):
        assert not hasattr(older, "eval_global_batch_size")
    assert not hasattr(older, "eval_global_batch_size")


SIZES = {
    "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "group_query_attention": False,
    "num_query_groups": 1, "kv_channels": 16, "padded_vocab_size": 128, "swiglu": True,
    "untie_embeddings_and_output_weights": False,
}  # fmt: skip
"""Of a small dense model, as a checkout has validated them."""


LATENT = {
    **SIZES, "multi_latent_attention": True, "num_layers": 2, "q_lora_rank": None, "kv_lora_rank": 32,
    "qk_head_dim": 24, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
"""As Megatron-LM validates them: it does not say KV heads, and another width of a head."""


GATED_DELTA = {
    **SIZES, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_layers": 4,
}  # fmt: skip


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
        (EXPERTS, {"num_experts": 6, "expert_model_parallel_size": 4},
         "--num-experts 6 is not a multiple of --expert-model-pa"),
        (EXPERTS, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
         "--expert-tensor-parallel-size 2 is not supported: experts are shared out whole; give 1"),
        (EXPERTS, {"moe_router_load_balancing_type": "sinkhorn"}, "it would depend on what is packed together"),
        (EXPERTS, {"add_bias_linear": True, "swiglu": True, "bias_swiglu_fusion": True},
         "--num-experts with biases and --bias-swiglu-fusion is not supported"),
        (EXPERTS, {"moe_permute_fusion": True}, "--moe-permute-fusion .* padding is never sent to experts"),
        (LATENT, {"qk_pos_emb_head_dim": 7}, "--qk-pos-emb-head-dim is 7, RoPE rotates pairs"),
        (LATENT, {"v_head_dim": 40}, "--v-head-dim is 40 and --kv-channels 32, queries and keys have 32 channels"),
        (LATENT, {"attention_output_gate": True},
         "--multi-latent-attention with --attention-output-gate is not supported"),
        (LATENT, {"add_bias_linear": False, "add_qkv_bias": True},
         "--multi-latent-attention with --add-qkv-bias is not supported"),
        (GATED_DELTA, {"experimental_attention_variant": "dsa"},
         "--experimental-attention-variant 'dsa' is not supported"),
        (GATED_DELTA, {"linear_attention_freq": [1, 0]}, "linear-attention-freq. .* is of 2 layers, the model has 4"),
        (GATED_DELTA, {"swiglu": False}, "another activation than that of --swiglu"),
        (GATED_DELTA, {"recompute_modules": ["core_attn", "gdn_norm_out"]},
         "--recompute-modules gdn_norm_out is not supported: the TransformerConfig of checkouts knows it from 0.19"),
        (GATED_DELTA, {"hybrid_override_pattern": "G*G-"},
         "--hybrid-override-pattern is not supported: checkouts train layers of a pattern from 0.18 on"),
    ],
)  # fmt: skip
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
        loss_scale=1 / num_micro_batches, iteration=1, total_loss_dict=totals, force_initialize=True,
        track_names=names, num_layers=3, moe_layer_freq=[0, 1, 0],
    )  # fmt: skip
    return {name: float(value) for name, value in totals.items()}


def test_the_log_of_a_checkout_has_the_means_over_tokens() -> None:
    for logged in run_ranks(2, logged_losses, 5):
        assert logged == pytest.approx({"seq_load_balancing_loss": 1.25, "z_loss": 4.5})
