"""How many samples the global batches have: a function of the samples consumed before, as Megatron-LM's ramp has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamic_cp.errors import InvalidInputError


class BatchSizes(NamedTuple):
    """Sizes of all global batches of a run.

    Attributes:
        full: samples of a global batch, at last.
        start, increment: samples of the first ones, and by how much they grow; start = full: they do not.
        ramp_samples: consumed samples over which they grow, in equal shares for each increment.
    """

    full: int
    start: int
    increment: int
    ramp_samples: int

    @classmethod
    def of(cls, global_batch_size: int, rampup: Sequence[int] | None) -> BatchSizes:
        """Return those of --global-batch-size and --rampup-batch-size.

        Raises:
            InvalidInputError: a ramp that does not lead to the global batch.
        """
        if rampup is None:
            return cls(global_batch_size, global_batch_size, 1, 0)
        given = f"--rampup-batch-size {' '.join(map(str, rampup))}"
        if len(rampup) != 3 or min(rampup) < 1:
            raise InvalidInputError(
                f"{given} has {len(rampup)} numbers, 3 of at least 1 are needed: samples of the first global batch, by "
                "how much they grow, and samples until they are --global-batch-size"
            )
        start, increment, ramp_samples = rampup
        if start >= global_batch_size or (global_batch_size - start) % increment:
            raise InvalidInputError(
                f"{given} grows from {start} by {increment}, which never gives --global-batch-size "
                f"{global_batch_size}: change one of them"
            )
        return cls(global_batch_size, start, increment, ramp_samples)

    def at(self, consumed_samples: int) -> int:
        """Return the samples of the global batch that comes after `consumed_samples`.

        Source: megatron-core 0.16.1's `RampupBatchsizeNumMicroBatchesCalculator`, rounding included (0.19.2 has none).
        """
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        samples_per_increment = self.ramp_samples / ((self.full - self.start) // self.increment)
        return self.start + int(consumed_samples / samples_per_increment) * self.increment

    def iterations_in(self, num_samples: int) -> tuple[int, int]:
        """Return how many whole global batches `num_samples` hold, and the samples of these."""
        return self._walk(num_samples, None)

    def samples_of(self, num_iterations: int) -> int:
        """Return the samples of the first global batches."""
        return self._walk(None, num_iterations)[1]

    def _walk(self, most_samples: int | None, most_iterations: int | None) -> tuple[int, int]:
        iterations = samples = 0
        while True:
            size = self.at(samples)
            if most_samples is not None and samples + size > most_samples:
                return iterations, samples
            if iterations == most_iterations:
                return iterations, samples
            if size == self.full:  # for ever
                more = (most_samples - samples) // size if most_samples is not None else 0
                more = most_iterations - iterations if most_iterations is not None else more
                return iterations + more, samples + more * size
            iterations, samples = iterations + 1, samples + size
