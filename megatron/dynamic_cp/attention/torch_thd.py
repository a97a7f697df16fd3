"""The core attention that megatron-core builds without TransformerEngine: THD, causal, windows, GQA."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from megatron.dynamic_cp.attention.kernels.choice import check_kernel, choose_kernel, ranged_kernel
from megatron.dynamic_cp.attention.mechanisms.ring import LatentWidths
from megatron.dynamic_cp.attention.thd import attention_from_latents, attention_thd
from megatron.dynamic_cp.flags.attention import windows_of
from megatron.dynamic_cp.flags.linear_attention import linear_attention_of
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

logger = logging.getLogger(__name__)


def prepare_kernel(config: TransformerConfig, device: torch.device, *, ranges: bool = False) -> None:
    """Choose the kernels that attention of all kinds will use, log why, and check them on the device; at start-up.
    `ranges`: tokens will see ranges of keys, so the kernel for these is checked as well. Raises
    UnsupportedFeatureError: no kernel can do what `config` asks for here, or one computes something else."""
    of_tensors = device, config.params_dtype, config.kv_channels
    kernels = [choose_kernel(config.attention_backend.name, *of_tensors)]
    if ranges and not kernels[0].serves_ranges:
        kernels.append(ranged_kernel(*of_tensors))
    tp_size = config.tensor_model_parallel_size
    for kernel in kernels:
        error = check_kernel(
            kernel,
            device,
            config.params_dtype,
            heads=config.num_attention_heads // tp_size,
            kv_heads=max(1, config.num_query_groups // tp_size),
            head_dim=config.kv_channels,
        )
        if error:
            logger.info("attention kernel %s checked: %.4f of the norm away from the portable one", kernel.name, error)
    linear_attention = linear_attention_of(config)
    if linear_attention is not None:
        from megatron.dynamic_cp.attention.linear.kernels import prepare_linear_kernel

        error = prepare_linear_kernel(linear_attention.of_rank(tp_size), config.params_dtype, device)
        if error:
            logger.info("linear attention checked: %.4f of the norm away from the portable kernel", error)


class TorchTHDAttention(MegatronModule):
    """`attention_thd` as the module that megatron-core builds. Its `window` is None where a token sees all before it.
    Raises UnsupportedFeatureError: attention dropout, or a mask other than causal."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise UnsupportedFeatureError(
                f"--attention-dropout {dropout} is not supported by the torch THD attention, only 0: "
                "use --attention-dropout 0.0"
            )
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise UnsupportedFeatureError(
                f"{attention_type} attention with mask {attn_mask_type} is not supported, only causal self-attention"
            )
        self.layer_number = layer_number
        self.window = windows_of(config).of_layer(layer_number)
        self.backend = config.attention_backend.name
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._add_softmax_offset(config)

    def _add_softmax_offset(self, config: TransformerConfig) -> None:
        """Make the additional score of each head, named as in megatron-core and the same for any number of TP ranks."""
        offset_H = torch.zeros(config.num_attention_heads, dtype=config.params_dtype)
        if config.softmax_type == "learnable" and config.perform_initialization:
            config.init_method(offset_H)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        own_H = offset_H.chunk(config.tensor_model_parallel_size)[tp_rank].clone()
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(own_H)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        else:  # in no checkpoint: it follows from the flag
            self.register_buffer(
                "softmax_offset", own_H if config.softmax_type == "off-by-one" else None, persistent=False
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
    ) -> Tensor:
        """Return the context [T, 1, heads * value dim] of shards query [T, heads, dim] and key [T, kv_heads, dim].
        `value` is [T, kv_heads, value dim], at most as wide as keys (narrower in latent attention)."""
        params = DynamicPackedSeqParams.checked(packed_seq_params)
        params = params if self.window is None else params.with_mask(self.window)
        out_THD = attention_thd(
            query, key, value, params, self.softmax_scale, self.backend, softmax_offset_H=self.softmax_offset
        )[..., : value.shape[-1]]
        return out_THD.reshape(len(out_THD), 1, -1)

    def over_latents(
        self,
        query: Tensor,
        latent: Tensor,
        rotated: Tensor,
        weight: Tensor,
        widths: LatentWidths,
        params: DynamicPackedSeqParams,
    ) -> Tensor:
        """Return the context [T, 1, heads * value width] of shards; arguments as for `attention_from_latents`."""
        out_THD = attention_from_latents(
            query, latent, rotated, weight, widths, params, self.softmax_scale, self.backend
        )
        return out_THD.reshape(len(out_THD), 1, -1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the learned offsets of this tensor-parallel rank's heads; see megatron-core's method."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
