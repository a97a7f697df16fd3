"""Every wrong flag or pair of flags is answered by one message that names both numbers and the remedy."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dynamic_cp.errors import DynamicCPError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.types import CP_COMM_TYPES
from megatron.dynamic_cp.attention.te.support import LayerChoice
from megatron.dynamic_cp.flags.exclusions import NEEDS
from megatron.dynamic_cp.flags.supported import UNSUPPORTED, check_supported
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.data import tokenizer
from megatron.trainer.flags import derive
from megatron.trainer.flags.arguments import ALREADY_SO, build_parser, parse_args
from megatron.trainer.flags.settings import Settings
from megatron.trainer.flags.validation import checked_settings
from megatron.trainer.setup.planned_runtime import _hardware_name
from megatron.trainer.setup.run import data_config
from tests.trainer.commandline import command_line


def test_a_model_too_small_for_the_default_width_of_swiglu_is_refused():
    words = command_line("--hidden-size 16")
    index = words.index("--ffn-hidden-size")
    del words[index : index + 2]
    with pytest.raises(InvalidInputError, match=r"--hidden-size 16 .* --swiglu.*give --ffn-hidden-size.*at least 24"):
        parse_args(words, 4)
    assert parse_args([*words, "--hidden-size", "24"], 4).model.ffn_hidden_size == 64


def test_limits_themselves_are_accepted():
    parse_args(command_line("--hidden-dropout 0.99 --adam-beta1 0 --exit-duration-in-mins 0 --rotary-percent 0.125"), 4)
    parse_args(command_line("--lr-decay-style WSD --lr-wsd-decay-iters 8"), 4)
    parse_args(command_line("--recompute-granularity full --recompute-num-layers 4"), 4)
    parse_args(command_line("--kv-channels 15 --position-embedding-type none"), 4)
    parse_args(command_line("--dynamic-cp --max-seqlen-per-dp-cp-rank 32"), 4)  # four lanes hold --seq-length


def test_auto_lets_the_planner_choose_among_all_exchanges():
    chosen = {
        choice: parse_args(command_line(f"--cp-comm-type {choice}"), 4).planning.options().cp_comm_types
        for choice in ("auto", *CP_COMM_TYPES)
    }
    assert chosen == {"auto": CP_COMM_TYPES} | {exchange: (exchange,) for exchange in CP_COMM_TYPES}
    assert len(CP_COMM_TYPES) >= 2
    assert parse_args(command_line(""), 4).planning.options().cp_comm_types == CP_COMM_TYPES  # the default


def test_search_effort_reaches_the_planner():
    for effort in ("fast", "thorough"):
        settings = parse_args(command_line(f"--dynamic-cp --dynamic-cp-search {effort}"), 4)
        assert settings.planning.options().search == effort
    assert parse_args(command_line("--dynamic-cp"), 4).planning.options().search == "fast"


MODEL_IDENTITY = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 264,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "max_position_embeddings": 128,
    "disable_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
}


def test_the_identity_of_a_model_stays_as_checkpoints_have_it():
    assert derive.model_identity(parse_args(command_line(), 4).model, 264) == MODEL_IDENTITY


def test_the_planner_counts_a_tied_table_once():
    tied, untied = (
        derive.model_shape(parse_args(command_line(extra), 4).model, 264).vocabulary_weights
        for extra in ("", "--untie-embeddings-and-output-weights")
    )
    assert (tied, untied) == (264 * 64, 2 * 264 * 64)


@pytest.mark.parametrize("feature", UNSUPPORTED, ids=lambda feature: feature.flag)
def test_unsupported_flags_are_named(feature):
    flag = feature.flag
    with pytest.raises(UnsupportedFeatureError, match=flag):
        parse_args(command_line(flag, "2"), 4)
    if not feature.off:
        with pytest.raises(UnsupportedFeatureError, match=flag):
            parse_args(command_line(flag), 4)
    for off in feature.off:
        parse_args(command_line(flag, str(off)), 4)
    if feature.field is not None:
        with pytest.raises(UnsupportedFeatureError, match=flag):
            check_supported(SimpleNamespace(**{feature.field: 2}))


def test_table_fields_exist_in_megatron_core():
    from megatron.core.transformer import TransformerConfig

    fields = {name for cls in TransformerConfig.__mro__ for name in getattr(cls, "__dataclass_fields__", {})}
    named = {feature.field for feature in UNSUPPORTED if feature.field is not None}
    assert len(named) > 20
    assert named - fields == ({"moe_use_legacy_grouped_gemm"} if releases.FIELDS_GONE.here else set())


MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --train-iters 4 --mock-data"
)
OTHER_VALUES = {
    "--max-position-embeddings": "128", "--window-size": "8,0", "--lr-warmup-init": "1e-4", "--data-path": "a",
    "--max-seqlen-per-dp-cp-rank": "auto", "--split": "9,1,0", "--rotary-percent": "0.5", "--adam-beta1": "0.5",
    "--adam-beta2": "0.5", "--lr-warmup-fraction": "0.25", "--hidden-dropout": "0.25", "--min-lr": "1e-4",
    "--experimental-attention-variant": "gdn", "--hybrid-override-pattern": "M-*-", "--num-workers": "0",
    "--dynamic-cp-lookahead": "0", "--recompute-modules": "mlp", "--moe-layer-freq": "[1,0,1,0]",
    "--moe-router-load-balancing-type": "sinkhorn", "--moe-aux-loss-coeff": "0.5", "--dynamic-cp-noise-margin": "5",
    "--stopped-process-timeout": "0", "--linear-attention-freq": "[1,1,1,0]", "--window-attn-skip-freq": "3",
    "--no-rope-freq": "3",
}  # fmt: skip
"""Of flags that take one, where 2 is none, is the default or is out of range."""
GROUPS = [name for name in Settings.__dataclass_fields__ if name != "arguments"]
WITH_EFFECT = """
--ffn-hidden-size --kv-channels --max-position-embeddings --position-embedding-type --qk-layernorm --qk-l2-norm
--attention-output-gate --softmax-type --mtp-num-layers --normalization --norm-epsilon --apply-layernorm-1p
--sandwich-norm --residual-multiplier --embedding-multiplier --logits-scaling --softmax-scale --swiglu --squared-relu
--geglu --quick-geglu --disable-bias-linear --untie-embeddings-and-output-weights --make-vocab-size-divisible-by
--init-method-std --hidden-dropout --attention-backend --bf16 --use-cpu-initialization --transformer-impl
--gradient-accumulation-fusion --bias-swiglu-fusion --bias-gelu-fusion --bias-dropout-fusion --lora-rank --num-experts
--global-batch-size --train-iters --seed --exit-interval --exit-duration-in-mins --eval-iters
--recompute-granularity --recompute-activations --lr-decay-style --lr-warmup-iters --lr-warmup-samples
--lr-warmup-fraction --lr-decay-iters --lr-decay-samples --min-lr --weight-decay --clip-grad --adam-beta1 --adam-beta2
--adam-eps --tensor-model-parallel-size --pipeline-model-parallel-size --use-distributed-optimizer
--overlap-grad-reduce --distributed-timeout-minutes --stopped-process-timeout --num-workers --overlong --split --save
--load --log-interval --tensorboard-dir --distributed-backend --dynamic-cp --context-parallel-size --static-cp-policy
--window-size --varlen-mock-dataset-config-json
--max-seqlen-per-dp-cp-rank --loss-chunk-tokens --dynamic-cp-hardware --dynamic-cp-search --dynamic-cp-lookahead
--dynamic-cp-plan-timeout --dynamic-cp-strict --dynamic-cp-refine --dynamic-cp-dump --dynamic-cp-replay
--dynamic-cp-verify --cp-comm-type --dynamic-cp-inner-sizes
"""
"""Flags that a run reads where they are the only ones: whoever adds one has looked up where."""


def test_each_flag_alone_has_an_effect_or_is_refused():
    refused_by_name = {name for feature in UNSUPPORTED for name in feature.flag.split()}
    effects = dict.fromkeys(("read", "refused", "logged", "none"), frozenset())
    parser = build_parser()
    usual = settings_alone(parser, [])
    for action in parser._actions:
        name = action.option_strings[0]
        if not action.required and action.dest != "help" and not refused_by_name & set(action.option_strings):
            effects[effect_of(parser, action, usual)] |= {name}
    only = {"--optimizer", "--ckpt-format"}  # one value is possible
    assert effects["none"] == {*ALREADY_SO, *only, "--mock-data"}
    assert effects["logged"] == {flag for need in NEEDS if not need.is_refused for flag in need.flags}
    assert effects["read"] == set(WITH_EFFECT.split())
    needy = {flag for need in NEEDS if need.is_refused for flag in need.flags}
    assert needy - effects["refused"] == {"--varlen-mock-dataset-config-json"}  # MINIMAL has what it needs
    assert len(effects["refused"]) > 80
    with pytest.raises(UnsupportedFeatureError, match="--static-cp-policy balanced with --dynamic-cp is not supported"):
        parse_args([*MINIMAL.split(), "--dynamic-cp", "--static-cp-policy", "balanced"], 4)
    parse_args([*MINIMAL.split(), "--wandb-project", "", "--wandb-exp-name", "a"], 4)  # scripts switch it off so


def effect_of(parser, action, usual):
    """Return what becomes of a flag alone: the strongest of what its values do."""
    name = action.option_strings[0]
    values = action.choices or [OTHER_VALUES.get(name, "2")]
    found = set()
    for words in (
        [[word] for word in action.option_strings] if action.nargs == 0 else [[name, str(one)] for one in values]
    ):
        try:
            settings = settings_alone(parser, words)
            tokenizer.build(data_config(settings))
        except DynamicCPError:
            found.add("refused")
            continue
        is_same = all(getattr(settings, group) == getattr(usual, group) for group in GROUPS)
        found.add("logged" if settings.training.without_effect else "none" if is_same else "read")
    return next(effect for effect in ("read", "logged", "refused", "none") if effect in found)


def settings_alone(parser, words):
    args = parser.parse_args([*MINIMAL.split(), *words])
    args.world_size = 4
    return checked_settings(args)


def test_planning_ahead_is_the_default_and_can_be_switched_off():
    settings = parse_args(command_line(), 4)
    planning = settings.planning
    assert (planning.lookahead, settings.data.num_workers, planning.verify) == (2, 1, "digest")
    assert (planning.plan_timeout_s, planning.is_strict, planning.refine_every) == (300.0, False, 0)
    settings = parse_args(command_line("--dynamic-cp-lookahead 0 --num-workers 0 --dynamic-cp-verify off"), 4)
    planning = settings.planning
    assert (planning.lookahead, settings.data.num_workers, planning.verify) == (0, 0, "off")


def test_derived_values():
    settings = parse_args(command_line("--sequence-parallel", *ALREADY_SO), 4)
    assert not settings.planning.topology.sequence_parallel  # one tensor-parallel rank has nothing to split
    assert settings.model.kv_channels == 16
    optimizer = settings.optimizer
    assert (settings.training.train_samples, optimizer.lr_warmup_samples, optimizer.lr_decay_samples) == (96, 24, 96)
    assert settings.planning.max_tokens_per_rank == 128
    assert settings.planning.policy == "static"
    longer = parse_args(command_line("--context-parallel-size 4 --seq-length 130"), 4)
    assert longer.planning.max_tokens_per_rank == 34
    planning = parse_args(
        command_line("--dynamic-cp --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"), 8
    ).planning
    assert (planning.policy, planning.topology.vp_size, planning.topology.num_lanes) == ("dynamic", 2, 4)
    assert parse_args(command_line("--static-cp-policy balanced"), 4).planning.policy == "balanced"


def test_train_samples_are_whole_batches():
    words = command_line("--train-samples 100")
    index = words.index("--train-iters")
    del words[index : index + 2]
    training = parse_args(words, 4).training
    assert (training.train_iters, training.train_samples, training.train_samples_left_out) == (8, 96, 4)
    assert parse_args([*words, "--train-samples", "96"], 4).training.train_samples_left_out == 0
    assert parse_args(command_line(), 4).training.train_samples_left_out == 0


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_padded_vocabulary_does_not_depend_on_tensor_parallelism(tp_size):
    assert derive.padded_vocab_size(257, 128, tp_size) == 384
    assert derive.padded_vocab_size(257, 1, tp_size) % tp_size == 0


def test_flags_have_names():
    actions = build_parser()._actions
    assert len(actions) > 100
    assert all(action.option_strings for action in actions)


def test_parsing_needs_no_torch():
    program = (
        "import sys; from megatron.trainer.flags.arguments import parse_args; from tests.trainer.commandline import *; "
        "parse_args(command_line('--dynamic-cp'), 4); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("device", "impl", "asked", "expected"),
    [
        ("cuda", "local", None, "h100-local"),
        ("cuda", "transformer_engine", None, "h100"),
        ("cuda", "local", "h200", "h200"),
        ("cpu", "local", None, "cpu"),
    ],
)
def test_kernels_of_the_layers_are_priced(device: str, impl: str, asked: str | None, expected: str) -> None:
    """Local layers compute attention by FlashAttention-2, TransformerEngine's by cuDNN."""
    settings = SimpleNamespace(hardware=asked)
    assert _hardware_name(settings, torch.device(device), LayerChoice(impl=impl, reason="")) == expected
    rates = [load_hardware(name).attention_flops_per_s for name in ("h100-local", "h100")]
    assert 1.4 < rates[1] / rates[0] < 1.8
