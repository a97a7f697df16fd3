"""The FLOPs that Megatron-LM logs and sums up are those of the steps that it means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.lm_adaptor.activate import _Adaptor


def adaptor_after(session: Any) -> Any:
    adaptor = object.__new__(_Adaptor)
    adaptor._asked, adaptor._session, adaptor._is_logging = object(), session, False
    return adaptor


def test_an_interval_begins_without_the_step_before_it() -> None:
    from megatron.lm_adaptor.counts import StepFlops

    flops = StepFlops()
    for steps, mean in (((8.0,), 8.0), ((2.0,), 2.0), ((1.0, 4.0, 4.0), 3.0)):
        for step in steps:
            flops.add(step)
            assert flops.latest == step
        assert flops.mean == mean
        flops.start_interval()
        assert (flops.latest, flops.mean) == (steps[-1], mean)


def test_the_sum_over_a_run_takes_each_step_as_it_was() -> None:
    from megatron.lm_adaptor.counts import StepFlops

    flops = StepFlops()
    adaptor = adaptor_after(SimpleNamespace(flops=flops))
    total = 0.0
    for step in (8.0, 2.0, 5.0):
        flops.add(step)
        total += adaptor._num_floating_point_operations(None, None, 1)
    assert total == 15.0
    adaptor._is_logging = True
    assert adaptor._num_floating_point_operations(None, None, 1) == 5.0
    flops.add(1.0)
    assert adaptor._num_floating_point_operations(None, None, 1) == 4.0
