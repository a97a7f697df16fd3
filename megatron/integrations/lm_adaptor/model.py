"""The models that a checkout builds; with dynamic context parallelism they have our layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from dynamic_cp.models.flags import TransformerImpl
from megatron.dynamic_cp.flags.attention import set_sinks
from megatron.dynamic_cp.flags.features import has_latents, qk_width
from megatron.dynamic_cp.flags.linear_attention import set_pattern
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model.chunked_head import ChunkedHeadModel, set_loss_chunk
from megatron.dynamic_cp.model.gpt import DynamicCPGPTModel as ModelWithOurNames
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.model.self_attention import use_one_rotary_table

NO_EFFECT = frozenset(
    {
        # Elementwise on the tokens of a rank, of any sample.
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "gradient_accumulation_fusion",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        # Of modules that our layers have in place of megatron-core's.
        "masked_softmax_fusion",
        "attention_softmax_in_fp32",
        "attention_backend",
        "persist_layer_norm",
        "apply_rope_fusion",
        "cp_comm_type",  # each micro-batch brings its own
        "transformer_impl",
        # Frees an output once it was sent, of any length.
        "deallocate_pipeline_outputs",
        # Of inference only.
        "inference_sampling_seed",
        "inference_rng_tracker",
        # Without effect, because what they refine is refused.
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
    }
)
"""Fields of TransformerConfig that Megatron-LM sets from its own defaults and that may have any value."""
NUM_WEIGHT_SHARDS = frozenset({"tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"})
"""More of them, in releases with `checkout.WEIGHT_SHARDS`; sizes above the tensor-parallel ones are refused."""


class DynamicCPGPTModel(ChunkedHeadModel):
    """megatron-core's GPTModel; if --dynamic-cp sets `enabled`, its layers take the CP group of each micro-batch.

    `transformer_impl` is chosen when the session begins. `window_sink_tokens` are those of layers with a window,
    `loss_chunk_tokens` those whose loss is computed at once (0: all).
    """

    enabled = False
    transformer_impl: TransformerImpl = "local"
    window_sink_tokens = 0
    loss_chunk_tokens = 0

    def __init__(self, config: TransformerConfig, transformer_layer_spec: Any, *args: Any, **kwargs: Any) -> None:
        if not self.enabled:
            super().__init__(config, transformer_layer_spec, *args, **kwargs)
            return
        set_sinks(config, self.window_sink_tokens)
        set_loss_chunk(config, self.loss_chunk_tokens)
        if has_latents(config):
            config.kv_channels = qk_width(config)  # Megatron-LM sets it as without latent attention
        if config.fp32_residual_connection:
            config.pipeline_dtype = torch.float32  # 0.16.1 leaves it at the dtype of parameters
        check_supported(config, also_allowed=NO_EFFECT | NUM_WEIGHT_SHARDS)
        spec = gpt_block_spec(config, kwargs.get("vp_stage"), transformer_impl=self.transformer_impl)
        super().__init__(config, spec, *args, **kwargs)
        use_one_rotary_table(self)


class DynamicCPHybridModel(DynamicCPGPTModel, ModelWithOurNames):
    """Takes the place of megatron-core's HybridModel, with the same arguments, layers and names of tensors."""

    def __init__(
        self, config: TransformerConfig, hybrid_stack_spec: Any, *args: Any, hybrid_layer_pattern: str, **kwargs: Any
    ) -> None:
        set_pattern(config, hybrid_layer_pattern)
        super().__init__(config, hybrid_stack_spec, *args, **kwargs)
