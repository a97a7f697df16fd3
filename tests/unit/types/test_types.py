"""Values refuse what contradicts itself, dtypes of gradients and of the optimizer's state among it."""

from dataclasses import replace
from typing import Any

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.edges import Reduction
from dynamic_cp.types import CP_COMM_TYPES, Bucket, DataParallel, PlanOptions, Problem, StateDtypes, Topology
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, problem_of


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cp_comm_types": ()}, "at least 1 exchange is needed"),
        ({"cp_comm_types": "p2p"}, "a tuple with at least 1 exchange"),
        ({"cp_comm_types": ("p2p", "ring")}, "'ring' is unknown"),
        ({"cp_comm_types": ("p2p", "a2a", "p2p")}, "'p2p' is there twice"),
        ({"search": "slow"}, "search 'slow' is unknown: use one of fast, thorough"),
        ({"recompute": "some"}, "recompute 'some' is unknown"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
        ({"min_cp_size": 3}, "min_cp_size 3 is not a power of two"),
        ({"max_cp_size": 0}, "max_cp_size 0 is not a power of two"),
    ],
)
def test_options_are_checked(changes, says):
    with pytest.raises(InvalidInputError, match=says):
        PlanOptions(**{"max_tokens_per_rank": 8, **changes})


def test_all_exchanges_may_be_given_in_any_order():
    assert PlanOptions(max_tokens_per_rank=8).cp_comm_types == ("auto",)
    assert PlanOptions(max_tokens_per_rank=8, cp_comm_types=CP_COMM_TYPES[::-1]).cp_comm_types == CP_COMM_TYPES[::-1]
    assert PlanOptions(max_tokens_per_rank=8, search="thorough").search == "thorough"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["linear_extra_tokens", "head_flops_per_s", "hbm_bytes"])
def test_coefficients_are_numbers(name, value):
    with pytest.raises(InvalidInputError, match=f"hardware 'tiny': {name} is {value}, it must be a number >= 0"):
        replace(TINY_HARDWARE, **{name: value})


def test_rates_are_positive():
    with pytest.raises(InvalidInputError, match="linear_flops_per_s is 0, it must be > 0"):
        replace(TINY_HARDWARE, linear_flops_per_s=0)


def test_model_numbers_are_checked():
    with pytest.raises(InvalidInputError, match="other_weights_per_layer is -1"):
        replace(TINY_MODEL, other_weights_per_layer=-1)
    with pytest.raises(InvalidInputError, match="not a multiple of num_query_groups 3"):
        replace(TINY_MODEL, num_query_groups=3)


@pytest.mark.parametrize(
    ("exchange", "cp_size", "inner", "found"),
    [("p2p", 8, 1, 1), ("all_gather", 8, 1, 1), ("a2a", 8, 1, 8), ("a2a", 8, 8, 8), ("a2a", 1, 1, 1)]
    + [("a2a+p2p", 8, inner, inner) for inner in (2, 4)]
    + [("blocks", 12, inner, inner) for inner in (1, 2, 4)],
)
def test_an_exchange_implies_its_inner_size(exchange, cp_size, inner, found):
    bucket = Bucket(first_lane=0, cp_size=cp_size, cp_comm_type=exchange, inner_cp_size=inner)
    assert bucket.inner_cp_size == found


@pytest.mark.parametrize(
    ("exchange", "cp_size", "inner", "says"),
    [
        ("p2p", 8, 2, "inner_cp_size 2 of the bucket at lane 16 is not 1, which p2p with cp_size 8 implies"),
        ("all_gather", 8, 8, "inner_cp_size 8 .* is not 1, which all_gather"),
        ("a2a", 8, 4, "inner_cp_size 4 .* is not 8, which a2a"),
        ("a2a+p2p", 8, 1, "inner_cp_size 1 .* power of two between 1 and 8: use 2, 4"),
        ("a2a+p2p", 8, 8, "inner_cp_size 8 .* power of two between 1 and 8"),
        ("a2a+p2p", 8, 3, "inner_cp_size 3 .* power of two between 1 and 8"),
        ("a2a+p2p", 8, 2.0, "inner_cp_size 2.0 .* power of two"),
        ("a2a+p2p", 2, 2, "use p2p or a2a"),
        ("a2a+p2p", 1, 1, "use p2p or a2a"),
        ("blocks", 12, 8, "inner_cp_size 8 .* power of two below 12 that divides it: use 1, 2, 4"),
        ("blocks", 8, 8, "inner_cp_size 8 .* power of two below 8"),
        ("blocks", 9, 3, "inner_cp_size 3 .* power of two below 9"),
    ],
)
def test_an_inner_size_that_the_exchange_does_not_have_is_refused(exchange, cp_size, inner, says):
    with pytest.raises(InvalidInputError, match=says):
        Bucket(first_lane=16, cp_size=cp_size, cp_comm_type=exchange, inner_cp_size=inner)


BF16_GRADIENTS = StateDtypes(grad_reduce_in_bf16=True)
AWARE = StateDtypes(use_precision_aware_optimizer=True)


def problem(state: StateDtypes, **changed: Any) -> Problem:
    job = Topology(num_lanes=16), load_model("llama-3-8b"), load_hardware("h100")
    found = problem_of(*job, bytes_per_element=changed.pop("bytes_per_element", 2))
    return replace(found, data_parallel=DataParallel(state=state, **changed))


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
        (AWARE, {"bytes_per_element": 4}, "--use-precision-aware-optimizer is for weights in bfloat16"),
        (AWARE, {"distributed_optimizer": False},
         "needs an optimizer whose state the lanes share: use the distributed optimizer"),
    ],
)  # fmt: skip
def test_weights_and_optimizer_have_to_have_it(state: StateDtypes, changed: dict[str, Any], says: str) -> None:
    problem(state)
    with pytest.raises(InvalidInputError, match=says):
        problem(state, **changed)


def test_gradients_in_bf16_are_reduced_in_two_thirds_of_the_time() -> None:
    """4 bytes of a gradient and 2 of the parameter that is gathered become 2 and 2."""
    whole, half = (Reduction.of(problem(state)) for state in (StateDtypes(), BF16_GRADIENTS))
    assert half.reduce_s + half.gather_s == pytest.approx((whole.reduce_s + whole.gather_s) * 4 / 6)
