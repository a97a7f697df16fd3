"""Self-attention whose rotary embedding follows the micro-batch's own CP group, without touching megatron-core's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron.dynamic_cp.flags.positions import concentration
from megatron.dynamic_cp.groups.model_groups import check_groups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.rotary import OneRotaryTable, rotary_cos_sin, rotate


class DynamicCPSelfAttention(SelfAttention):
    """megatron-core's SelfAttention; only where and how RoPE is applied differs, and that no gate is compiled."""

    _rotary: tuple[Tensor, Tensor] | None = None
    window_rotary: OneRotaryTable | None = None
    """Where the layer has a window and rotates by a base of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_groups(kwargs.get("pg_collection"))
        super().__init__(*args, **kwargs)
        unrotated = self.config.no_rope_freq
        assert not isinstance(unrotated, int), "a configuration has a list"
        self._rotates = not (unrotated and unrotated[self.layer_number - 1])
        self._concentration = concentration(self.config)

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
        if rotary_pos_emb is not None and self._rotates:
            self._rotary = self._angles(rotary_pos_emb, packed_seq_params, hidden_states.dtype)
        try:
            return super().forward(hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._rotary = None

    def _angles(self, table: Tensor, params: DynamicPackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the local tokens; `table`: the model's frequencies."""
        if self.window_rotary is None:
            return rotary_cos_sin(table, params, dtype, self._concentration)
        own = self.window_rotary(len(table))
        return rotary_cos_sin(own, params, dtype, self._concentration, called="rotation in windows")

    def queries_keys_values(
        self, hidden_states: Tensor, rotary_pos_emb: Tensor | None, params: DynamicPackedSeqParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what attention needs, [T, heads, dim] each, and the gate of its output where there is one.

        Args:
            hidden_states: as of `forward`; rotary_pos_emb: the whole frequency table.
        """
        if rotary_pos_emb is not None and self._rotates:
            self._rotary = self._angles(rotary_pos_emb, params, hidden_states.dtype)
        try:
            has_gate = self.config.attention_output_gate
            *found, last = self.get_query_key_value_tensors(hidden_states, None, output_gate=has_gate)
        finally:
            self._rotary = None
        query, key, value = (one.squeeze(1) for one in (found if has_gate else (*found, last)))
        return query, key, value, last if has_gate else None

    def projected(self, context: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layer's attention and its bias, from the context [T, 1, heads * dim]."""
        output, bias = self.linear_proj(context if gate is None else self._apply_output_gate(context, gate))
        return output, bias

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return query, key, value (and gate) with query and key rotated."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotary is not None:
            cos, sin = self._rotary
            interleaved = self.config.rotary_interleaved
            query = rotate(query, cos, sin, interleaved=interleaved)
            key = rotate(key, cos, sin, interleaved=interleaved)
        return query, key, *rest

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the context x [T, 1, heads * dim] times the sigmoid of its gate, which is as large.

        DEVIATION: megatron-core's is compiled. Reason: as of `norm.TorchL2Norm`. Recovery: none.
        """
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)
