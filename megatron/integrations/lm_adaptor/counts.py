"""Megatron-LM's counts of samples and FLOPs, for global batches of any size."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator


class Samples(NumMicroBatchesCalculator):
    """In place of Megatron-LM's calculator: the global batch has any size, and the plan says how many micro-batches.

    Megatron-LM counts samples as micro-batches times micro-batch size times data-parallel size. Inside `counted` that
    product is the global batch; elsewhere it is rounded up to a multiple of the lanes.
    """

    def __init__(self, global_batch_size: int, num_lanes: int) -> None:
        super().__init__()
        self.num_micro_batches = -(-global_batch_size // num_lanes)
        self.current_global_batch_size = self.current_running_global_batch_size = global_batch_size
        self.micro_batch_size = 1
        self._num_lanes = num_lanes

    @property
    def overcounted(self) -> int:
        """Samples of a step that the product has too many."""
        return int(self.num_micro_batches * self._num_lanes - self.current_global_batch_size)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Nothing changes during a run."""

    @contextlib.contextmanager
    def counted(self, args: argparse.Namespace) -> Iterator[None]:
        """Have Megatron-LM's product count the samples of the global batch: as if one lane had a micro-batch each."""
        num_micro_batches, data_parallel_size = self.num_micro_batches, args.data_parallel_size
        self.num_micro_batches, args.data_parallel_size = self.current_global_batch_size, 1
        try:
            yield
        finally:
            self.num_micro_batches, args.data_parallel_size = num_micro_batches, data_parallel_size


class StepFlops:
    """FLOPs of the latest steps, from the true lengths of their samples."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._is_over = False

    def add(self, flops: float) -> None:
        """Count a step."""
        if self._is_over:
            self._steps.clear()
            self._is_over = False
        self._steps.append(flops)

    @property
    def latest(self) -> float:
        """FLOPs of the latest step."""
        return self._steps[-1]

    @property
    def mean(self) -> float:
        """Mean FLOPs of the steps since `start_interval`; until there is one, of those before it."""
        return sum(self._steps) / len(self._steps)

    def start_interval(self) -> None:
        """Begin the next log interval with the next step."""
        self._is_over = True
