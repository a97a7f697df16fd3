"""Passes of post-training in a loop of plain PyTorch, with the lanes and steps of `megatron.integrations.outside`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from dynamic_cp.types import Sample
from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.data.micro_batches import micro_batches
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.integrations.outside.lanes import Lanes, LaneStep
from megatron.integrations.outside.step import StepResult, train_step
from megatron.integrations.post_training.caller_order import (
    OUTPUTS,
    Gatherer,
    GivenColumns,
    PassOutputs,
    agreed_order,
    evaluating,
)
from megatron.integrations.post_training.losses import Loss, Objective, Values, agreed_columns, count_tokens

Outputs = Callable[[torch.nn.Module, dict[str, Any]], Values]
"""(wrapped model, micro-batch) -> what it computes for each local token, each [T] or [1, T]: "log_probs", ..."""


def label_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """Return {"log_probs": of the labels, "entropies"}, both float32 [1, T], of logits [1, T, words]."""
    every = (logits.float() / temperature).log_softmax(-1)
    return {
        "log_probs": every.gather(-1, labels[..., None])[..., 0],
        "entropies": -(every.exp() * every).sum(-1),
    }


def head_log_probs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], labels: Tensor, chunk_tokens: int, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Return `label_log_probs` of head(hidden), computed over chunks whose logits backward computes again.

    Args:
        hidden: [1, T, H]; head: [1, t, H] -> logits [1, t, words].
        chunk_tokens: most tokens whose logits exist at once, at least 1.
    """

    def of_chunk(part: Tensor, of_part: Tensor) -> dict[str, Tensor]:
        return label_log_probs(head(part), of_part, temperature)

    parts = zip(hidden.split(chunk_tokens, 1), labels.split(chunk_tokens, 1), strict=True)
    chunks = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
    return {name: torch.cat([chunk[name] for chunk in chunks], dim=1) for name in chunks[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPasses:
    """Passes of a model on lanes.

    Attributes:
        model: wrapped in DistributedDataParallel or by `fully_shard` over all lanes.
        outputs: computes what results and losses of a micro-batch are made of; losses may read `names` of it.
        backward: called on the loss, such as `accelerator.backward`.
    """

    lanes: Lanes
    model: torch.nn.Module
    outputs: Outputs
    names: tuple[str, ...] = OUTPUTS
    backward: Callable[[Tensor], None] = Tensor.backward

    def forward(self, step: LaneStep, samples: Sequence[Sample], *, label: str = "forward pass") -> PassOutputs:
        """Return the outputs of all tokens in the order of `samples`, on all ranks. Collective. The model runs in
        evaluation mode on `step`, which is of these samples; `label` says in errors where this is."""
        order, of_lane = agreed_order(samples, step.plan, self.lanes.device)
        gatherer = None
        with evaluating([self.model]):
            for batch, micro_batch in zip(self._batches(step, label), of_lane, strict=True):
                outputs = self.outputs(self.model, batch)
                gatherer = gatherer or Gatherer(order, tuple(outputs), self.lanes.device)
                gatherer.add(outputs, batch["loss_mask"], micro_batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass the last weights would stay whole
        assert gatherer is not None
        return gatherer.gathered()

    def train(
        self,
        step: LaneStep,
        samples: Sequence[Sample],
        columns: GivenColumns,
        loss: Loss,
        *,
        label: str = "step",
    ) -> StepResult:
        """Add the gradients of the loss of a global batch to what is there; see `train_step`. Collective. `step` and
        `columns` are of these samples, in their order. DynamicCPError, on all ranks: bad columns, or no token with a
        loss."""
        order, of_lane = agreed_order(samples, step.plan, self.lanes.device)
        checked = agreed_columns(order, columns, loss, step.plan, self.lanes.device, self.names)
        sizes = [len(micro_batch.places) for micro_batch in of_lane]
        masks = to_device(step.packed.loss_mask.numpy(), self.lanes.device).split(sizes)
        counts = count_tokens(order, of_lane, masks, self.lanes.device)
        objective = Objective.of(loss, checked, counts)
        coming = iter(of_lane)

        def loss_sum(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
            outputs = self.outputs(model, batch)
            params = batch["packed_seq_params"]
            return objective.scale * objective.share(outputs, batch["loss_mask"], next(coming), params)

        return train_step(self.lanes, self.model, step, loss_sum, backward=self.backward, label=label)

    def _batches(self, step: LaneStep, label: str) -> Iterator[dict[str, Any]]:
        lanes = self.lanes
        mask = lanes.problem.model.layer.mask
        return micro_batches(step.packed, lanes.groups, lanes.device, label, ExchangeStats(), mask)
