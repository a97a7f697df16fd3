"""Megatron-LM's command line with ours: added once, refused by name, translated."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import pytest

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import CP_COMM_TYPES, RecomputedLayers
from megatron.dynamic_cp.flags.supported import UNSUPPORTED
from megatron.integrations.lm_adaptor import flags


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
        "context_parallel_size": 1,
        "cp_comm_type": ["p2p"],
        "max_seqlen_per_dp_cp_rank": None,
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
        "rerun_mode": "disabled",
    }
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


def planned(*argv: str, **validated: Any) -> flags.Planned:
    asked = flags.translate(args := parse("--dynamic-cp", "--max-seqlen-per-dp-cp-rank", "auto", *argv))
    values = {
        "world_size": 2,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
        "num_attention_heads": 4,
        "group_query_attention": False,
        "seq_length": 64,
        "global_batch_size": 4,
        "num_layers": 4,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "bf16": True,
        "fp32_residual_connection": False,
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "distributed_timeout_minutes": 10,
    }
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
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=3,
        group_query_attention=False,
        kv_channels=16,
        padded_vocab_size=128,
        swiglu=False,
        untie_embeddings_and_output_weights=False,
    )
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
        (("--fp8-format", "e4m3"), ""),
        (("--hybrid-context-parallel",), ""),
        (("--iterations-to-skip", "3"), ""),
        (("--dataloader-type", "cyclic"), ""),
        (("--transformer-impl", "inference_optimized"), ""),
    ],
)
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
        ("--dynamic-cp-dump", "there"),
        ("--dynamic-cp-replay", "there"),
        ("--dynamic-cp-refine", "5"),
        ("--window-sink-tokens", "4"),
        ("--loss-chunk-tokens", "auto"),
        ("--use-varlen-dataset",),
        ("--max-seqlen-per-dp-cp-rank", "auto"),
    ],
)
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


@pytest.mark.parametrize(("given", "ours"), [("allgather", "all_gather"), ("a2a+p2p", "a2a+p2p"), ("auto", "auto")])
def test_names_of_exchanges(given: str, ours: str) -> None:
    args = parse("--dynamic-cp", "--cp-comm-type", given)
    flags.refuse(args)
    assert flags.exchange_of(args) == ours


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
