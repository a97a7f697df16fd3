"""Passes of post-training on Megatron's runtime: lanes, TP, PP and experts, on megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan
from dynamic_cp.types import Sample
from megatron.dynamic_cp.agreement.verify import collective_device
from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
from megatron.dynamic_cp.data.micro_batches import handed_out
from megatron.dynamic_cp.step.loss import LossOutput, run_forward
from megatron.dynamic_cp.step.schedule import run_schedule
from megatron.integrations.post_training.columns import GivenColumns
from megatron.integrations.post_training.heads import TokenOutputs, bare
from megatron.integrations.post_training.losses import Loss, Objective, agreed_columns, count_tokens
from megatron.integrations.post_training.pass_outputs import Gatherer, PassOutputs, evaluating
from megatron.integrations.post_training.rows import MicroBatchRows, agreed_rows

_Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a training pass came to, the same on all ranks.

    Attributes:
        loss: of the global batch.
        num_tokens: with a loss.
    """

    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPasses:
    """Passes of a model.

    Attributes:
        model: chunks of this rank, as the schedule runs them; its configuration has calculate_per_token_loss, and
            finalize_model_grads_func for training.
        seq_length: an upper bound of tokens; pipeline stages exchange the real lengths.
        outputs: what is computed of each token.
    """

    model: Sequence[torch.nn.Module]
    seq_length: int
    outputs: TokenOutputs = field(default_factory=TokenOutputs)

    def forward(self, data: StepData, plan: LanePlan, samples: Sequence[Sample]) -> PassOutputs:
        """Return the outputs of all tokens in the order of `samples`, on all ranks. Collective over the job.

        The model runs without gradients, and as in evaluation.

        Args:
            data, plan: of these samples: what `DataIteratorWrapper.wrap` returned, and its `plan`.
        """
        device = collective_device()
        rows, of_lane = agreed_rows(samples, plan, device, partial(self._check, data))
        gatherer = Gatherer(rows, self.outputs.names, device, is_speaker=_is_speaker())

        def take(batch: _Batch, micro_batch: MicroBatchRows, outputs: Tensor) -> LossOutput:
            gatherer.add(dict(zip(self.outputs.names, outputs, strict=True)), batch["loss_mask"], micro_batch)
            return outputs.sum(), torch.zeros((), dtype=torch.int, device=outputs.device), {}

        with evaluating(self.model):
            self._run(data, of_lane, take, forward_only=True)
        return gatherer.gathered()

    def train(
        self, data: StepData, plan: LanePlan, samples: Sequence[Sample], columns: GivenColumns, loss: Loss
    ) -> PassResult:
        """Add the gradients of the loss of a global batch to the buffers. Collective over the job.

        Args:
            data, plan: of these samples, as for `forward`.
            columns: of them, in their order; see `GivenColumns`.

        Raises:
            DynamicCPError: bad columns, no token with a loss, or a model that cannot compute the outputs; on all ranks.
        """
        device = collective_device()
        rows, of_lane = agreed_rows(samples, plan, device, partial(self._check, data, trains=True))
        checked = agreed_columns(rows, columns, loss, plan, device, self.outputs.names)
        held = [list(iterator) for iterator in data.data_iterators]
        masks = [batch["loss_mask"] for batch in held[-1]] if _is_speaker() else []
        counts = count_tokens(rows, of_lane if masks else [], masks, device)
        objective = Objective.of(loss, checked, counts)
        total = torch.zeros((), dtype=torch.float64, device=device)

        def share(batch: _Batch, micro_batch: MicroBatchRows, outputs: Tensor) -> LossOutput:
            named = dict(zip(self.outputs.names, outputs, strict=True))
            own = objective.share(named, batch["loss_mask"], micro_batch, batch["packed_seq_params"])
            if _is_speaker():
                total.add_(own.detach())
            return objective.scale * own, batch["loss_mask"].sum().to(torch.int), {}

        waiting = [handed_out(batches) for batches in held]
        del held
        self._run(StepData(waiting, *data[1:]), of_lane, share, forward_only=False)
        dist.all_reduce(total)
        return PassResult(loss=float(total) / objective.divisor, num_tokens=objective.num_tokens)

    def _check(self, data: StepData, *, trains: bool = False) -> None:
        if data.run is not None:
            raise UnsupportedFeatureError(
                "the plan has servers of all stages, which passes of post-training cannot run: plan without them"
            )
        self.outputs.check(bare(self.model))
        if trains and bare(self.model)[0].config.finalize_model_grads_func is None:
            raise UnsupportedFeatureError(
                "finalize_model_grads_func of the model's configuration is None, so gradients of lanes would stay "
                "apart: set it to megatron.core.distributed.finalize_model_grads"
            )

    def _run(
        self,
        data: StepData,
        of_lane: Sequence[MicroBatchRows],
        take: Callable[[_Batch, MicroBatchRows, Tensor], LossOutput],
        *,
        forward_only: bool,
    ) -> None:
        """Run all micro-batches; `take` gets the outputs of each on the last stage, and returns its loss."""

        def forward_step(iterator: Iterator[Any], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., LossOutput]]:
            batch, micro_batch = next(iterator)
            return run_forward(batch, chunk), partial(take, batch, micro_batch)

        with_rows = StepData([zip(iterator, of_lane, strict=True) for iterator in data.data_iterators], *data[1:])
        with self.outputs.installed(bare(self.model)):
            run_schedule(
                self.model,
                with_rows,
                self.seq_length,
                forward_only=forward_only,
                rank_tokens=[len(micro_batch.places) for micro_batch in of_lane],
                forward_step_func=forward_step,
            )


def _is_speaker() -> bool:
    """Return whether results of this rank count: of the last stage, and of one of its TP ranks."""
    stage, num_stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return stage == num_stages - 1 and parallel_state.get_tensor_model_parallel_rank() == 0
