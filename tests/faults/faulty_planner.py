"""A planner that fails at chosen global batches. The planner's process imports this: no torch here."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamic_cp.search import planner_process
from dynamic_cp.search.search import plan_batch
from dynamic_cp.types import PlannedBatch, Problem, Sample

BATCH = 12
"""Samples of a global batch of tests.trainer.commandline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyProblem(Problem):
    """A Problem with a `fault` (raise, die, hang, slow) `times` at each of `iterations`, 0 being the warm-up; processes
    count together in `folder`. `also_static`: the static plan fails, too."""

    fault: str
    iterations: tuple[int, ...]
    folder: str
    times: int = 1 << 30
    also_static: bool = False
    slow_s: float = 0.0

    def go_wrong(self, samples: Sequence[Sample]) -> None:
        iteration = iteration_of(samples)
        # `static_fallback` returns this class with another policy
        if iteration in self.iterations and (self.also_static or self.policy != "static") and self._counts(iteration):
            if self.fault == "raise":
                raise RuntimeError(f"planted in iteration {iteration}")
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.slow_s if self.fault == "slow" else 3600)

    def _counts(self, iteration: int) -> bool:
        for number in range(self.times):
            try:
                (Path(self.folder) / f"fault_{iteration}_{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False


def plan_or_go_wrong(problem: Problem, samples: Sequence[Sample]) -> PlannedBatch:
    if isinstance(problem, FaultyProblem):
        problem.go_wrong(samples)
    return plan_batch(problem, samples)


# Whoever unpickles a faulty problem, as the planner's process does, imports this.
assert planner_process.plan_batch is plan_batch, "what is replaced is what plans"
planner_process.plan_batch = plan_or_go_wrong


def iteration_of(samples: Sequence[Sample]) -> int:
    """Return the iteration of a global batch, 0 for the made-up one of the warm-up."""
    ids = [sample.sample_id for sample in samples]
    return 0 if len(ids) != BATCH else min(ids) // BATCH + 1
