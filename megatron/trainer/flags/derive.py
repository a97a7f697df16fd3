"""What the planner and a checkpoint have to know of a run's model: pure functions without torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from dynamic_cp.models.flags import GATED_DELTA_NET, LATENTS, MAMBA_LAYERS, MEANINGS, ModelSettings
from dynamic_cp.plans.padding import round_up
from dynamic_cp.types import layers_with_experts
from dynamic_cp.types.linear_layers import layers_with_linear_attention
from megatron.dynamic_cp.flags import attention, experts, features, linear_attention
from megatron.dynamic_cp.flags.features import YARN_FIELDS, has_latents, latent_fields
from megatron.dynamic_cp.flags.shape import said

FEATURES = frozenset(
    {
        *(name for name, means in MEANINGS.items() if means.kept),
        *("experimental_attention_variant", "linear_attention_freq", "hybrid_override_pattern"),
        *(attribute for attribute, _ in attention.YARN.values()),
        *(YARN_FIELDS - {"rotary_base"}),
    }
)
"""All names that `features_of` may return."""
_USUAL = {name: experts.DEFAULTS.get(name, means.usual) for name, means in MEANINGS.items()}
"""Flag -> what it is where checkpoints lack it."""
TOKEN_IDS = "num_token_ids"
"""Argument of checkpoints with the number of embedding rows that are not padding."""


def padded_vocab_size(vocab_size: int, divisor: int, tp_size: int) -> int:
    """Return the rows of the embedding table for `vocab_size` token ids.

    DEVIATION: the least common multiple of `divisor` and `tp_size`, where Megatron-LM takes their product. Reason:
    padding rows are part of the softmax, so a table that grows with TP changes every loss and cannot be loaded at
    another TP size. Recovery: --make-vocab-size-divisible-by divisor * tp_size.
    """
    return round_up(vocab_size, lcm(divisor, tp_size))


def model_identity(model: ModelSettings, vocab_rows: int) -> dict[str, Any]:
    """Return what two runs must share to load each other's weights."""
    # Named one by one, because new fields of ModelShape must not separate a run from its checkpoints.
    names = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "normalization position_embedding_type rotary_base rotary_percent rotary_interleaved max_position_embeddings "
        "disable_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights"
    )
    identity = {name: getattr(model, name) for name in names.split()}
    # Later features are listed only if they are on, so that older checkpoints still fit.
    identity |= {"vocab_size": vocab_rows, "gated_linear_unit": features.is_gated(model)}
    return identity | features_of(model)


def features_of(flags: Any) -> dict[str, Any]:
    """Return the model's unusual features, name (of FEATURES) -> JSON value, without those that are off.

    `flags` are this trainer's, completed, or the arguments of a Megatron-LM checkpoint, which may lack some.
    """
    values = said(flags, _USUAL)
    values["no_rope_freq"] = _listed(attention.unrotated_layers(values["no_rope_freq"] or 0, flags.num_layers))
    found = {
        name: values[name]
        for name, means in MEANINGS.items()
        if means.kept and means.is_met(values) and (means.kept == "always" or _is_unusual(values[name], means.usual))
    }
    for name in found:
        if MEANINGS[name].needs in (LATENTS, MAMBA_LAYERS):
            getattr(flags, name)  # raises if a checkpoint lacks a required one
    if values["num_experts"] is not None:
        if found["moe_ffn_hidden_size"] is None:
            found["moe_ffn_hidden_size"] = flags.ffn_hidden_size
        found["moe_layer_freq"] = _listed(layers_with_experts(found["moe_layer_freq"], flags.num_layers))
    if values["linear_attention"] is not None:
        found |= _linear_layers(flags, values["linear_attention"])
    if has_latents(flags):
        found |= {name: value for name, value in latent_fields(flags).items() if name != "rotary_base"}
    return found | attention.yarn_attributes(flags)


def _is_unusual(value: Any, usual: Any) -> bool:
    return value not in (None, False, usual)


def _listed(layers: Sequence[int] | None) -> list[int] | None:
    """Return 1 or 0 for each layer, None if all are 0."""
    return list(map(int, layers)) if layers and any(layers) else None


def _linear_layers(flags: Any, kind: str) -> dict[str, Any]:
    """Return which layers have linear attention, and the heads of Mamba-2."""
    heads = {} if kind == GATED_DELTA_NET else {"mamba_num_heads": linear_attention.mamba_heads(flags)}
    if symbols := linear_attention.pattern_of(flags):
        return {"hybrid_override_pattern": symbols} | heads
    layers = layers_with_linear_attention(flags.linear_attention_freq, flags.num_layers)
    return {"experimental_attention_variant": kind, "linear_attention_freq": _listed(layers)} | heads
