"""What the routers of a step did, summed over the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.dynamic_cp.flags.experts import aux_loss_coeff
from megatron.dynamic_cp.model.experts import routers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """The router of one layer; losses are means over the tokens of all sequences, without their coefficients.

    Attributes:
        aux_loss: load-balancing loss of the sequences; 1.0 is even, where scores are a softmax.
        z_loss: squared log-sum-exp of the logits.
        imbalance: tokens of the expert that got most, over their mean.
    """

    aux_loss: float
    z_loss: float
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """All routers of a step.

    Attributes:
        layers: number of the layer, from 1, those of multi-token prediction behind the last -> its router.
        has_aux_loss, has_z_loss: which losses are trained with; the others are 0.
    """

    layers: Mapping[int, LayerRouting]
    has_aux_loss: bool
    has_z_loss: bool

    def mean(self, name: str) -> float:
        """Return the mean over the layers of a field of LayerRouting."""
        return sum(getattr(layer, name) for layer in self.layers.values()) / max(1, len(self.layers))


def sum_over_routers(chunks: Sequence[torch.nn.Module], device: torch.device) -> Routing | None:
    """Return what routers counted since the last call; None for a dense model. One all-reduce over the job.

    Args:
        chunks: of this rank.
    """
    config = chunks[0].config
    if config.num_moe_experts is None:
        return None
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    sums = torch.zeros(num_layers, config.num_moe_experts + 3, dtype=torch.float64, device=device)
    for router in routers(chunks):
        counted = router.take_sums()
        if counted is not None:
            sums[router.number_in_model - 1] += counted
    dist.all_reduce(sums)
    layers = {}
    for number, (*tokens, aux, z, num_tokens) in enumerate(sums.tolist(), start=1):
        routed = sum(tokens)
        if routed:
            layers[number] = LayerRouting(
                aux_loss=aux / num_tokens,
                z_loss=z / num_tokens,
                imbalance=max(tokens) * config.num_moe_experts / routed,
            )
    return Routing(layers=layers, has_aux_loss=aux_loss_coeff(config) > 0, has_z_loss=bool(config.moe_z_loss_coeff))
