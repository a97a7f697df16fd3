"""Multi-latent attention (DeepSeek-V2): queries, keys and values are projected up from narrow latents.

megatron-core's module refuses a CP group per micro-batch, rotates by its static group, and loses a sum over the
tensor-parallel ranks. Here only its weights and its last projection are used; the rest is computed below, rotated by
the true positions of the shard. Attention then is as in other models, with full keys and values of all heads; or, where
the plan says so, latents go round the lanes and each lane projects them up (`LatentRing`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from dynamic_cp.types import needs_latents
from megatron.dynamic_cp.attention.mechanisms.ring import LatentWidths
from megatron.dynamic_cp.model.self_attention import OneRotaryTable, check_groups, cos_sin_at, rotate
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams


class DynamicCPLatentAttention(MLASelfAttention):
    """megatron-core's MLASelfAttention, its weights and their names; the forward pass of training is ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_groups(kwargs.get("pg_collection"))
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = OneRotaryTable(self.rotary_pos_emb)
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            # In other models each TP rank has the gradient of its own heads for this norm, so megatron-core sums up
            # what is called q_layernorm. This one is of the latent, so every rank has the whole gradient: take their
            # mean.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *_unused: Any,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **_also_unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output [T, 1, hidden size], its bias); with sequence parallelism T is a share of the tokens."""
        params = DynamicPackedSeqParams.checked(packed_seq_params)
        query, latent, rotated = self._projected_down(hidden_states, params)
        checkpoints = self.checkpoint_core_attention and self.training
        if needs_latents(params.cp_comm_type) and params.cp_group.size() > 1:
            context = self._over_latents(query, latent, rotated, params, checkpoints=checkpoints)
        else:
            key, value = self._projected_up(latent, rotated)
            attend = self._checkpointed_attention_forward if checkpoints else self.core_attention
            context = attend(query, key, value, attention_mask, packed_seq_params=params)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(context.reshape(len(context), 1, -1))
        return output

    def _run_core_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the context; megatron-core's method since 0.18 also recomputes it, and pads and cuts values."""
        context: Tensor = self.core_attention(*args, **kwargs)
        return context

    def _projected_down(self, hidden_states: Tensor, params: DynamicPackedSeqParams) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [T, heads, qk width] of the heads of this TP rank, the normalized latent of keys and values
        (with sequence parallelism of a share of the tokens), and the rotated key [T, 1, 1, width] that all heads
        share."""
        config, cos_sin = self.config, self._cos_sin(params, hidden_states.dtype)
        content, rotated = config.qk_head_dim, config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            latent, _ = self._latent(self.linear_q_down_proj, hidden_states, config.q_lora_rank)
            query, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        # [T, 1, heads * width] -> [T, 1, heads, width]
        per_head = query.unflatten(-1, (self.num_attention_heads_per_partition, content + rotated))
        q_content, q_rotated = per_head.split((content, rotated), dim=-1)
        latent, k_rotated = self._latent(self.linear_kv_down_proj, hidden_states, config.kv_lora_rank, rotated)
        query = torch.cat((q_content, self._rotate(q_rotated, cos_sin)), dim=-1)
        return query.squeeze(1), self.kv_layernorm(latent), self._rotate(k_rotated.unsqueeze(-2), cos_sin)

    def _projected_up(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return key [T, heads, qk width] and value [T, heads, value width] of the heads of this TP rank."""
        config, heads = self.config, self.num_attention_heads_per_partition
        keys_and_values, _ = self.linear_kv_up_proj(latent)
        both = keys_and_values.unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
        k_content, value = both.split((config.qk_head_dim, config.v_head_dim), dim=-1)
        key = torch.cat((k_content, rotated.expand(-1, -1, heads, -1)), dim=-1)
        return key.squeeze(1), value.squeeze(1).contiguous()

    def _over_latents(
        self, query: Tensor, latent: Tensor, rotated: Tensor, params: DynamicPackedSeqParams, *, checkpoints: bool
    ) -> Tensor:
        """Return the context [T, 1, heads * value width], where the latents of all tokens go round the lanes."""
        config = self.config
        if config.tensor_model_parallel_size > 1:
            # Each TP rank projects up for its own heads: the gradient of a latent is the sum of theirs.
            if config.sequence_parallel:
                latent = gather_from_sequence_parallel_region(latent)
            else:
                latent = copy_to_tensor_model_parallel_region(latent)
        widths = LatentWidths(config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim)

        def attend(*given: Tensor) -> Tensor:
            context: Tensor = self.core_attention.over_latents(*given, widths, params)
            return context

        given = query, latent.squeeze(1), rotated.flatten(1), self.linear_kv_up_proj.weight
        context: Tensor = tensor_parallel.checkpoint(attend, False, *given) if checkpoints else attend(*given)
        return context

    def _latent(self, linear: Any, hidden_states: Tensor, width: int, more: int = 0) -> tuple[Tensor, Tensor]:
        """Return (the latent, `more` channels beside it) of a projection down. The latent is as the projection up takes
        it, with sequence parallelism a share of the tokens; the channels are of all tokens. megatron-core's own
        layers share channels out over TP ranks; TransformerEngine's have all on each."""
        combined, _ = linear(hidden_states)
        is_parallel = self.config.tensor_model_parallel_size > 1
        is_split = combined.shape[-1] != width + more
        if is_split:
            combined = gather_from_tensor_model_parallel_region(combined)
        latent, beside = combined.split((width, more), dim=-1)
        if is_parallel and self.config.sequence_parallel and not is_split:
            # Its backward pass sums over the TP ranks.
            return latent, gather_from_sequence_parallel_region(beside) if more else beside
        if is_parallel and self.config.sequence_parallel:
            latent = scatter_to_sequence_parallel_region(latent)
        if is_parallel and more:
            # Every TP rank uses it for its own heads, so its gradient is the sum of theirs. megatron-core 0.16.1 to
            # 0.19.2 forgets that: the gradient of its weights is off by 1%.
            beside = copy_to_tensor_model_parallel_region(beside)
        return latent, beside

    def _cos_sin(self, params: DynamicPackedSeqParams, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the local tokens, each [T, 1, 1, rotated width]; computed by the first layer."""

        def make() -> tuple[Tensor, Tensor]:
            found = self.rotary_pos_emb(params.max_seqlen_q)
            table, concentration = found if isinstance(found, tuple) else (found, 1.0)
            return cos_sin_at(table, params.positions, dtype, concentration)

        return params.cache.once("rotation", make)

    def _rotate(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Return x [T, 1, heads, width] rotated: neighbouring channels are pairs, and come out as halves."""
        halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(halves, *cos_sin, interleaved=False)
