"""The transformer layers of a GPT with dynamic CP, as a megatron-core spec."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dynamic_cp.attention.te.support import TransformerImpl
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.model.norm import TorchL2Norm, TorchNorm
from megatron.dynamic_cp.model.residual import add_to_residual
from megatron.dynamic_cp.model.self_attention import DynamicCPSelfAttention
from megatron.dynamic_cp.repairs import norm_recomputation


def gpt_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, transformer_impl: TransformerImpl = "local"
) -> TransformerBlockSubmodules:
    """Return the block of this pipeline stage (chunk `vp_stage` of it), with our self-attention and core attention.

    Args:
        transformer_impl: megatron-core's local layers with torch's norms, or its layers of TransformerEngine.
    """
    layer, norm = _local_layer(config) if transformer_impl == "local" else _transformer_engine_layer(config)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def _local_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    if config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ()):
        norm_recomputation.install()
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = TorchNorm
    layer.submodules.pre_mlp_layernorm = TorchNorm
    if config.fp32_residual_connection:
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add_to_residual
    attention = layer.submodules.self_attention
    attention.module = DynamicCPSelfAttention
    attention.submodules.core_attention = TorchTHDAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = TorchNorm
    _normalize_without_weights(attention, config)
    return layer, TorchNorm


def _transformer_engine_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    # Here: neither can be built without TransformerEngine.
    from megatron.core.extensions.transformer_engine import TENorm

    from megatron.dynamic_cp.attention.te.attention import TransformerEngineAttention

    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    attention = layer.submodules.self_attention
    attention.module = DynamicCPSelfAttention
    attention.submodules.core_attention = TransformerEngineAttention
    _normalize_without_weights(attention, config)
    return layer, TENorm


def _normalize_without_weights(attention: ModuleSpec, config: TransformerConfig) -> None:
    if config.qk_l2_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = TorchL2Norm
