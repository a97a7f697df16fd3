"""What a loop of plain PyTorch calls: attention of packed micro-batches, and one optimizer step's worth of them.

Lanes hold different numbers of tokens, so a mean of means would be wrong. Each lane adds up its own losses, and the sum
is divided by the number of tokens with a loss on all lanes, which is counted first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import DataError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import CAUSAL
from megatron.dynamic_cp.attention.thd import attention_thd
from megatron.dynamic_cp.data.micro_batches import micro_batches
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.integrations.outside.lanes import Lanes, LaneStep

_TORCH_CP = "torch.distributed.tensor.experimental"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    *,
    packed_seq_params: DynamicPackedSeqParams,
) -> Tensor:
    """Return attention [1, heads, T, dim] inside each packed sequence, over the lanes of the micro-batch's CP group.

    Takes torch's arguments, to stand where a model calls `F.scaled_dot_product_attention`. It is causal or full as
    planned for; keys of padding are never seen. Collective over the CP group, in backward, too.

    Args:
        query: local shard [1, heads, T, dim]; key, value: [1, kv_heads, T, dim], where kv_heads divides heads.
        attn_mask, dropout_p, is_causal: only None, 0, and None or what was planned for are possible.
        scale: of the scores; default 1 / sqrt(dim).

    Raises UnsupportedFeatureError: a mask, dropout, another `is_causal`, or torch's context_parallel around this.
    Raises InvalidInputError: another number of tokens than the micro-batch has on this lane, a batch of several rows,
    or unequal numbers of heads without `enable_gqa`."""
    refuse_torch_context_parallel(query)
    planned = packed_seq_params.mask == CAUSAL
    if attn_mask is not None or dropout_p or is_causal not in (None, planned):
        what = "a mask" if attn_mask is not None else f"dropout {dropout_p}" if dropout_p else f"is_causal={is_causal}"
        raise UnsupportedFeatureError(
            f"attention with {what} is not supported for packed micro-batches, only {packed_seq_params.mask} attention "
            "inside each sequence, as planned: leave attn_mask, dropout_p and is_causal at None, 0 and "
            f"{planned}, or plan for a ModelShape with causal_attention={not planned}"
        )
    num_tokens = len(packed_seq_params.positions)
    if query.shape[0] != 1 or query.shape[2] != num_tokens:
        raise InvalidInputError(
            f"attention got {query.shape[0]} rows of {query.shape[2]} tokens, the micro-batch has 1 row of {num_tokens}"
            f" on this lane ({packed_seq_params.label}): pass the tokens of the micro-batch, unchanged, and its "
            "own packed_seq_params"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidInputError(f"{query.shape[1]} query heads and {key.shape[1]} KV heads need enable_gqa=True")
    # A shard of one token makes any layout contiguous by its strides, so ask for it.
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out_THD = attention_thd(q_THD, k_THD, v_THD, packed_seq_params, scale or query.shape[-1] ** -0.5)
    return out_THD.transpose(0, 1)[None]


def refuse_torch_context_parallel(query: Tensor) -> None:
    """Raise UnsupportedFeatureError inside torch's `context_parallel`, which patches `F.scaled_dot_product_attention`
    and has already cut the buffers, or for a tensor that it has sharded."""
    is_patched = getattr(F.scaled_dot_product_attention, "__module__", "").startswith(_TORCH_CP)
    if is_patched or isinstance(query, DTensor):
        what = "inside torch's context_parallel(...)" if is_patched else "with a DTensor"
        raise UnsupportedFeatureError(
            f"attention of a packed micro-batch was called {what}: torch's context parallelism cannot mask documents, "
            "so a row may hold only 1, and its degree is fixed; a packed row holds any number, on the lanes that its "
            "plan chose. Leave context_parallel out here, or use torch's attention with it, on unpacked sequences of "
            "equal length"
        )


LossSum = Callable[[torch.nn.Module, dict[str, Any]], Tensor]
"""(wrapped model, micro-batch) -> sum of the losses of the lane's tokens that have one, a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The mean loss over all tokens with a loss, their number, and this lane's bytes for attention."""

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

    Gradients are added to what is there, and reduced after the last micro-batch only. Every lane has equally many
    micro-batches; an empty place is one token of padding without a loss.

    Args:
        model: wrapped in DistributedDataParallel or by `fully_shard` over all lanes; both average over lanes.
        loss_sum: see `LossSum`. A micro-batch has "tokens", "labels", "position_ids" and "loss_mask" [1, T] and
            "packed_seq_params", which the model hands to its attention.
        backward: what to call on the loss, such as `accelerator.backward`.
        label: where in the run this is, for error messages.

    Raises InvalidInputError: a model that does not reduce gradients over all lanes. Raises DataError: no token of the
    global batch has a loss."""
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
            # The wrapper averages gradients over lanes; num_lanes makes that a sum.
            backward(loss * (lanes.num_lanes / num_tokens))
        total += loss.detach().double()
    return StepResult(loss=_summed(total, lanes) / num_tokens, num_tokens=num_tokens, bytes_sent=stats.bytes_sent)


def check_reduces_over(model: torch.nn.Module, num_lanes: int) -> None:
    """Raise InvalidInputError if the model's gradients would not be averaged over `num_lanes` ranks."""
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
            "mesh=lanes.mesh)"
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
