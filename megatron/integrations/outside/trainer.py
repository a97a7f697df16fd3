"""Planned micro-batches in the released Trainer of transformers, and in TRL's SFTTrainer: a class to inherit from.

    class PlannedSFTTrainer(PlannedMicroBatches, SFTTrainer): ...

    trainer = PlannedSFTTrainer(model, args, train_dataset=rows, plan_options=PlanOptions(max_tokens_per_rank=8192))
    trainer.train()                                           # under torchrun or accelerate launch

The Trainer's own loop, sampler, loss, optimizer, logs and checkpoints stay. When it asks `get_batch_samples` for the
batches of an optimizer step, all ranks show each other theirs and plan them together; each gets packs of equal
predicted time, with CP sizes. `training_step` runs several packs where the loop counts one accumulation step. A step
trains the same rows as without a plan, by the mean over all their tokens, so loss and gradients are the same.

Limits: rows are exchanged as JSON, a global batch on every rank. Trainers that compare whole rows (DPO, GRPO) are
refused: `megatron.integrations.post_training` has their losses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from dynamic_cp.errors import DataError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import Branches, PlanOptions, Sample, parse_mask
from megatron.dynamic_cp.agreement.messages import all_gather_bytes, encode_value, value_of
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks
from megatron.dynamic_cp.data.micro_batches import micro_batches
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.integrations import untested
from megatron.integrations.outside.collator import COLUMNS, read_row
from megatron.integrations.outside.hugging_face import lanes_of, model_inputs, problem_of, use_dynamic_cp
from megatron.integrations.outside.lanes import Lanes, LaneStep

logger = logging.getLogger(__name__)

_SERVED = ("Trainer", "SFTTrainer")
"""Classes whose loss is a sum over tokens."""
_COLUMNS = "tokens", "labels", "loss_mask"


class RawBatch:
    """A batch of one rank as its data set has it: nothing pads, stacks or moves it."""

    def __init__(self, rows: list[Mapping[str, Any]]) -> None:
        self.rows = rows


class PlannedInputs(dict[str, Any]):
    """The inputs of one accumulation step. For what the Trainer counts, "input_ids" are this rank's tokens in it.
    `batches` are the micro-batches of the optimizer step that are still to come; the next `number` of them belong here.
    """

    def __init__(self, tokens: Tensor, batches: Iterator[dict[str, Any]], number: int) -> None:
        super().__init__(input_ids=tokens)
        self.batches, self.number = batches, number


class PlannedMicroBatches:
    """Inherit from this class before a Trainer; see the module.

    Args:
        plan_options: `max_tokens_per_rank` is what a pack may hold, instead of a padded batch.
        hardware: a bundled name or the path of a hardware file.
        others: the Trainer's own, without `data_collator`.

    Raises UnsupportedFeatureError: a Trainer or a setting that needs the batches as they would be without a plan."""

    def __init__(
        self, *args: Any, plan_options: PlanOptions, hardware: str = "h100", ranks_per_node: int = 8, **others: Any
    ) -> None:
        if others.get("data_collator") is not None:
            raise InvalidInputError("data_collator is given, planned rows are packed as they are: leave it out")
        super().__init__(*args, **others)
        trainer: Any = self
        _check_trainer(trainer)
        for line in untested("transformers", "trl"):
            logger.warning("dynamic CP: %s", line)
        use_dynamic_cp(trainer.model)
        problem = problem_of(
            trainer.model.config,
            trainer.accelerator.num_processes,
            plan_options,
            hardware=hardware,
            ranks_per_node=ranks_per_node,
        )
        self.lanes: Lanes = lanes_of(trainer.accelerator, problem)
        trainer.data_collator = RawBatch

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that `documents_of` honours, whatever the model's forward takes."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        own: Any = self
        own._signature_columns = list(dict.fromkeys([*own._signature_columns, *COLUMNS]))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's own, of this data set or of the one with this name."""
        _refuse_dispatched(self, "eval_dataset", eval_dataset)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_batch_samples(
        self, epoch_iterator: Iterator[RawBatch], num_batches: int, device: torch.device
    ) -> tuple[list[PlannedInputs], Tensor | None]:
        """Return this rank's packs of what all ranks draw, and the number of all their tokens with a loss. Collective.
        Raises DynamicCPError: a row that cannot be read or planned, on all ranks; or no token has a loss."""
        drawn = run_on_all_ranks(lambda: self._draw(epoch_iterator, num_batches), self.lanes.device)
        num_inputs, step, num_tokens = self._planned(drawn)
        if step is None:
            return [], None
        return list(self._inputs(step, num_inputs)), torch.tensor(num_tokens, device=device)

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the packs of an accumulation step by the Trainer's own step; gradients are reduced in the last one."""
        own: Any = self
        total = torch.zeros((), device=own.args.device)
        for left in reversed(range(inputs.number)):
            with own.accelerator.no_sync(model) if left else nullcontext():
                batch = model_inputs(next(inputs.batches))
                total += super().training_step(model, batch, num_items_in_batch)  # type: ignore[misc]
        return total

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Return the mean loss over the tokens of all ranks' batches, without logits and labels. Collective."""
        own: Any = self
        drawn = run_on_all_ranks(lambda: self._read(inputs.rows), self.lanes.device)
        _, step, num_tokens = self._planned([drawn])
        assert step is not None
        total = torch.zeros((), device=own.args.device)
        with torch.no_grad(), own.compute_loss_context_manager():
            for (planned,) in zip(self._inputs(step, 1), strict=True):
                for batch in planned.batches:
                    total += own.compute_loss(model, model_inputs(batch), num_items_in_batch=num_tokens)
        dist.all_reduce(total, group=self.lanes.mesh.get_group())
        return total / self.lanes.num_lanes, None, None

    def _draw(self, epoch_iterator: Iterator[RawBatch], num_batches: int) -> list[_Batch]:
        return [self._read(batch.rows) for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]

    def _read(self, rows: list[Mapping[str, Any]]) -> _Batch:
        causal = self.lanes.problem.model.causal_attention
        read = [one for index, row in enumerate(rows) for one in read_row(index, row, causal)]
        if any((values.loss_mask > 1).any() for values, _ in read):
            raise UnsupportedFeatureError(
                "a turn that several branches share is learned, and the Trainer's loss counts each token once: give it "
                "'learned': false, or train with outside.train_step and causal_lm_loss"
            )
        return read

    def _planned(self, drawn: list[_Batch]) -> tuple[int, LaneStep | None, int]:
        """Return (accumulation steps, this lane's part of all ranks' batches, their tokens with a loss). Collective."""
        message = encode_value([[_as_json(*one) for one in batch] for batch in drawn])
        messages = all_gather_bytes(message, self.lanes.device, self.lanes.mesh.get_group())
        of_ranks = [[[_of_json(*one) for one in batch] for batch in value_of(message)] for message in messages]
        read = [one for of_rank in of_ranks for batch in of_rank for one in batch]
        if not read:
            return 0, None, 0
        samples = [Sample(sample_id=index, seqlen=len(one.tokens), mask=mask) for index, (one, mask) in enumerate(read)]
        num_tokens = int(sum(values.loss_mask.sum() for values, _ in read))
        if not num_tokens:
            raise DataError(
                f"0 of the {sum(sample.seqlen for sample in samples)} tokens of {len(samples)} rows have a loss: check "
                "labels and masks"
            )
        step = self.lanes.step(samples, lambda index: read[index][0])
        return max(map(len, of_ranks)), step, num_tokens

    def _inputs(self, step: LaneStep, number: int) -> Iterator[PlannedInputs]:
        """Yield the inputs of `number` accumulation steps; any but the last may have no micro-batch."""
        own: Any = self
        packed, lanes = step.packed, self.lanes
        label = f"step {own.state.global_step}"
        batches = micro_batches(
            packed, lanes.groups, lanes.device, label, ExchangeStats(), lanes.problem.model.layer.mask
        )
        ends = [len(packed.buckets) * place // number for place in range(number + 1)]
        sizes = [bucket.rank_tokens for bucket in packed.buckets]
        assert packed.columns is not None
        for first, end in pairwise(ends):
            tokens = packed.columns[:1, sum(sizes[:first]) : sum(sizes[:end])]
            yield PlannedInputs(tokens, batches, end - first)


_Read = tuple[SampleTokens, Branches | None]
_Batch = list[_Read]


def _as_json(values: SampleTokens, mask: Branches | None) -> list[Any]:
    return [*(getattr(values, name).tolist() for name in _COLUMNS), None if mask is None else str(mask)]


def _of_json(tokens: list[int], labels: list[int], loss_mask: list[float], mask: str | None) -> _Read:
    values = SampleTokens(
        tokens=np.array(tokens, np.int64), labels=np.array(labels, np.int64), loss_mask=np.array(loss_mask, np.float32)
    )
    return values, None if mask is None else cast(Branches, parse_mask(mask))


def _check_trainer(trainer: Any) -> None:
    """Raise UnsupportedFeatureError for what would not train as without plans, and say what to change."""
    owner = next(one for one in type(trainer).__mro__ if "compute_loss" in vars(one))
    if owner.__module__.split(".")[0] in ("transformers", "trl") and owner.__name__ not in _SERVED:
        raise UnsupportedFeatureError(
            f"{owner.__name__} compares whole rows, planned micro-batches hold parts of them: "
            f"{' and '.join(_SERVED)} are served; megatron.integrations.post_training has losses over rows"
        )
    args = trainer.args
    for name in ("train_dataset", "eval_dataset"):
        _refuse_dispatched(trainer, name, getattr(trainer, name))
    for wrong, what in (
        (not dist.is_initialized(), "there is 1 process without a launcher: start with torchrun or accelerate launch"),
        (trainer.is_deepspeed_enabled, "DeepSpeed reduces gradients in every micro-batch: use DDP or FSDP"),
        (
            not args.average_tokens_across_devices,
            "average_tokens_across_devices is False, losses are over all ranks: True",
        ),
        (
            args.label_smoothing_factor,
            f"label_smoothing_factor is {args.label_smoothing_factor}, labels are shifted: 0",
        ),
        (trainer.compute_loss_func is not None, "compute_loss_func would get shifted labels of packs: leave it out"),
        (trainer.compute_metrics is not None, "compute_metrics would get logits of packs: leave it out"),
        (
            not trainer.model_accepts_loss_kwargs,
            "the model's loss is a mean of its own, it takes no num_items_in_batch",
        ),
    ):
        if wrong:
            raise UnsupportedFeatureError(f"{type(trainer).__name__}: {what}")


def _refuse_dispatched(trainer: Any, name: str, data: Any) -> None:
    """Refuse a data set, or a dict of them, whose batches rank 0 would cut for the others."""
    dispatches = trainer.accelerator.dispatch_batches
    streamed = any(isinstance(one, IterableDataset) for one in (data.values() if isinstance(data, dict) else (data,)))
    if dispatches or (dispatches is None and streamed):
        raise UnsupportedFeatureError(
            f"{type(trainer).__name__}: {name} is {'an IterableDataset' if streamed else 'dispatched'}, its batches "
            "are tensors that rank 0 cuts: accelerator_config={'dispatch_batches': False}, every rank then reads all "
            "rows and keeps its own"
        )
