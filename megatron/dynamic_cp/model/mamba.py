"""Mamba-2 in the place of self-attention, with the parameters of megatron-core's MambaMixer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu, softplus

from megatron.dynamic_cp.attention.linear.thd import mamba2_thd
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.linear_attention import TOGETHER, LinearAttentionLayer, Offsets, sharded_by_rows

STEP_RANGE = 0.001, 0.1
"""Of which steps dt are drawn, by their logarithm; and the norm's epsilon: as in megatron-core, which has no flags."""
EPSILON = 1e-5


class DynamicCPMamba(LinearAttentionLayer):
    """Of each token it projects gates z, values x, keys B, queries C, and for each head the step by which it decays."""

    CONVOLVED, HAS_BIAS = ("x", "B", "C"), True

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config, layer_number, pg_collection, **unused)
        self.dt_bias = self._of_heads(_drawn_steps)
        self.D = self._of_heads(torch.ones)
        self.norm = _GroupNorm(self.sizes.value_channels, self.sizes.num_groups, config.params_dtype)

    def _sections(self) -> dict[str, int]:
        keys, values = self.sizes.num_groups * self.sizes.key_size, self.sizes.value_channels
        return {"z": values, "x": values, "B": keys, "C": keys, "dt": self.sizes.num_heads}

    def _attended(
        self, sections: Mapping[str, Tensor], params: DynamicPackedSeqParams, again: Callable[..., Tensor]
    ) -> Tensor:
        convolved = sections[TOGETHER]
        exact = torch.promote_types(convolved.dtype, torch.float32)
        steps = softplus(sections["dt"].to(exact) + self.dt_bias.to(exact))

        def attend(*given: Tensor) -> Tensor:
            return mamba2_thd(*given, params, self.sizes)

        conv = self.conv1d
        found = self._core(attend, convolved, steps, self.A_log, self.D, conv.weight, conv.bias).flatten(1)

        def gated(found: Tensor, z: Tensor) -> Tensor:
            return self.norm(found * silu(z.to(exact))).to(found.dtype)

        return again(gated, found, sections["z"])


class _GroupNorm(torch.nn.Module):
    """An RMS norm of the channels of each group of this rank; each channel has its own weight."""

    def __init__(self, channels: int, num_groups: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [T, channels], normalized."""
        groups = x.unflatten(-1, (self.num_groups, -1))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPSILON)
        return (groups * scale).flatten(1) * self.weight.to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the weights of the channels of this tensor-parallel rank."""
        return sharded_by_rows(self, prefix, sharded_offsets)


def _drawn_steps(heads: int) -> Tensor:
    """Return the biases of steps [heads], of which softplus makes steps between those of STEP_RANGE."""
    low, high = map(math.log, STEP_RANGE)
    steps = torch.exp(torch.empty(heads).uniform_(low, high)).clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))
