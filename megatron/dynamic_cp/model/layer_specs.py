"""The transformer layers of a GPT with dynamic CP, as a megatron-core spec."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import layers_with_experts
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.flags import fp8
from megatron.dynamic_cp.flags.layer_needs import TransformerImpl
from megatron.dynamic_cp.model.experts import LayerWithExperts, use_our_parts
from megatron.dynamic_cp.model.latent_attention import DynamicCPLatentAttention
from megatron.dynamic_cp.model.norm import TorchL2Norm, TorchNorm
from megatron.dynamic_cp.model.residual import add_to_residual
from megatron.dynamic_cp.model.self_attention import DynamicCPSelfAttention
from megatron.dynamic_cp.repairs import expert_routing, gathered_logits, latent_attention, norm_recomputation


def gpt_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, transformer_impl: TransformerImpl = "local"
) -> TransformerBlockSubmodules:
    """Return the block of this pipeline stage (chunk `vp_stage` of it), with our self-attention and core attention.

    Args:
        transformer_impl: megatron-core's local layers with torch's norms, or its layers of TransformerEngine.
    """
    gathered_logits.install()
    layer, norm = layer_spec(config, transformer_impl)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [layer] * num_layers
    if config.num_moe_experts is not None:
        with_experts, _ = layer_spec(config, transformer_impl, config.num_moe_experts)
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        have_some = layers_with_experts(config.moe_layer_freq, config.num_layers)[first : first + num_layers]
        layers = [with_experts if has_some else layer for has_some in have_some]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def layer_spec(
    config: TransformerConfig, transformer_impl: TransformerImpl, num_experts: int | None = None
) -> tuple[ModuleSpec, type]:
    """Return one layer, dense or with experts, and the norm behind the last one."""
    if fp8.is_on(config) and transformer_impl == "local":
        raise UnsupportedFeatureError(
            f"{fp8.FLAG} {config.fp8} with local layers is not supported: only TransformerEngine's compute in FP8; "
            "leave it out",
            flag=fp8.FLAG,
        )
    make = _local_layer if transformer_impl == "local" else _transformer_engine_layer
    return make(config, num_experts)


def _local_layer(config: TransformerConfig, num_experts: int | None) -> tuple[ModuleSpec, type]:
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        norm_recomputation.install()
    if config.multi_latent_attention:
        latent_attention.install()
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    layer.submodules.input_layernorm = TorchNorm
    layer.submodules.pre_mlp_layernorm = TorchNorm
    if config.fp32_residual_connection:
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add_to_residual
    attention = layer.submodules.self_attention
    attention.module = DynamicCPLatentAttention if config.multi_latent_attention else DynamicCPSelfAttention
    attention.submodules.core_attention = TorchTHDAttention
    if config.qk_layernorm:
        names = ("q_layernorm", "kv_layernorm" if config.multi_latent_attention else "k_layernorm")
        for name in names:
            setattr(attention.submodules, name, TorchNorm)
    _normalize_without_weights(attention, config)
    _route_by_sample(layer, num_experts)
    return layer, TorchNorm


def _transformer_engine_layer(config: TransformerConfig, num_experts: int | None) -> tuple[ModuleSpec, type]:
    if config.multi_latent_attention:
        raise UnsupportedFeatureError(
            "--multi-latent-attention with layers of TransformerEngine is not supported: use --transformer-impl local",
            flag="--multi-latent-attention",
        )
    # Here: neither can be built without TransformerEngine.
    from megatron.core.extensions.transformer_engine import TENorm

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    attention = layer.submodules.self_attention
    attention.module = DynamicCPSelfAttention
    attention.submodules.core_attention = TransformerEngineAttention
    _normalize_without_weights(attention, config)
    _route_by_sample(layer, num_experts)
    return layer, TENorm


def _route_by_sample(layer: ModuleSpec, num_experts: int | None) -> None:
    if num_experts is not None:
        expert_routing.install()
        layer.module = LayerWithExperts
        use_our_parts(layer.submodules.mlp)


def _normalize_without_weights(attention: ModuleSpec, config: TransformerConfig) -> None:
    if config.qk_l2_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = TorchL2Norm
