"""Which iteration is planned with which coefficients, also after a checkpoint between measuring and using them."""

from __future__ import annotations

import json

import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.learning.multipliers import Coefficients, Multipliers
from tests.unit.support import TINY_HARDWARE

FIRST, SECOND = Multipliers(linear=1.5), Multipliers(linear=1.25, exchange=2.0)


def test_each_iteration_has_the_latest_change_before_it() -> None:
    coefficients = Coefficients(base=TINY_HARDWARE).changed(23, FIRST).changed(43, SECOND)
    expected = {1: Multipliers(), 22: Multipliers(), 23: FIRST, 42: FIRST, 43: SECOND, 1000: SECOND}
    assert {iteration: coefficients.multipliers(iteration) for iteration in expected} == expected
    assert coefficients.hardware(22) == TINY_HARDWARE
    assert coefficients.hardware(23) == FIRST.apply(TINY_HARDWARE) != TINY_HARDWARE


def test_a_resumed_run_plans_what_was_in_flight_as_before() -> None:
    """Measured up to 40, in use from 43 on (look-ahead 2), saved at 41: 42 is planned with the older factors again."""
    coefficients = Coefficients(base=TINY_HARDWARE).changed(23, FIRST).changed(43, SECOND, oldest=41)
    resumed = Coefficients.from_dict(TINY_HARDWARE, json.loads(json.dumps(coefficients.to_dict())))
    assert resumed == coefficients
    assert [resumed.multipliers(iteration) for iteration in (41, 42, 43)] == [FIRST, FIRST, SECOND]


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    coefficients = Coefficients(base=TINY_HARDWARE)
    for number in range(1, 50):
        factors = Multipliers(linear=1 + number / 100)
        coefficients = coefficients.changed(20 * number + 3, factors, oldest=20 * number)
        assert len(coefficients.changes) <= 2
        assert coefficients.multipliers(20 * number).linear == (1 + (number - 1) / 100 if number > 1 else 1)


@pytest.mark.parametrize("first", [0, -1, 22, 23, True, "24"])
def test_changes_go_forward(first: object) -> None:
    with pytest.raises(InvalidInputError, match="coefficients change at iterations"):
        Coefficients(base=TINY_HARDWARE).changed(23, FIRST).changed(first, SECOND)


@pytest.mark.parametrize(
    "data", [{}, [], {"changes": 1}, {"changes": [[1]]}, {"changes": [[1, 2]]}, {"changes": [[1, {"linear": 2.0}]]}]
)
def test_nonsense_is_refused(data: object) -> None:
    with pytest.raises(InvalidInputError, match="saved"):
        Coefficients.from_dict(TINY_HARDWARE, data)
