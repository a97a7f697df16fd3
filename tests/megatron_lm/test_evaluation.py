"""What Megatron-LM's evaluation is given of a global batch: it adds these numbers up and divides once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import DataError
from tests.distributed.harness import initialize_model_parallel, run_ranks

# lane -> micro-batches: [sum of losses, number of tokens]; nothing is as long as anything else.
LOGGED = [[[10.0, 2.0], [9.0, 3.0], [0.0, 0.0]], [[700.0, 100.0]]]


def _sum(width: int) -> list[list[float]]:
    from megatron.lm_adaptor.session import sum_over_lanes

    initialize_model_parallel()
    assert sum_over_lanes([]) == [], "stages before the last"
    logged = [{"lm loss": torch.tensor(entry[:width])} for entry in LOGGED[dist.get_rank()]]
    return [entry["lm loss"].tolist() for entry in sum_over_lanes(logged)]


def test_tokens_of_all_lanes_and_micro_batches_weigh_alike() -> None:
    assert run_ranks(2, _sum, 2) == [[[719.0, 105.0]]] * 2


def test_a_loss_function_that_logs_means_is_refused() -> None:
    with pytest.raises(RuntimeError, match=rf"{DataError.__name__}.* logs 1 values as 'lm loss', \[sum of losses, num"):
        run_ranks(2, _sum, 1)
