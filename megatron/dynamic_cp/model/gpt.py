"""GPTModel whose losses of multi-token prediction are those of the micro-batch's own columns."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron.dynamic_cp.flags.linear_attention import pattern_of
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.chunked_head import ChunkedHeadModel
from megatron.dynamic_cp.model.multi_token import future_of


class DynamicCPGPTModel(ChunkedHeadModel):
    """megatron-core's GPTModel, but for chunks of the loss, and how multi-token prediction is trained.

    Evaluation leaves it out. A loss counts where its label is one of the same sample that counts. The gradient of each
    depth is that of `mtp_loss_scaling_factor` / depths times the sum of its losses; like that of the model's own loss
    it is divided by the tokens of the whole job.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
            # The head uses the embedding that the modules have here. megatron-core makes weights of its own for it
            # all the same, leaves them alone, and then cannot save a model that has them.
            self.output_layer.weight = None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return its tensors under megatron-core's names: those of its class of hybrids, where layers are halves."""
        is_last = self.post_process
        # Where a value head took its place, megatron-core looks for the weight of the LM head all the same.
        self.post_process = is_last and self.output_layer is not None
        try:
            state: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.post_process = is_last
        if pattern_of(self.config):
            apply_prefix_mapping(state, {f"{prefix}decoder.final_layernorm.": f"{prefix}decoder.final_norm."})
        return state

    def _postprocess(
        self,
        hidden_states: Tensor,
        *args: Any,
        labels: Tensor | None = None,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not self.mtp_process:
            kwargs |= {"labels": labels, "packed_seq_params": packed_seq_params}
            output: Tensor = super()._postprocess(hidden_states, *args, **kwargs)
            return output
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.training:
            hidden_states = self._with_future_losses(hidden_states, packed_seq_params, shared, kwargs)
        gathers = kwargs.get("runtime_gather_output")
        if labels is not None:
            return self.token_losses(hidden_states, labels, shared, gathers)
        logits, _ = self.output_layer(hidden_states, weight=shared, runtime_gather_output=gathers)
        return logits.transpose(0, 1).contiguous()

    def _with_future_losses(
        self,
        hidden_states: Tensor,
        params: DynamicPackedSeqParams | None,
        shared: Tensor | None,
        inputs: dict[str, Any],
    ) -> Tensor:
        """Return the hidden states [T, 1, hidden size], with the losses of all depths attached to their gradient.

        Args:
            shared: weights of the head where they are the embedding's.
            inputs: what else GPTModel hands over for its modules.
        """
        future, depths = future_of(params), self.config.mtp_num_layers
        names = "input_ids position_ids attention_mask rotary_pos_emb rotary_pos_cos rotary_pos_sin sequence_len_offset"
        given = {name: inputs.get(name) for name in names.split()}
        states = self.mtp(hidden_states=hidden_states, packed_seq_params=params, embedding=self.embedding, **given)
        hidden_states, *of_depths = torch.chunk(states, 1 + depths, dim=0)
        future.found.clear()
        for depth, state in enumerate(of_depths, 1):
            labels, mask = future.targets(depth)
            losses = self.token_losses(state, labels, shared) * mask
            future.found.append(torch.stack([losses.detach().float().sum(), mask.sum()]))
            scale = self.config.mtp_loss_scaling_factor / depths
            hidden_states = MTPLossAutoScaler.apply(hidden_states, scale * losses)
        return hidden_states
