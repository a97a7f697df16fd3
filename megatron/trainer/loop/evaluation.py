"""Loss on held-out samples, through the same plans and micro-batches as training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.step.schedule import sum_over_job
from megatron.trainer.data.build import SampleStream
from megatron.trainer.ending.exits import closing
from megatron.trainer.reporting.log import validation_line
from megatron.trainer.setup.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluates one split; does nothing when it is empty or --eval-iters is 0.

    Every evaluation takes the first --eval-iters global batches of the split, so that its figures can be compared.
    """

    run: Run
    split: str
    stream: SampleStream | None

    @classmethod
    def of(cls, run: Run, split: str) -> Evaluation:
        """Return the evaluation of "validation" or "test"."""
        stream = run.splits.valid if split == "validation" else run.splits.test
        if run.settings.training.eval_iters == 0:
            stream = None
        return cls(run=run, split=split, stream=stream)

    def log(self, iteration: int) -> None:
        """Evaluate and log the mean loss per token; collective."""
        if self.stream is None:
            return
        phase.enter(f"evaluation after iteration {iteration}")
        loss = self._loss(self.stream, iteration)
        logger.info(validation_line(self.split, iteration, loss))
        self.run.scalars.write_validation(self.split, loss, iteration)

    def _loss(self, stream: SampleStream, iteration: int) -> float:
        run, training = self.run, self.run.settings.training
        loss_sum, num_tokens = 0.0, 0
        batches = (
            (batch, stream.global_batch(batch * training.global_batch_size, training.global_batch_size))
            for batch in range(training.eval_iters)
        )
        with (
            _evaluating(run.model),
            closing(run.iterator_wrapper(stream, f"{self.split}@{iteration}")) as wrapper,
        ):
            for _, _, data in wrapper.steps(batches):
                logged = run.run_schedule(data, wrapper, forward_only=True)
                sums = sum_over_job(logged, exchanged_bytes=0, stop=False, device=run.runtime.device)
                loss_sum, num_tokens = loss_sum + sums.loss_sum, num_tokens + sums.num_tokens
        return loss_sum / max(1, num_tokens)


@contextlib.contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Switch dropout off, and gradients: megatron-core's schedules record them even in a pass that is forward only."""
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()
