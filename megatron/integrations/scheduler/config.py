"""What a configuration of megatron-core says of a job: a TransformerConfig, or what inherits from it.

Pure functions of any object with its fields: Megatron-LM's dataclasses, Bridge's providers, verl's `tf_config`. A field
that an object lacks is off.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.flags import MEANINGS
from dynamic_cp.types import RECOMPUTE_MODULES, DataParallel, ModelShape, RecomputedLayers
from megatron.dynamic_cp.flags import linear_attention
from megatron.dynamic_cp.flags.experts import num_experts
from megatron.dynamic_cp.flags.features import has_latents, qk_width
from megatron.dynamic_cp.flags.layout import pipeline_layers
from megatron.dynamic_cp.flags.shape import model_shape


def is_config(value: Any) -> bool:
    """Return whether `value` has what a plan needs of a TransformerConfig."""
    return all(hasattr(value, name) for name in ("num_layers", "hidden_size", "num_attention_heads"))


def model_of(config: Any) -> ModelShape:
    """Return the numbers of the model that decide its cost.

    Without a vocabulary in the configuration or in Megatron-LM's arguments the LM head is left out.

    Raises:
        DynamicCPError: windows, latents, linear attention or layers of stages that the planner does not know.
    """
    if getattr(config, "is_hybrid_model", False) and not linear_attention.pattern_of(config):
        raise UnsupportedFeatureError(
            "is_hybrid_model is true, and the configuration has no hybrid_override_pattern: give the model to job_of()"
        )
    flags = SimpleNamespace(
        **{name: getattr(config, means.config) for name, means in MEANINGS.items() if hasattr(config, means.config)},
        multi_latent_attention=has_latents(config),
        swiglu=bool(getattr(config, "gated_linear_unit", False)),
        untie_embeddings_and_output_weights=not getattr(config, "share_embeddings_and_output_weights", False),
        window_sink_tokens=getattr(config, "window_sink_tokens", 0),
        hybrid_override_pattern=linear_attention.pattern_of(config),
        pipeline_model_parallel_size=getattr(config, "pipeline_model_parallel_size", None) or 1,
        virtual_pipeline_model_parallel_size=getattr(config, "virtual_pipeline_model_parallel_size", None),
    )
    flags.num_experts = num_experts(config)
    heads = config.num_attention_heads
    flags.ffn_hidden_size = config.ffn_hidden_size or 4 * config.hidden_size
    flags.num_query_groups = heads if has_latents(config) else getattr(config, "num_query_groups", None) or heads
    flags.kv_channels = qk_width(config) if has_latents(config) else config.kv_channels or config.hidden_size // heads
    shape = model_shape(flags, _vocab_size(config), pipeline_layers(flags))
    return replace(shape, source="configuration of the framework")


def layout_of(config: Any) -> dict[str, Any]:
    """Return what of `Topology` a configuration says besides the lanes."""
    kinds = {"tp_size": "tensor", "pp_size": "pipeline", "vp_size": "virtual_pipeline", "ep_size": "expert"}
    sizes = {name: getattr(config, f"{kind}_model_parallel_size", None) or 1 for name, kind in kinds.items()}
    return {**sizes, "sequence_parallel": bool(getattr(config, "sequence_parallel", False))}


def options_of(config: Any) -> dict[str, Any]:
    """Return what of `PlanOptions` a configuration says: recomputation and bytes. Selective recomputation beyond
    `RECOMPUTE_MODULES` (shared experts) is not priced.
    """
    has_bf16 = any(getattr(config, name, False) for name in ("bf16", "fp16"))
    options: dict[str, Any] = {
        "bytes_per_element": 2 if has_bf16 else 4,
        "fp32_residual": bool(getattr(config, "fp32_residual_connection", False)) and has_bf16,
    }
    granularity = getattr(config, "recompute_granularity", None)
    if granularity == "selective":
        modules = getattr(config, "recompute_modules", None)
        known = tuple(name for name in RECOMPUTE_MODULES if name in (("core_attn",) if modules is None else modules))
        options |= {"recompute": "selective", "recompute_modules": known} if known else {}
    elif granularity == "full":
        options["recompute"] = "full"
        method = getattr(config, "recompute_method", None) or "uniform"
        options["recompute_layers"] = RecomputedLayers(method, getattr(config, "recompute_num_layers", None) or 1)
    return options


def data_parallel_of(config: Any) -> DataParallel | None:
    """Return how lanes share gradients, as the object or Megatron-LM's arguments say; None if neither does."""
    flags = config if hasattr(config, "use_distributed_optimizer") else _arguments()
    if not hasattr(flags, "use_distributed_optimizer"):
        return None
    overlap_reduce = bool(getattr(flags, "overlap_grad_reduce", False))
    shards = bool(flags.use_distributed_optimizer)
    return DataParallel(
        distributed_optimizer=shards,
        overlap_grad_reduce=overlap_reduce,
        overlap_param_gather=shards and overlap_reduce and bool(getattr(flags, "overlap_param_gather", False)),
    )


def _vocab_size(config: Any) -> int:
    for holder, name in ((config, "padded_vocab_size"), (config, "vocab_size"), (_arguments(), "padded_vocab_size")):
        if getattr(holder, name, None):
            return int(getattr(holder, name))
    return 1


def _arguments() -> Any:
    """Return Megatron-LM's parsed arguments; None in another loop, or before they are parsed."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return None if module is None else module.get_args()
    except AssertionError:
        return None
