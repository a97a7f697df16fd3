"""Megatron-LM's command line with ours: added once, refused by name, translated."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.arguments import UNSUPPORTED
from megatron.dynamic_cp.lm_adaptor import flags


def theirs() -> argparse.ArgumentParser:
    """Return a parser with Megatron-LM's forms of flags that we have, too."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cp-comm-type", nargs="+", type=str, default=["p2p"])
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--distributed-backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--hybrid-context-parallel", action="store_true")
    parser.add_argument("--micro-batch-size", type=int, default=None)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--fp8-format", dest="fp8", default=None)
    parser.add_argument("--num-experts", type=int, default=None)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--rerun-mode", default="validate_results")
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
    return flags.add_flags(theirs()).parse_args(["--attention-dropout", "0", *argv])


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
        "rerun_mode": "disabled",
    }
    assert args.micro_batch_size == 1


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (("--attention-dropout", "0.1"), "--attention-dropout"),
        (("--fp8-format", "e4m3"), "--fp8-format"),
        (("--num-experts", "8"), "--num-experts"),
        (("--hybrid-context-parallel",), "--hybrid-context-parallel"),
        (("--iterations-to-skip", "3"), "--iterations-to-skip"),
        (("--dataloader-type", "cyclic"), "--dataloader-type"),
        (("--transformer-impl", "inference_optimized"), "--transformer-impl"),
    ],
)
def test_unsupported_features_are_refused_by_flag(argv: tuple[str, ...], flag: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{flag}.* is not supported"):
        flags.translate(parse("--dynamic-cp", *argv))


def test_megatron_lms_default_dropout_must_be_switched_off() -> None:
    args = flags.add_flags(theirs()).parse_args(["--dynamic-cp"])
    with pytest.raises(UnsupportedFeatureError, match="set it to 0"):
        flags.translate(args)


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
        ("--use-varlen-dataset",),
    ],
)
def test_what_would_have_no_effect_without_dynamic_cp_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match=f"{argv[0]} needs --dynamic-cp in a checkout"):
        flags.refuse_without_effect(parse(*argv))
    flags.refuse_without_effect(parse())
    flags.refuse_without_effect(parse("--dynamic-cp", *argv))


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
