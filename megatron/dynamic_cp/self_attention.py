"""Self-attention whose rotary embedding follows the micro-batch's own CP group.

megatron-core 0.16.1 rotates packed sequences with its static group, in a Python loop over sequences with host syncs in
every layer. Here the positions of the local tokens, known since the pack was built, select the rows of the frequency
table once per micro-batch; every layer then rotates with two multiplications. No process-group collection is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


def rotary_cos_sin(frequencies: Tensor, params: DynamicPackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the local tokens, each [T, 1, 1, rotary dim]; computed by the first layer that asks.

    Args:
        frequencies: megatron-core's table of angles, float32 [longest sequence, 1, 1, rotary dim].
    """
    if params.rotary_cache is None:
        angles = frequencies.index_select(0, params.positions)
        params.rotary_cache = angles.cos().to(dtype), angles.sin().to(dtype)
    return params.rotary_cache


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return x [T, 1, heads, dim] with its first `rotary dim` channels rotated; the rest passes."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)


class DynamicCPSelfAttention(SelfAttention):
    """megatron-core's SelfAttention; only where and how RoPE is applied differs."""

    _rotary: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See SelfAttention.forward; `rotary_pos_emb` is the whole frequency table, not this shard's part."""
        if not isinstance(packed_seq_params, DynamicPackedSeqParams):
            raise TypeError(f"DynamicPackedSeqParams needed, got {type(packed_seq_params).__name__}")
        if rotary_pos_emb is not None:
            self._rotary = rotary_cos_sin(rotary_pos_emb, packed_seq_params, hidden_states.dtype)
        try:
            return super().forward(hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotary = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return query, key, value (and gate) with query and key rotated."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotary is not None:
            cos, sin = self._rotary
            interleaved = self.config.rotary_interleaved
            query = rotate(query, cos, sin, interleaved=interleaved)
            key = rotate(key, cos, sin, interleaved=interleaved)
        return query, key, *rest
