"""Linear attention on the command line: checked at once, trained, and kept by checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.flags.layer_needs import layer_needs
from megatron.dynamic_cp.flags.linear_attention import Parts, choices, parts_of_layers
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import parse_args
from tests.trainer.commandline import command_line
from tests.trainer.conftest import SAVED, TO_LAST
from tests.trainer.training_ranks import losses, train

DELTA = "--experimental-attention-variant gated_delta_net"
SIZES = "--linear-num-key-heads 2 --linear-num-value-heads 4"
PATTERN = "--hybrid-override-pattern"


def test_a_variant_of_most_layers() -> None:
    experts = "--num-experts 4 --moe-layer-freq [0,1,1,1]"
    words = f"--experimental-attention-variant gdn --linear-attention-freq 4 {SIZES} {experts}"
    model = parse_args(command_line(words), 4).model
    assert model.experimental_attention_variant == "gated_delta_net"
    linear = [parts.mixer == "linear" for parts in parts_of_layers(model)]
    assert linear == [True, True, True, False]
    assert [parts.mlp for parts in parts_of_layers(model)] == ["dense", *["experts"] * 3]
    shape = derive.model_shape(model, 256)
    assert shape.linear_attention == LinearAttention(
        kind="gated_delta_net", num_heads=4, num_groups=2, key_size=128, value_size=128
    )
    assert list(shape.linear_layers) == linear
    listed = parse_args(command_line(f"{DELTA} --linear-attention-freq [1]*3+[0] {SIZES}"), 4).model
    same = parse_args(command_line(f"{DELTA} --linear-attention-freq 4 {SIZES}"), 4).model
    assert derive.model_identity(listed, 256) == derive.model_identity(same, 256)


def test_what_attention_layers_have_besides() -> None:
    """Windows let attention be placed, as they do in other models."""
    words = f"{DELTA} --linear-attention-freq 2 --window-size 7,0 --softmax-type learnable --fp32-residual-connection"
    words += " --recompute-granularity selective --recompute-modules core_attn gdn_norm_out"
    settings = parse_args(command_line(f"{words} --bf16 --dynamic-cp --cp-comm-type auto"), 4)
    assert settings.planning.recompute_modules == ("core_attn", "gdn_norm_out")
    assert set(settings.planning.exchanges) == {"all_gather", "a2a", "blocks"}
    shape = derive.model_shape(settings.model, 256)
    assert shape.windowed_layers == tuple(not one for one in shape.linear_layers)


def test_a_pattern_of_halves() -> None:
    model = parse_args(command_line(f"{PATTERN} M*-M --mamba-num-groups 2 --mamba-head-dim 16"), 4).model
    assert model.mamba_num_heads == 8, "twice the hidden size"
    mamba, attention, mlp = Parts("linear", None), Parts("attention", None), Parts(None, "dense")
    assert parts_of_layers(model) == (mamba, attention, mlp, mamba)
    assert derive.model_shape(model, 256).layer_pattern == "M*-M"
    assert {"hybrid_override_pattern", "mamba_num_heads"} <= derive.model_identity(model, 256).keys()


def test_flags_of_a_megatron_lm_checkpoint_say_the_same() -> None:
    ours = parse_args(command_line(f"{PATTERN} M*-M --mamba-num-groups 2 --mamba-head-dim 16"), 4).model
    sizes = {"mamba_num_heads": None, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 128}
    theirs = SimpleNamespace(hybrid_layer_pattern="M*-M", hidden_size=64, num_layers=4, **sizes)
    assert choices(theirs) == choices(ours) != {}


@pytest.mark.parametrize(
    "words",
    [
        f"{DELTA} --linear-attention-freq 2 {SIZES}",
        f"{DELTA} --linear-attention-freq 2 {SIZES} --apply-layernorm-1p --qk-layernorm",
        f"{PATTERN} M*-M --mamba-head-dim 16",
    ],
)
def test_layers_of_transformer_engine_where_they_can_be_used(words: str) -> None:
    settings = parse_args(command_line(words, "--bf16"), 4)
    assert layer_needs(settings.model, settings.planning).why_local is None


WIDTHS = "--linear-key-head-dim 16 --linear-value-head-dim 16"
RUNS = {
    "delta": f"{DELTA} --linear-attention-freq 2 {SIZES} {WIDTHS}",
    "latents in windows": f"{DELTA} --linear-attention-freq 2 {SIZES} {WIDTHS} --multi-latent-attention "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-query-groups 4 "
    "--window-size 15,0 --window-attn-skip-freq 4 --recompute-granularity selective --recompute-modules gdn_norm_out",
    "mamba": f"{PATTERN} M-*M --num-layers 4 --mamba-num-groups 2 --mamba-head-dim 16 --mamba-state-dim 16",
}
DYNAMIC = (
    "--dynamic-cp --mock-data --num-workers 0 --max-seqlen-per-dp-cp-rank 64 --use-distributed-optimizer "
    "--dynamic-cp-verify full --global-batch-size 4"
)


@pytest.mark.by_day("mamba")
@pytest.mark.parametrize("kind", RUNS)
def test_a_resumed_run_is_that_of_another_layout(kind: str, uninterrupted: Any, saved_by: Any) -> None:
    """Two lanes with the distributed optimizer, and a run of two tensor-parallel ranks that goes on from them."""
    words = f"{DYNAMIC} {RUNS[kind]}"
    first = uninterrupted(words, 2)
    split = "--tensor-model-parallel-size 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 128"
    resumed = train(2, words, split, TO_LAST, f"--load {saved_by(words, 2)}")
    assert losses(resumed) == pytest.approx(first[SAVED:], rel=1e-5)
