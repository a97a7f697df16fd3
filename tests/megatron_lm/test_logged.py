"""What Megatron-LM is given to log: sums over a global batch for its evaluation, and FLOPs of the steps meant."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import DataError
from megatron.integrations.lm_adaptor.counts import StepFlops
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.megatron_lm.test_activate import adaptor

LOGGED = [[[10.0, 2.0], [9.0, 3.0], [0.0, 0.0]], [[700.0, 100.0]]]
"""Lane -> micro-batches: [sum of losses, number of tokens]. Evaluation adds these up and divides once."""


def _sum(width: int) -> list[list[float]]:
    from megatron.integrations.lm_adaptor.session import sum_over_lanes

    initialize_model_parallel()
    assert sum_over_lanes([]) == [], "stages before the last"
    logged = [{"lm loss": torch.tensor(entry[:width])} for entry in LOGGED[dist.get_rank()]]
    return [entry["lm loss"].tolist() for entry in sum_over_lanes(logged)]


def test_tokens_of_all_lanes_and_micro_batches_weigh_alike() -> None:
    assert run_ranks(2, _sum, 2) == [[[719.0, 105.0]]] * 2


def test_a_loss_function_that_logs_means_is_refused() -> None:
    with pytest.raises(RuntimeError, match=rf"{DataError.__name__}.* logs 1 values as 'lm loss', \[sum of losses, num"):
        run_ranks(2, _sum, 1)


def test_an_interval_begins_without_the_step_before_it() -> None:
    flops = StepFlops()
    for steps, mean in (((8.0,), 8.0), ((2.0,), 2.0), ((1.0, 4.0, 4.0), 3.0)):
        for step in steps:
            flops.add(step)
            assert flops.latest == step
        assert flops.mean == mean
        flops.start_interval()
        assert (flops.latest, flops.mean) == (steps[-1], mean)


def test_the_sum_over_a_run_takes_each_step_as_it_was() -> None:
    flops = StepFlops()
    made = adaptor(_session=SimpleNamespace(flops=flops))
    total = 0.0
    for step in (8.0, 2.0, 5.0):
        flops.add(step)
        total += made._num_floating_point_operations(None, None, 1)
    assert total == 15.0
    made._is_logging = True
    assert made._num_floating_point_operations(None, None, 1) == 5.0
    flops.add(1.0)
    assert made._num_floating_point_operations(None, None, 1) == 4.0
