"""The numbers of a model that decide its cost, from its flags; needs neither torch nor megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.types import ModelShape, PipelineLayers
from megatron.dynamic_cp.flags import experts, features, linear_attention
from megatron.dynamic_cp.flags.attention import windows_of
from megatron.dynamic_cp.flags.features import has_latents


def model_shape(model: Any, vocab_rows: int, pipeline_layers: PipelineLayers = ()) -> ModelShape:
    """Return the numbers that decide the cost of a model, by flags of this trainer or of a checkout. `vocab_rows` are
    those of the embedding table; `pipeline_layers` as in `PlanningSettings`.
    """
    windows = windows_of(model)
    return ModelShape(
        **_alike(model),
        vocab_size=vocab_rows,
        gated_linear_unit=features.is_gated(model),
        window_tokens=windows.tokens,
        window_attn_skip_freq=windows.skip_freq,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        pipeline_layers=pipeline_layers,
        experts=experts.experts_of(model),
        **linear_attention.shape_of(model),
        source="command line",
    )


def said(model: Any, missing: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return what flags say of a model, under their names; `linear_attention` beside them is the kind of such layers.

    Args:
        model: completed flags of this trainer or of a checkout.
        missing: name -> what is said where there is no such flag, usually None.
    """
    found = {name: getattr(model, name, missing.get(name)) for name in MEANINGS}
    kind, quick_geglu = linear_attention.kind_of(model), features.is_quick_geglu(model)
    return found | {"num_experts": experts.num_experts(model), "quick_geglu": quick_geglu, "linear_attention": kind}


def _alike(model: Any) -> dict[str, Any]:
    """Return the fields of `ModelShape` that have the names and values of flags; a missing flag is off."""
    found = {}
    for name, means in MEANINGS.items():
        if means.shape == name and name != "vocab_size" and (has_latents(model) or not means.needs):
            is_said = means.usual is None or means.needs
            value = getattr(model, name) if is_said else getattr(model, name, None)
            found[name] = bool(value) if means.usual is False else value or 0
    return found
