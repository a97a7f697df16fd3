"""The GPT model and its modules of multi-token prediction, which each predict a token one place further on.

megatron-core shifts tokens, labels and masks inside the model along its static CP group, which is wrong for a shard
(gradients are 16 to 51% off). Here they come from columns shifted before sharding
(`packed_seq_params.FutureColumns`); the modules' layers are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from dynamic_cp.models.flags import TransformerImpl
from megatron.dynamic_cp.flags.linear_attention import parts_of_layers, pattern_of
from megatron.dynamic_cp.model.chunked_head import ChunkedHeadModel
from megatron.dynamic_cp.model.layer_specs import layer_spec
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, FutureColumns
from megatron.dynamic_cp.repairs import releases


class DynamicCPMultiTokenLayer(MultiTokenPredictionLayer):
    """megatron-core's module of one depth; only where its tokens come from differs."""

    def _get_embeddings(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return tokens and positions as they came, the mask of padding where megatron-core has one, the embeddings of
        the later tokens, the hidden states."""
        tokens, positions = future_of(packed_seq_params).inputs(self.layer_number)
        later = embedding(input_ids=tokens, position_ids=positions)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        masks = (padding_mask,) if releases.MODULES_OF_PACKS.here else ()
        return input_ids, position_ids, *masks, later, hidden_states

    def _checkpointed_forward(
        self, *args: Any, packed_seq_params: DynamicPackedSeqParams | None = None, **kwargs: Tensor | None
    ) -> Tensor:
        """Recompute a whole module in backward; megatron-core takes the parameters of a pack for a tensor to save."""
        output: Tensor
        if releases.MODULES_OF_PACKS.here:
            if not releases.MASK_RECOMPUTED.here:
                del kwargs["padding_mask"]  # None: tokens know their sample
            output = super()._checkpointed_forward(*args, packed_seq_params=packed_seq_params, **kwargs)
            return output
        forward_func, *args = args
        names = tuple(kwargs)

        def forward(*values: Tensor | None) -> Tensor:
            num_args = len(values) - len(names)
            named = dict(zip(names, values[num_args:], strict=True))
            return forward_func(*values[:num_args], packed_seq_params=packed_seq_params, **named)

        output = super()._checkpointed_forward(forward, *args, **kwargs)
        return output


def future_of(params: DynamicPackedSeqParams | None) -> FutureColumns:
    """Return the columns of a micro-batch that the modules read; TypeError if it does not bring them."""
    if not isinstance(params, DynamicPackedSeqParams) or params.future is None:
        raise TypeError("multi-token prediction needs DynamicPackedSeqParams with `future`: ChunkNeeds.of(chunk) asks")
    return params.future


def mtp_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, transformer_impl: TransformerImpl = "local"
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the modules of this pipeline stage (chunk `vp_stage` of it), None where it has none. `transformer_impl` is
    that of their layers and norms, as in `layer_specs.gpt_block_spec`."""
    if not config.mtp_num_layers:
        return None
    # As in megatron-core, a module's layer is like the last one of the model, on whatever stage that is.
    layer, norm = layer_spec(config, transformer_impl, parts_of_layers(config)[-1])
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=norm)
    spec = get_gpt_mtp_block_spec(config, block, transformer_impl == "transformer_engine", vp_stage=vp_stage)
    for module in [] if spec is None else spec.layer_specs:
        module.module = DynamicCPMultiTokenLayer
        module.submodules.enorm = module.submodules.hnorm = module.submodules.layer_norm = norm
    return spec


class DynamicCPGPTModel(ChunkedHeadModel):
    """megatron-core's GPTModel, but for chunks of the loss, and how multi-token prediction is trained. Evaluation
    leaves the latter out. A loss counts where its label is of the same sample and counts. The gradient of each depth is
    that of `mtp_loss_scaling_factor` / depths times the sum of its losses, divided by the tokens of the whole job."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
            # The head uses the modules' embedding. megatron-core still makes weights of its own for it, never uses
            # them, and then cannot save a model that has them.
            self.output_layer.weight = None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return its tensors under megatron-core's names; hybrids, made of halves, have those of its hybrid class."""
        is_last = self.post_process
        # Where a value head took its place, megatron-core still looks for the weight of the LM head.
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
        `shared` is the head's weight where it is the embedding's; `inputs` are GPTModel's other inputs for its
        modules."""
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
