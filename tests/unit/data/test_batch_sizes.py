"""Sizes of global batches on a ramp are megatron-core's; counts of iterations and samples follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.flags.batch_sizes import BatchSizes

# 0.19.2 has schedules of steps in its place.
CALCULATOR = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
RAMPS = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 400))


@pytest.mark.skipif(CALCULATOR is None, reason="this release of megatron-core has no ramp to compare with")
@settings(max_examples=50)
@given(RAMPS)
def test_sizes_are_those_of_megatron_core(ramp: tuple[int, int, int, int]) -> None:
    start, increment, num_increments, ramp_samples = ramp
    full = start + num_increments * increment
    sizes = BatchSizes.of(full, [start, increment, ramp_samples])
    theirs = CALCULATOR(full, 1, 1, False, 1, start, increment, ramp_samples)
    consumed, seen = 0, []
    while consumed <= ramp_samples + 2 * full:
        theirs.update(consumed, consistency_check=True)
        seen.append(sizes.at(consumed))
        assert seen[-1] == theirs.get_current_global_batch_size()
        consumed += seen[-1]
    assert seen[0] == start
    assert seen[-1] == full
    for iterations in range(len(seen) + 1):
        assert sizes.samples_of(iterations) == sum(seen[:iterations])
        assert sizes.iterations_in(sum(seen[:iterations])) == (iterations, sum(seen[:iterations]))
        if iterations:
            one_less = sum(seen[:iterations]) - 1
            assert sizes.iterations_in(one_less) == (iterations - 1, sum(seen[: iterations - 1]))


def test_without_a_ramp_all_are_alike() -> None:
    sizes = BatchSizes.of(12, None)
    assert [sizes.at(consumed) for consumed in (0, 1, 10**12)] == [12] * 3
    assert sizes.samples_of(10**9) == 12 * 10**9
    assert sizes.iterations_in(100) == (8, 96)


@pytest.mark.parametrize(
    ("ramp", "says"),
    [
        ([4, 4], "--rampup-batch-size 4 4 has 2 numbers, 3 of at least 1 are needed"),
        ([4, 0, 10], "has 3 numbers, 3 of at least 1 are needed"),
        ([12, 4, 10], "grows from 12 by 4, which never gives --global-batch-size 12"),
        ([4, 3, 10], "grows from 4 by 3, which never gives --global-batch-size 12: change one of them"),
    ],
)
def test_ramps_that_cannot_be(ramp: list[int], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        BatchSizes.of(12, ramp)
