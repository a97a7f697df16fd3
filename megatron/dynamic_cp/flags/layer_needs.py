"""What a run asks of its layers, made from flags; `attention.te.support.choose_layers` answers with the layers.

Pure functions of settings, without torch and megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dynamic_cp.models.flags import TransformerImpl
from dynamic_cp.models.layers import CHECKED_LOCALLY, why_local
from dynamic_cp.types import CpCommType, is_placed
from megatron.dynamic_cp.flags import features, fp8
from megatron.dynamic_cp.flags.experts import num_experts
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.dynamic_cp.flags.shape import said


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
