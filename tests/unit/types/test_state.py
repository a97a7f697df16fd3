"""Dtypes of gradients and of the optimizer's state: what is possible, in one line what is not."""

from __future__ import annotations

from typing import Any

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.reduction import Reduction
from dynamic_cp.types import DataParallel, PlanOptions, Problem, StateDtypes, Topology

BF16_GRADIENTS = StateDtypes(grad_reduce_in_bf16=True)


def problem(state: StateDtypes, **changed: Any) -> Problem:
    return Problem(
        topology=Topology(num_lanes=16),
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(
            max_tokens_per_rank=4096, bytes_per_element=changed.pop("bytes_per_element", 2), cp_comm_types=("p2p",)
        ),
        data_parallel=DataParallel(state=state, **changed),
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"exp_avg_dtype": "bf16"},
            r"exp_avg_dtype \(--exp-avg-dtype\) is bf16, .* add --use-precision-aware-optimizer",
        ),
        ({"main_grads_dtype": "bf16"}, r"main_grads_dtype \(--main-grads-dtype\) is bf16, without the precision-aware"),
        ({"main_params_dtype": "bf16"}, r"main_params_dtype \(--main-params-dtype\) is 'bf16': use one of fp32, fp16"),
        ({"exp_avg_sq_dtype": "int8"}, r"is 'int8': use one of fp32, fp16, bf16, fp8"),
    ],
)
def test_what_cannot_be_is_told(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        StateDtypes(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "changed", "says"),
    [
        (BF16_GRADIENTS, {"bytes_per_element": 4}, "--grad-reduce-in-bf16 is for weights in bfloat16: add --bf16"),
        (
            StateDtypes(use_precision_aware_optimizer=True),
            {"bytes_per_element": 4},
            "--use-precision-aware-optimizer is for weights in bfloat16",
        ),
        (
            StateDtypes(use_precision_aware_optimizer=True),
            {"distributed_optimizer": False},
            "needs an optimizer whose state the lanes share: use the distributed optimizer",
        ),
    ],
)
def test_weights_and_optimizer_have_to_have_it(state: StateDtypes, changed: dict[str, Any], says: str) -> None:
    problem(state)
    with pytest.raises(InvalidInputError, match=says):
        problem(state, **changed)


def test_gradients_in_bf16_are_reduced_in_two_thirds_of_the_time() -> None:
    """4 bytes of a gradient and 2 of the parameter that is gathered become 2 and 2."""
    whole, half = (Reduction.of(problem(state)) for state in (StateDtypes(), BF16_GRADIENTS))
    assert half.reduce_s + half.gather_s == pytest.approx((whole.reduce_s + whole.gather_s) * 4 / 6)
