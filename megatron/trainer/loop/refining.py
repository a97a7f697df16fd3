"""Measures micro-batches for a dump, and with `--dynamic-cp-refine N` to correct the cost model of later plans."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.learning.multipliers import Coefficients, Multipliers
from dynamic_cp.learning.observations import Observation
from dynamic_cp.learning.refinement import refine
from dynamic_cp.types import Hardware
from megatron.dynamic_cp.agreement.verify import run_on_rank_zero
from megatron.dynamic_cp.plans.plan_dump import JsonLines, spans_path
from megatron.dynamic_cp.step import schedule
from megatron.dynamic_cp.step.bucket_times import BucketTimes, ForwardStep
from megatron.trainer.checkpoints.state import Position
from megatron.trainer.setup.planned_runtime import PlannedRuntime

logger = logging.getLogger(__name__)


class Refining:
    """Measures buckets for a dump or a refinement, and keeps the run's coefficients.

    Only rank 0 computes coefficients, because another CPU's arithmetic could give other values. They begin with those
    of the checkpoint in `position`, and new ones are written there. The schedule calls the attribute `forward_step`:
    the argument, timed if needed.
    """

    def __init__(
        self,
        runtime: PlannedRuntime,
        model: Sequence[torch.nn.Module],
        position: Position,
        forward_step: ForwardStep = schedule.forward_step,
    ) -> None:
        self._runtime = runtime
        self._position = position
        self._every = runtime.settings.refine_every
        saved = position.coefficients
        self._coefficients = (
            Coefficients(base=runtime.hardware) if saved is None else Coefficients.from_dict(runtime.hardware, saved)
        )
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        is_writer = parallel_state.get_tensor_model_parallel_rank() == 0  # other TP ranks run the same passes
        self._spans = _open_spans(runtime.settings.dump) if is_writer else None
        self._times = None
        if self._every or runtime.settings.dump is not None:
            self._times = BucketTimes(
                model,
                stage=self._stage,
                lane=runtime.groups.lane,
                device=runtime.device,
                shape=runtime.model_shape,
                forward_step=forward_step,
                keep_steps=max(1, min(4, self._every)),
            )
        self.forward_step: ForwardStep = forward_step if self._times is None else self._times.forward_step

    def hardware(self, iteration: int) -> Hardware:
        return self._coefficients.hardware(iteration)

    def end_step(self, iteration: int) -> None:
        """Keep the times of an iteration, and refine when it is due. Collective."""
        if self._times is None:
            return
        if self._spans is not None:
            entry = {"iteration": iteration, "stage": self._stage, "lane": self._runtime.groups.lane}
            self._spans.append({**entry, "spans": self._times.spans()})
        self._times.end_step()
        if not self._every or iteration % self._every:
            return
        observations = self._times.gather()
        # Earlier iterations are planned already; a larger lookahead before a resume may have fixed even later ones.
        last_change = max((first for first, _ in self._coefficients.changes), default=0)
        first = max(iteration + self._runtime.settings.lookahead, last_change) + 1
        found = run_on_rank_zero(lambda: self._refined(observations, iteration, first))
        if found is not None:
            factors = Multipliers.from_dict(found)
            self._coefficients = self._coefficients.changed(first, factors, oldest=iteration + 1)
            self._position.coefficients = self._coefficients.to_dict()

    def _refined(self, observations: Sequence[Observation], iteration: int, first: int) -> dict[str, Any] | None:
        """Return the factors that fit best, None to keep the present ones."""
        refined = refine(
            self._runtime.hardware,
            observations,
            model=self._runtime.model_shape,
            topology=self._runtime.topology,
            options=self._runtime.options,
            iterations=(max(1, iteration - self._every + 1), iteration),
            present=self._coefficients.multipliers(first),
        )
        logger.info("from iteration %d on: %s", first, refined.describe())
        return None if refined.reason else refined.multipliers.to_dict()


def _open_spans(folder: str | None) -> JsonLines | None:
    """Return the file of this rank's passes, None without a dump."""
    if folder is None:
        return None
    try:
        return JsonLines(spans_path(folder, dist.get_rank()))
    except OSError as error:  # a node without the folder: the trace lacks its lanes
        logger.warning("--dynamic-cp-dump: %s: this rank's passes are not written", error)
        return None
