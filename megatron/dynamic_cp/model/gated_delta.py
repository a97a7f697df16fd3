"""A gated delta net (Qwen3-Next) in the place of self-attention, with megatron-core's parameters of GatedDeltaNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.linear_attention import TOGETHER, LinearAttentionLayer
from megatron.dynamic_cp.model.norm import TorchNorm


class DynamicCPGatedDelta(LinearAttentionLayer):
    """Of each token it projects queries and keys, values, gates z, and for each head how it changes the state."""

    CONVOLVED, HAS_BIAS = ("query", "key", "value"), False

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config, layer_number, pg_collection, **unused)
        self.dt_bias = self._of_heads(torch.ones)
        self.out_norm = TorchNorm(config, self.sizes.value_size, config.layernorm_epsilon)
        if self.tp_size > 1 and not config.sequence_parallel:
            # Each TP rank has the gradient of its own heads, and their sum is wanted. megatron-core takes means of
            # what is marked so, and sums with sequence parallelism only.
            for parameter in self.out_norm.parameters():
                parameter.average_gradients_across_tp_domain = True
                parameter.register_hook(lambda gradient: gradient * self.tp_size)

    def _sections(self) -> dict[str, int]:
        keys, values, heads = (
            self.sizes.num_groups * self.sizes.key_size,
            self.sizes.value_channels,
            self.sizes.num_heads,
        )
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}

    def _attended(
        self, sections: Mapping[str, Tensor], params: DynamicPackedSeqParams, again: Callable[..., Tensor]
    ) -> Tensor:
        alpha = sections["alpha"]
        exact = torch.promote_types(alpha.dtype, torch.float32)
        decay = -self.A_log.exp() * softplus(alpha.to(exact) + self.dt_bias)

        def attend(*given: Tensor) -> Tensor:
            return gated_delta_net_thd(*given, params, self.sizes)

        found = self._core(attend, sections[TOGETHER], sections["beta"].sigmoid(), decay, self.conv1d.weight)

        def gated(found: Tensor, z: Tensor) -> Tensor:
            return (self.out_norm(found) * silu(z.to(exact))).to(found.dtype)

        return again(gated, found, sections["z"].unflatten(-1, (self.sizes.num_heads, -1))).flatten(1)
