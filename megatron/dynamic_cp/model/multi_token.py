"""Multi-token prediction: modules behind the last layer that each predict a token one place further on.

megatron-core shifts tokens, labels and masks inside the model, along its static CP group: of a shard it shifts the
wrong ones (gradients are 16 to 51% off). Here they are read from columns that were shifted before they were sharded
(`layout.future_columns`); the modules' layers are ours, as those before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron.dynamic_cp.flags.layer_needs import TransformerImpl
from megatron.dynamic_cp.flags.linear_attention import parts_of_layers
from megatron.dynamic_cp.layout.future_columns import FutureColumns
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.layer_specs import layer_spec
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
        """Return the tokens and positions as they came, the embeddings of the later tokens, the hidden states.

        Behind the positions the mask of padding, where megatron-core has one.
        """
        tokens, positions = future_of(packed_seq_params).inputs(self.layer_number)
        later = embedding(input_ids=tokens, position_ids=positions)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        masks = (padding_mask,) if releases.MODULES_OF_PACKS.here else ()
        return input_ids, position_ids, *masks, later, hidden_states

    def _checkpointed_forward(
        self,
        *args: Any,
        packed_seq_params: DynamicPackedSeqParams | None = None,
        **kwargs: Tensor | None,
    ) -> Tensor:
        """Recompute all of a module in backward; megatron-core takes the parameters of a pack for a tensor to save."""
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
    """Return what the modules read of a micro-batch.

    Raises:
        TypeError: it does not bring them.
    """
    if not isinstance(params, DynamicPackedSeqParams) or params.future is None:
        raise TypeError("multi-token prediction needs DynamicPackedSeqParams with `future`: ChunkNeeds.of(chunk) asks")
    return params.future


def mtp_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, transformer_impl: TransformerImpl = "local"
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the modules of this pipeline stage (chunk `vp_stage` of it), None where it has none.

    Args:
        transformer_impl: of their layers and norms, as of `layer_specs.gpt_block_spec`.
    """
    if not config.mtp_num_layers:
        return None
    # As megatron-core has it, a module's layer is as the last one of the model, on whatever stage that is.
    layer, norm = layer_spec(config, transformer_impl, parts_of_layers(config)[-1])
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=norm)
    spec = get_gpt_mtp_block_spec(config, block, transformer_impl == "transformer_engine", vp_stage=vp_stage)
    for module in [] if spec is None else spec.layer_specs:
        module.module = DynamicCPMultiTokenLayer
        module.submodules.enorm = module.submodules.hnorm = module.submodules.layer_norm = norm
    return spec
