"""What the planner and a checkpoint have to know of a run's model: pure functions without torch."""

from __future__ import annotations

from math import lcm
from typing import Any

from dynamic_cp.plans.padding import round_up
from dynamic_cp.types import ModelShape, PipelineLayers
from megatron.dynamic_cp.flags import activation, experts, layer_outputs, linear_attention, multi_token
from megatron.dynamic_cp.flags.latent_attention import LATENT, latent_attention_of, shape_of
from megatron.dynamic_cp.flags.positions import CHOICES, choices
from megatron.dynamic_cp.flags.windows import windows_of
from megatron.trainer.flags.settings import ModelSettings

FEATURES = CHOICES | experts.CHOICES | multi_token.NAMES | LATENT | activation.CHOICES | linear_attention.CHOICES
FEATURES |= layer_outputs.CHOICES
"""All names that `features_of` may return."""
TOKEN_IDS = "num_token_ids"
"""Argument under which checkpoints keep how many rows of the embedding table are no padding."""


def padded_vocab_size(vocab_size: int, divisor: int, tp_size: int) -> int:
    """Return the rows of the embedding table for `vocab_size` token ids.

    DEVIATION: the least common multiple of `divisor` and `tp_size`, where Megatron-LM takes their product. Reason: the
    rows of padding are part of the softmax, so a table that grows with TP changes every loss and cannot be loaded at
    another TP size. Recovery: --make-vocab-size-divisible-by divisor * tp_size.
    """
    return round_up(vocab_size, lcm(divisor, tp_size))


def model_shape(model: Any, vocab_rows: int, pipeline_layers: PipelineLayers = ()) -> ModelShape:
    """Return the numbers of the model that decide its cost, with `vocab_rows` rows of the embedding table.

    Args:
        pipeline_layers: `PlanningSettings.pipeline_layers`.
        model: has them under the names of Megatron-LM's flags: ModelSettings, or the arguments of a checkout.
    """
    windows = windows_of(model)
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        vocab_size=vocab_rows,
        gated_linear_unit=activation.is_gated(model),
        attention_output_gate=bool(getattr(model, "attention_output_gate", False)),
        window_tokens=windows.tokens,
        window_attn_skip_freq=windows.skip_freq,
        window_sink_tokens=windows.sink_tokens,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        pipeline_layers=pipeline_layers,
        experts=experts.experts_of(model),
        **shape_of(model),
        **linear_attention.shape_of(model),
        mtp_num_layers=getattr(model, "mtp_num_layers", None) or 0,
        sandwich_norm=bool(getattr(model, "sandwich_norm", False)),
        source="command line",
    )


def model_identity(model: ModelSettings, vocab_rows: int) -> dict[str, Any]:
    """Return what two runs must share to load each other's weights."""
    # Named one by one: what ModelShape learns about other models must not part a run from its checkpoints.
    names = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "normalization position_embedding_type rotary_base rotary_percent rotary_interleaved max_position_embeddings "
        "disable_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights"
    )
    identity = {name: getattr(model, name) for name in names.split()}
    # What came later is there only where it is on, so that checkpoints from before still fit.
    identity |= {"vocab_size": vocab_rows, "gated_linear_unit": activation.is_gated(model)}
    return identity | features_of(model)


def features_of(flags: Any) -> dict[str, Any]:
    """Return what of a model is not as it always was: name -> JSON value, nothing for what is off; see FEATURES."""
    of_attention = choices(flags) | latent_attention_of(flags) | layer_outputs.choices(flags)
    of_layers = experts.choices(flags) | multi_token.modules_of(flags) | activation.choices(flags)
    return of_attention | of_layers | linear_attention.choices(flags)
