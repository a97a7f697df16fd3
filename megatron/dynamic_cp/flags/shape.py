"""What flags say of a model, the numbers that decide its cost, and what a run asks of its layers
(`attention.te.support.choose_layers` answers with the layers). Needs neither torch nor megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from dynamic_cp.models.catalog import CHECKED_LOCALLY, why_local
from dynamic_cp.models.flags import MEANINGS, TransformerImpl
from dynamic_cp.types import CpCommType, ModelShape, PipelineLayers, is_placed
from megatron.dynamic_cp.flags import experts, features, fp8, linear_attention
from megatron.dynamic_cp.flags.attention import windows_of
from megatron.dynamic_cp.flags.experts import num_experts
from megatron.dynamic_cp.flags.features import has_latents
from megatron.dynamic_cp.flags.settings import PlanningSettings


def model_shape(model: Any, vocab_rows: int, pipeline_layers: PipelineLayers = ()) -> ModelShape:
    """Return the numbers that decide the cost of a model, by flags of this trainer or of a checkout. `vocab_rows` are
    those of the embedding table; `pipeline_layers` as in `PlanningSettings`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNeeds:
    """What flags ask of layers, by their names.

    Attributes:
        requested: --transformer-impl, "local" beside a pool: its servers run local layers.
        why_local: what of the model or its planning only local layers do; None: nothing.
        gathered_hidden_size: --hidden-size where sequence parallelism gathers it; None: it does not.
    """

    requested: TransformerImpl | None
    exchange: CpCommType | Literal["auto"]
    backend: str
    why_local: str | None
    recomputes_norms: bool
    fp8_recipe: str | None
    gathered_hidden_size: int | None


def layer_needs(model: Any, planning: PlanningSettings) -> LayerNeeds:
    """Return what a run asks of its layers, from the completed flags of this trainer or of a checkout."""
    backend = model.attention_backend
    return LayerNeeds(
        requested=model.transformer_impl if planning.pool == "off" else "local",
        exchange=planning.cp_comm_type,
        backend=getattr(backend, "name", backend),
        why_local=_why_local(model, planning),
        recomputes_norms=planning.recomputes_norms,
        fp8_recipe=fp8.recipe_of(model),
        gathered_hidden_size=model.hidden_size if planning.topology.sequence_shares > 1 else None,
    )


def _why_local(model: Any, planning: PlanningSettings) -> str | None:
    has_biases = bool(num_experts(model)) and features.has_biases(model)
    of_model = why_local({**said(model), "window_size": planning.has_windows, "disable_bias_linear": not has_biases})
    if not model.bf16:
        return "TransformerEngine's attention over several lanes needs --bf16, this run trains in fp32"
    if of_model is not None:
        return of_model
    for is_on, why in (
        (
            is_placed(planning.cp_comm_type),
            f"TransformerEngine's attention cannot be placed (--cp-comm-type {planning.cp_comm_type})",
        ),
        (planning.fp32_residual, f"a residual in float32 (--fp32-residual-connection) is {CHECKED_LOCALLY}"),
        (getattr(model, "lora_rank", None), f"adapters (--lora-rank) are {CHECKED_LOCALLY}"),
    ):
        if is_on:
            return why
    return None
