"""Features of attention and positions on the command line: checked at once, trained, and kept by checkpoints."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamic_cp.errors import CheckpointError, UnsupportedFeatureError
from megatron.dynamic_cp.flags.positions import CHOICES, check_positions, choices
from megatron.trainer.checkpoints import interchange, loading
from megatron.trainer.flags import derive
from megatron.trainer.setup import model
from tests.trainer.commandline import parsed
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, train

YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"
FEATURES = (
    "--attention-output-gate --qk-l2-norm --no-rope-freq 2 --use-rope-scaling --rope-scaling-factor 32 "
    "--rotary-seq-len-interpolation-factor 2 --softmax-type learnable"
)


def test_flags_reach_megatron_core() -> None:
    settings = parsed(FEATURES)
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    assert (config.attention_output_gate, config.qk_l2_norm, config.no_rope_freq) == (True, True, [0, 1, 0, 1])
    assert config.softmax_type == "learnable"
    assert not hasattr(config, "yarn_mscale")
    listed = parsed("--no-rope-freq [0,0,1,0]")
    config = model.transformer_config(listed.model, listed.planning, torch.device("cpu"))
    assert config.no_rope_freq == [0, 0, 1, 0]
    yarn = parsed(f"{YARN} --mscale 0.5 --no-yarn-correction-range-round-to-int")
    config = model.transformer_config(yarn.model, yarn.planning, torch.device("cpu"))
    assert (config.yarn_rotary_scaling_factor, config.yarn_original_max_position_embeddings) == (4.0, 4096)
    assert (config.yarn_beta_fast, config.yarn_beta_slow) == (32.0, 1.0)
    assert (config.yarn_mscale, config.yarn_mscale_all_dim) == (0.5, 0.0)
    assert config.yarn_correction_range_round_to_int is False


def test_recomputed_modules_reach_planner_and_megatron_core() -> None:
    for words, names in (("", ["core_attn"]), ("--recompute-modules mlp layernorm mlp", ["mlp", "layernorm"])):
        settings = parsed(f"--recompute-activations {words}")
        assert settings.planning.options(64).repeated == set(names)
        config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
        assert config.recompute_modules == names
        assert settings.planning.recomputes_norms == ("layernorm" in names)


def test_the_planner_pays_for_the_gate() -> None:
    plain, gated = (derive.model_shape(parsed(flags).model, 264) for flags in ("", "--attention-output-gate"))
    assert gated.linear_weights_per_layer - plain.linear_weights_per_layer == 64 * 64
    assert gated.num_parameters - plain.num_parameters == 4 * 64 * 64


def test_a_checkout_without_flags_for_yarn_is_told() -> None:
    args = parsed("").arguments
    older = SimpleNamespace(**{name: value for name, value in args.items() if not name.startswith("yarn_")})
    check_positions(older)
    older.position_embedding_type = "yarn"
    with pytest.raises(
        UnsupportedFeatureError, match=r"this Megatron-LM has no flags for what YaRN needs to know, 0\.19"
    ):
        check_positions(older)


def identity(flags: str) -> dict[str, Any]:
    return derive.model_identity(parsed(flags).model, 264)


def test_checkpoints_know_what_is_on() -> None:
    """What is off is not there, as in checkpoints from before."""
    plain = identity("")
    assert not CHOICES & plain.keys()
    windows = "--window-size 7,0 --window-rotary-base 1000 --apply-layernorm-1p"
    assert set().union(*map(identity, (FEATURES, YARN, windows))) >= CHOICES
    assert identity("--no-rope-freq 2") == identity("--no-rope-freq [0,1]*2")
    assert identity("--no-rope-freq 0") == identity("--rotary-seq-len-interpolation-factor 1") == plain


@pytest.mark.parametrize(
    "flags",
    [
        *("--attention-output-gate", "--qk-l2-norm", "--no-rope-freq 4", "--use-rope-scaling"),
        "--softmax-type off-by-one",
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_both_directions(flags: str) -> None:
    name = flags.split()[0].removeprefix("--").removeprefix("use-").replace("-", "_")
    for own, saved in (("", flags), (flags, "")):
        with pytest.raises(CheckpointError, match=f"model .*{name}.* = "):
            loading._check_identity({"model": identity(own)}, {"model": identity(saved)}, "folder")
    loading._check_identity({"model": identity(flags)}, {"model": identity(flags)}, "folder")


def test_weights_may_go_on_with_positions_that_reach_further() -> None:
    for own, saved in ((YARN, ""), ("", YARN), ("--use-rope-scaling", ""), ("", "--use-rope-scaling")):
        loading._check_weights_fit(identity(own), identity(saved), "folder")
    with pytest.raises(CheckpointError, match="model no_rope_freq = None"):
        loading._check_weights_fit(identity("--no-rope-freq 2"), identity(""), "folder")


def test_megatron_lms_checkpoints_say_the_same() -> None:
    for flags in (FEATURES, YARN, ""):
        theirs = argparse.Namespace(**parsed(flags).arguments)
        assert choices(theirs).keys() == identity(flags).keys() & CHOICES
        for own in (FEATURES, YARN, ""):
            found = interchange._model_identity(theirs, identity(own))
            if own == flags:
                assert found == identity(flags)
            else:
                with pytest.raises(CheckpointError):
                    loading._check_identity({"model": identity(own)}, {"model": found}, "folder")


DYNAMIC = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64"


@pytest.mark.nightly
@pytest.mark.parametrize("features", [FEATURES, f"{YARN} --attention-output-gate --no-rope-freq [0,1]"])
def test_a_resumed_run_is_that_of_one_lane(features: str, uninterrupted: Any, saved_by: Any) -> None:
    """Two lanes with CP sizes 1 and 2, and a run that goes on from them without groups of lanes."""
    words = f"{DYNAMIC} {features}"
    first = uninterrupted(words, 2)
    other = losses(train(2, DYNAMIC, TO_LAST, "--exit-interval 1"))
    assert first[0] != pytest.approx(other[0], rel=1e-7, abs=0.0), "the features change nothing"
    alone = words.replace("64", "128") + " --max-dynamic-cp-size 1"
    resumed = train(2, alone, TO_LAST, f"--load {saved_by(words, 2)}")
    assert losses(resumed) == pytest.approx(first[SAVED:], rel=1e-5)
    assert {size for record in resumed.values() for size in record.cp_histogram} == {1}


@pytest.mark.nightly
def test_a_residual_in_float32_is_planned_and_trained() -> None:
    flags = f"{DYNAMIC} --pipeline-model-parallel-size 2 --max-seqlen-per-dp-cp-rank 128 --bf16"
    settings = parsed(f"{flags} --fp32-residual-connection")
    assert settings.planning.options(128).element_bytes == (2, 4, 2, 2)
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    assert (config.params_dtype, config.pipeline_dtype) == (torch.bfloat16, torch.float32)
    rounded, exact = (
        losses(train(2, flags, more, "--train-iters 2 --lr-warmup-iters 0"))
        for more in ("", "--fp32-residual-connection")
    )
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=1e-3)
