"""The transformer layers of a GPT with dynamic CP, as a megatron-core spec."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.flags import TransformerImpl
from megatron.dynamic_cp.attention.torch_thd import TorchTHDAttention
from megatron.dynamic_cp.flags import fp8, linear_attention
from megatron.dynamic_cp.flags.linear_attention import PLAIN, Parts, parts_of_layers
from megatron.dynamic_cp.model.experts import LayerWithExperts, use_our_parts
from megatron.dynamic_cp.model.latent_attention import DynamicCPLatentAttention
from megatron.dynamic_cp.model.layer_parts import TorchL2Norm, TorchNorm, add_to_residual
from megatron.dynamic_cp.model.self_attention import DynamicCPSelfAttention
from megatron.dynamic_cp.repairs import patches


def gpt_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, transformer_impl: TransformerImpl = "local"
) -> TransformerBlockSubmodules:
    """Return the block of this pipeline stage (chunk `vp_stage` of it), with our self-attention and core attention.
    `transformer_impl`: megatron-core's local layers with torch's norms, or its layers of TransformerEngine."""
    patches.repair_gathered_logits()
    _, norm = layer_spec(config, transformer_impl)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    own = parts_of_layers(config)[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    kinds = {parts: layer_spec(config, transformer_impl, parts)[0] for parts in set(own)}
    return TransformerBlockSubmodules(layer_specs=[kinds[parts] for parts in own], layer_norm=norm)


def layer_spec(
    config: TransformerConfig, transformer_impl: TransformerImpl, parts: Parts = PLAIN
) -> tuple[ModuleSpec, type]:
    """Return one layer with these parts, and the norm behind the last layer."""
    if fp8.is_on(config) and transformer_impl == "local":
        raise UnsupportedFeatureError(
            f"{fp8.FLAG} {config.fp8} with local layers is not supported: only TransformerEngine's compute in FP8; "
            "leave it out"
        )
    make = _local_layer if transformer_impl == "local" else _transformer_engine_layer
    layer, norm = make(config, config.num_moe_experts if parts.mlp == "experts" else None)
    if parts.mixer == "linear":
        _attend_linearly(layer, config)
    if linear_attention.pattern_of(config):
        _keep_half(layer, parts)
    return layer, norm


def _local_layer(config: TransformerConfig, num_experts: int | None) -> tuple[ModuleSpec, type]:
    if config.recompute_granularity == "selective" and {"layernorm", "gdn_norm_out"} & {*config.recompute_modules}:
        patches.repair_norm_recomputation()
    if config.multi_latent_attention:
        patches.repair_latent_attention()
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
            "--multi-latent-attention with layers of TransformerEngine is not supported: use --transformer-impl local"
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
        patches.repair_expert_routing()
        layer.module = LayerWithExperts
        use_our_parts(layer.submodules.mlp)


def _attend_linearly(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Give a layer linear attention, with matrices of the same classes as those of its attention. Tensors are named as
    in TransformerEngine's layers, which fuse the norm."""
    from megatron.dynamic_cp.model.linear_layers import LOCAL, DynamicCPGatedDelta, DynamicCPMamba, Projections

    is_mamba = linear_attention.kind_of(config) == linear_attention.MAMBA
    place = "mixer." if is_mamba else "self_attention."
    spec = layer.submodules.self_attention
    attention = spec.submodules
    # Latent attention has local layers, and no matrix of queries, keys and values.
    is_latent = config.multi_latent_attention
    layer.submodules.self_attention = ModuleSpec(
        module=DynamicCPMamba if is_mamba else DynamicCPGatedDelta,
        params=spec.params,  # modules of multi-token prediction ask for its mask
        submodules=LOCAL if is_latent else Projections(attention.linear_qkv, attention.linear_proj),
    )
    layer.submodules.sharded_state_dict_keys_map = {
        **layer.submodules.sharded_state_dict_keys_map,
        "input_layernorm.": f"{place}in_proj.layer_norm_",
        "self_attention.": place,
    }


def _keep_half(layer: ModuleSpec, parts: Parts) -> None:
    half = layer.submodules
    if parts.mixer is None:
        half.input_layernorm, half.self_attention, half.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp
    else:
        half.pre_mlp_layernorm, half.mlp, half.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp


def _normalize_without_weights(attention: ModuleSpec, config: TransformerConfig) -> None:
    if config.qk_l2_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = TorchL2Norm
