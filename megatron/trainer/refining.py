"""`--dynamic-cp-refine N`: every N iterations the measured times of buckets correct the cost model of later plans."""

from __future__ import annotations

import logging

from megatron.core import parallel_state

from dynamic_cp.coefficients import Coefficients
from dynamic_cp.refinement import refine
from dynamic_cp.types import Hardware
from megatron.dynamic_cp.bucket_times import BucketTimes
from megatron.trainer import derive
from megatron.trainer.checkpointing import Position
from megatron.trainer.run import Run

logger = logging.getLogger(__name__)


class Refining:
    """Measures buckets and keeps the coefficients of the run.

    Every rank finds the same ones from the same observations; rank 0's are used and saved.

    Args:
        position: of the run, with the coefficients of its checkpoint; new ones are written there.
    """

    def __init__(self, run: Run, position: Position) -> None:
        self._run = run
        self._position = position
        self._every = run.args.dynamic_cp_refine
        saved = position.coefficients
        self._coefficients = (
            Coefficients(base=run.hardware) if saved is None else Coefficients.from_dict(run.hardware, saved)
        )
        self.times = BucketTimes(
            run.model,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            lane=run.groups.lane,
            device=run.device,
            keep_steps=max(1, min(4, self._every)),
        )

    def hardware(self, iteration: int) -> Hardware:
        """Return what `iteration` is planned with."""
        return self._coefficients.hardware(iteration)

    def end_step(self, iteration: int) -> None:
        """Keep the times of an iteration, and refine when it is due; collective."""
        self.times.end_step()
        if not self._every or iteration % self._every:
            return
        refined = refine(
            self._run.hardware,
            self.times.gather(),
            model=self._run.model_shape,
            topology=self._run.topology,
            options=derive.plan_options(self._run.args),
            iterations=(max(1, iteration - self._every + 1), iteration),
            present=self._coefficients.multipliers(iteration),
        )
        first = iteration + self._run.args.dynamic_cp_lookahead + 1  # those before are planned already
        logger.info("from iteration %d on: %s", first, refined.describe())
        self._coefficients = self._coefficients.changed(first, refined.multipliers, oldest=iteration + 1)
        self._position.coefficients = self._coefficients.to_dict()
