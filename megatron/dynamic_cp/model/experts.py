"""A transformer layer with experts, whose router knows the micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.router import DynamicCPRouter
from megatron.dynamic_cp.repairs import releases


class LayerWithExperts(TransformerLayer):
    """megatron-core's layer; hands the parameters of a micro-batch to its router.

    They go the way of a padding mask, which megatron-core hands on as it is, also when the experts are recomputed
    (--recompute-modules moe): by then another micro-batch may have passed through the layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The same pass that megatron-core would repeat, but with the arguments that it was called with.
        self.recompute_mlp, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False
        self.mlp.register_forward_pre_hook(_hand_over, with_kwargs=True)
        if self.config.tensor_model_parallel_size > 1:
            # Whole experts on each tensor-parallel rank see the tokens of that rank: their gradients are summed over
            # these ranks, too. megatron-core does so with EP > 1 only.
            for parameter in self.mlp.experts.parameters():
                parameter.allreduce = False

    def forward(
        self, *args: Any, packed_seq_params: DynamicPackedSeqParams | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See TransformerLayer.forward."""
        kwargs["padding_mask"] = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[no-any-return]


def _hand_over(experts: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    experts.router.params = kwargs.pop("padding_mask", None)
    return args, kwargs


def use_router(mlp: Any) -> None:
    """Have the experts of a layer spec built with our router."""
    submodules = mlp.keywords["submodules"] if releases.EXPERTS_BY_FUNCTION.here else mlp.submodules
    submodules.router = DynamicCPRouter


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[DynamicCPRouter]:
    """Yield the routers of model chunks."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, DynamicCPRouter))
