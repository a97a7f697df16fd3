"""Only configurations that were compared with stock megatron-core train; any other is refused by name."""

import pytest
import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.types import CHOICES
from megatron.dynamic_cp.attention import thd
from megatron.dynamic_cp.flags.supported import ALLOWED, check_supported
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.setup import model
from tests.distributed import parity, reference
from tests.distributed.layouts import BY_NIGHT, FAMILIES, layout_of, lines_of
from tests.distributed.test_bf16 import LINES as IN_BF16
from tests.trainer.commandline import command_line

TRAINER_WORDS = [
    "", "--bf16", "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--recompute-activations",
    "--recompute-granularity full",
    "--normalization LayerNorm --qk-layernorm --rotary-interleaved --add-qkv-bias --norm-epsilon 1e-6",
    "--bf16 --fp32-residual-connection --pipeline-model-parallel-size 2",
    "--attention-output-gate --qk-l2-norm --no-rope-freq 2 --use-rope-scaling",
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim "
    "16 --num-query-groups 4 --rotary-scaling-factor 4 --rotary-base 500 --qk-layernorm",
    "--experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 2",
    "--hybrid-override-pattern M-*M --mamba-num-groups 2 --mamba-head-dim 16 --tensor-model-parallel-size 2",
    "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --recompute-granularity full",
    "--hidden-dropout 0.1 --kv-channels 32 --init-method-std 0.01 --use-cpu-initialization",
]  # fmt: skip


def plain_config(**fields):
    values = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0}
    return TransformerConfig(**values | {"calculate_per_token_loss": True} | fields)


@pytest.mark.parametrize("words", TRAINER_WORDS)
def test_what_the_trainer_builds_is_supported(words):
    settings = parse_args(command_line(words), 4)
    config = model.transformer_config(settings.model, settings.planning, torch.device("cpu"))
    check_supported(config)
    config.grad_scale_func = config.finalize_model_grads_func = config.no_sync_func = abs  # as build_optimizer does
    check_supported(config)


LINES = [
    *IN_BF16,
    *(line for family in FAMILIES for line in lines_of(family)),
    *(line for of in BY_NIGHT.values() for line in of),
]


@pytest.mark.parametrize("line", LINES)
def test_what_the_parity_suite_compares_is_supported(monkeypatch, line):
    layout = layout_of(line)

    class Built(Exception):
        pass

    build = reference.transformer_config

    def capture(variant, **overrides):
        raise Built(build(variant, **overrides))

    monkeypatch.setattr(reference, "transformer_config", capture)
    with pytest.raises(Built) as caught:
        parity.build_chunks(layout, reference.VARIANTS[layout.variant])
    (config,) = caught.value.args
    assert isinstance(config, TransformerConfig)
    check_supported(config)


# What our modules would ignore, or compute in a way that nobody compared: field, value, other fields that it needs.
DANGEROUS = [
    ("apply_residual_connection_post_layernorm", True, {}),
    ("attention_softmax_in_fp32", False, {}),
    ("attention_dropout", 0.1, {}),
    ("apply_rope_fusion", True, {}),
    ("bias_activation_fusion", True, {"activation_func": torch.nn.functional.gelu}),
    ("bias_dropout_fusion", True, {}), ("glu_linear_offset", 1.0, {"gated_linear_unit": True}),
    ("activation_func_clamp_value", 7.0, {"gated_linear_unit": True}), ("moe_router_topk", 4, {}),
    ("pipeline_model_parallel_layout", "Ett|ttL", {}), ("microbatch_group_size_per_vp_stage", 4, {}),
    ("calculate_per_token_loss", False, {}), ("cross_entropy_loss_fusion", True, {}), ("context_parallel_size", 2, {}),
    ("cp_comm_type", "a2a", {}), ("use_te_rng_tracker", True, {}), ("deallocate_pipeline_outputs", True, {}),
    ("pipeline_dtype", torch.float16, {}),
    ("pipeline_dtype", torch.bfloat16, {"fp32_residual_connection": True}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "needed"), DANGEROUS, ids=[row[0] for row in DANGEROUS])
def test_any_other_setting_is_refused_by_name_and_value(field, value, needed):
    config = plain_config(**needed)
    check_supported(config)
    assert getattr(config, field) != value
    setattr(config, field, value)  # not by the constructor: what is refused there depends on what is installed
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_supported(config)
    message = str(caught.value)
    assert f"TransformerConfig.{field}" in message
    # The table's messages name the flag instead of the value.
    assert message.startswith("--") or str(value) in message


def test_a_refusal_names_value_and_default():
    with pytest.raises(UnsupportedFeatureError, match="attention_softmax_in_fp32 is False, only True is supported"):
        check_supported(plain_config(attention_softmax_in_fp32=False))


def test_allowed_fields_exist():
    gone = {"async_tensor_model_parallel_allreduce"} if releases.FIELDS_GONE.here else set()
    assert ALLOWED - set(MLATransformerConfig.__dataclass_fields__) == gone


def test_the_exchanges_are_those_of_the_attention_and_have_a_price():
    assert set(thd.EXECUTORS) == set(CHOICES[1:]) == set(MECHANISMS)
