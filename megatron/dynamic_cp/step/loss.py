"""Forward step and per-token loss in the form that megatron-core's schedules call.

With the mandatory `calculate_per_token_loss=True` each rank returns the sum of its tokens' losses and their count, and
the schedules and `finalize_model_grads` divide by the count over the whole job. Shards are disjoint, so this is exact
for any mixture of CP sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.flags.features import FUTURE_LOSS
from megatron.dynamic_cp.layout.packed_seq_params import FutureColumns
from megatron.dynamic_cp.measuring.nvtx import bucket_span, span

LossOutput = tuple[Tensor, Tensor, dict[str, Tensor]]


def sum_of_losses(loss_mask: Tensor, token_losses: Tensor, future: FutureColumns | None = None) -> LossOutput:
    """Return (sum of the losses of unmasked tokens, their number as int, {"lm loss": [sum, number]}). Losses of
    multi-token prediction (`future`), whose gradients the model has attached already, are logged beside it.
    `loss_mask` is float32 [1, T], 0 for padding; `token_losses` [1, T].
    """
    mask = loss_mask.reshape(-1)
    total = torch.sum(token_losses.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    logged = {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}
    if future is not None:
        logged |= {FUTURE_LOSS.format(depth): found for depth, found in enumerate(future.found, 1)}
    return total, num_tokens, logged


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
    """Run the next micro-batch through `model`; megatron-core calls the returned function on the last stage."""
    batch = next(data_iterator)
    output = run_forward(batch, model)
    return output, partial(sum_of_losses, batch["loss_mask"], future=batch["packed_seq_params"].future)


def run_forward(batch: dict[str, Any], model: torch.nn.Module) -> Tensor:
    """Return a model chunk's output for a micro-batch: hidden states, on the last stage losses or `token_outputs`."""
    params = batch["packed_seq_params"]
    phase.enter_micro_batch(params.label, len(params.positions))
    with span("%s", params.label), bucket_span("forward", params):
        output: Tensor = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params
        )
    return output
