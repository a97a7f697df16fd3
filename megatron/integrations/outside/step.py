"""One optimizer step's worth of planned micro-batches: forward, backward, and one mean per token of the whole job.

Lanes hold different numbers of tokens, so a mean of means would be wrong: each lane adds up the losses of its own
tokens, and the sum is divided by the number of tokens with a loss on all lanes, which is counted first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import DataError, InvalidInputError
from megatron.dynamic_cp.data.micro_batches import micro_batches
from megatron.dynamic_cp.layout.packed_seq_params import ExchangeStats
from megatron.integrations.outside.lanes import Lanes, LaneStep

LossSum = Callable[[torch.nn.Module, dict[str, Any]], Tensor]
"""(wrapped model, micro-batch) -> sum of the losses of the lane's tokens that have one, a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step came to, equal on all lanes.

    Attributes:
        loss: mean over all tokens with a loss.
        num_tokens: how many those are.
        bytes_sent: by this lane for attention; the only figure that differs between lanes.
    """

    loss: float
    num_tokens: int
    bytes_sent: int


def sum_of_losses(token_losses: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the sum of the losses of unmasked tokens, both [1, T]."""
    return (token_losses.float() * loss_mask).sum()


def train_step(
    lanes: Lanes,
    model: torch.nn.Module,
    step: LaneStep,
    loss_sum: LossSum,
    *,
    backward: Callable[[Tensor], None] = Tensor.backward,
    label: str = "step",
) -> StepResult:
    """Run forward and backward of all micro-batches; the gradients are those of the mean loss per token. Collective.

    Gradients are added to what is there, and are reduced after the last micro-batch only. Every lane has equally many
    micro-batches; an empty place is one token of padding without a loss.

    Args:
        model: wrapped in DistributedDataParallel or by `fully_shard` over all lanes; both average over lanes.
        loss_sum: see `LossSum`. A micro-batch has "tokens", "labels", "position_ids" and "loss_mask" [1, T] and
            "packed_seq_params", which the model hands to its attention.
        backward: what to call on the loss, such as `accelerator.backward`.
        label: where in the run this is, for error messages.

    Raises:
        InvalidInputError: a model that does not reduce gradients over all lanes.
        DataError: no token of the global batch has a loss.
    """
    check_reduces_over(model, lanes.num_lanes)
    num_tokens = round(_summed(step.packed.loss_mask.sum(dtype=torch.float64), lanes))
    if num_tokens == 0:
        raise DataError(
            f"{label}: 0 of the {step.plan.facts.seqlen_sum} tokens of the global batch have a loss: check labels and "
            "loss masks"
        )
    stats = ExchangeStats()
    total = torch.zeros((), dtype=torch.float64, device=lanes.device)
    num_microbatches = len(step.packed.buckets)
    mask = lanes.problem.model.layer.mask
    for index, batch in enumerate(micro_batches(step.packed, lanes.groups, lanes.device, label, stats, mask)):
        with _reducing(model, index == num_microbatches - 1):
            loss = loss_sum(model, batch)
            # The model's wrapper averages over lanes what is to be a sum.
            backward(loss * (lanes.num_lanes / num_tokens))
        total += loss.detach().double()
    return StepResult(loss=_summed(total, lanes) / num_tokens, num_tokens=num_tokens, bytes_sent=stats.bytes_sent)


def check_reduces_over(model: torch.nn.Module, num_lanes: int) -> None:
    """Refuse a model whose gradients would not be averaged over `num_lanes` ranks.

    Raises:
        InvalidInputError: it is not wrapped, or over another number of ranks.
    """
    parameter = next(model.parameters())
    if isinstance(model, DistributedDataParallel):
        num_ranks = model.process_group.size()
    elif isinstance(parameter, DTensor):
        num_ranks = parameter.device_mesh.size()
    else:
        num_ranks = 1
    if num_ranks != num_lanes:
        raise InvalidInputError(
            f"the model reduces gradients over {num_ranks} ranks, the job has {num_lanes} lanes: wrap it as "
            "DistributedDataParallel(model, process_group=lanes.mesh.get_group()) or fully_shard(model, "
            "mesh=lanes.mesh)",
            num_ranks=num_ranks,
            num_lanes=num_lanes,
        )


def _reducing(model: torch.nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):  # fully_shard
        model.set_requires_gradient_sync(is_last)
    return nullcontext()


def _summed(value: Tensor, lanes: Lanes) -> float:
    value = value.to(lanes.device)
    dist.all_reduce(value, group=lanes.mesh.get_group())
    return value.item()
