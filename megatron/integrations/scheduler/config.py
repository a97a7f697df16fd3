"""What a configuration of megatron-core says of a job: a TransformerConfig, or what inherits from it.

Pure functions of an object with its fields; neither torch nor megatron-core is needed. Megatron-LM's dataclasses,
Bridge's providers and verl's `tf_config` are such objects. A field that one of them lacks is off.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import RECOMPUTE_MODULES, DataParallel, ModelShape, RecomputedLayers
from megatron.dynamic_cp.flags import linear_attention
from megatron.dynamic_cp.flags.experts import experts_of
from megatron.dynamic_cp.flags.latent_attention import is_on, qk_width, shape_of
from megatron.dynamic_cp.flags.pipeline_layers import pipeline_layers
from megatron.dynamic_cp.flags.windows import windows_of

_OF_STAGES = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
}
"""Flag of Megatron-LM -> the field of a configuration that says the same."""


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
    windows, latents = windows_of(config), is_on(config)
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size or 4 * config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads
        if latents
        else _or(config, "num_query_groups", "num_attention_heads"),
        kv_channels=qk_width(config)
        if latents
        else config.kv_channels or config.hidden_size // config.num_attention_heads,
        vocab_size=_vocab_size(config),
        gated_linear_unit=bool(getattr(config, "gated_linear_unit", False)),
        share_embeddings_and_output_weights=bool(getattr(config, "share_embeddings_and_output_weights", False)),
        attention_output_gate=bool(getattr(config, "attention_output_gate", False)),
        window_tokens=windows.tokens,
        window_attn_skip_freq=windows.skip_freq,
        window_sink_tokens=windows.sink_tokens,
        pipeline_layers=_pipeline_layers(config),
        experts=experts_of(config),
        mtp_num_layers=getattr(config, "mtp_num_layers", None) or 0,
        source="configuration of the framework",
        **shape_of(config),
        **linear_attention.shape_of(config),
    )


def layout_of(config: Any) -> dict[str, Any]:
    """Return what of `Topology` a configuration says besides the lanes."""
    fields = {
        "tp_size": "tensor_model_parallel_size",
        "pp_size": "pipeline_model_parallel_size",
        "vp_size": "virtual_pipeline_model_parallel_size",
        "ep_size": "expert_model_parallel_size",
        "sequence_parallel": "sequence_parallel",
    }
    return {name: getattr(config, field, None) or 1 for name, field in fields.items()} | {
        "sequence_parallel": bool(getattr(config, "sequence_parallel", False))
    }


def options_of(config: Any) -> dict[str, Any]:
    """Return what of `PlanOptions` a configuration says: recomputation and bytes.

    What selective recomputation repeats beyond `RECOMPUTE_MODULES` (activations, up-projections of latents) is not
    priced.
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
    """Return how lanes share gradients, where the object or Megatron-LM's arguments say it: None where none does."""
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


def _or(config: Any, name: str, other: str) -> int:
    value: int = getattr(config, name, None) or getattr(config, other)
    return value


def _pipeline_layers(config: Any) -> tuple[tuple[int, ...], ...]:
    flags = SimpleNamespace(
        num_layers=config.num_layers,
        pipeline_model_parallel_size=getattr(config, "pipeline_model_parallel_size", None) or 1,
        virtual_pipeline_model_parallel_size=getattr(config, "virtual_pipeline_model_parallel_size", None),
        **{flag: getattr(config, field, None) for flag, field in _OF_STAGES.items()},
    )
    return pipeline_layers(flags)


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
