"""The samples of each global batch, a function of the samples consumed before, as in Megatron-LM's ramp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamic_cp.errors import InvalidInputError


class BatchSizes(NamedTuple):
    """Sizes of all global batches of a run.

    They begin with `start` samples and grow to `full` by `increment`, in equal shares of the first `ramp_samples`
    samples. Without a ramp, `start` is `full`.
    """

    full: int
    start: int
    increment: int
    ramp_samples: int

    @classmethod
    def of(cls, global_batch_size: int, rampup: Sequence[int] | None) -> BatchSizes:
        """Return the sizes for --global-batch-size and --rampup-batch-size; InvalidInputError if they do not fit."""
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

        Source: megatron-core 0.16.1's `RampupBatchsizeNumMicroBatchesCalculator`, with its rounding (0.19.2 has none).
        """
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        samples_per_increment = self.ramp_samples / ((self.full - self.start) // self.increment)
        return self.start + int(consumed_samples / samples_per_increment) * self.increment

    def iterations_in(self, num_samples: int) -> tuple[int, int]:
        """Return the number of whole global batches in `num_samples`, and their samples."""
        return self._walk(num_samples, None)

    def samples_of(self, num_iterations: int) -> int:
        """Return the samples of the first `num_iterations` global batches."""
        return self._walk(None, num_iterations)[1]

    def _walk(self, most_samples: int | None, most_iterations: int | None) -> tuple[int, int]:
        iterations = samples = 0
        while True:
            size = self.at(samples)
            if most_samples is not None and samples + size > most_samples:
                return iterations, samples
            if iterations == most_iterations:
                return iterations, samples
            if size == self.full:  # from here on all have this size
                more = (most_samples - samples) // size if most_samples is not None else 0
                more = most_iterations - iterations if most_iterations is not None else more
                return iterations + more, samples + more * size
            iterations, samples = iterations + 1, samples + size
