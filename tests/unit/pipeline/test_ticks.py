"""Ticks: every operation once, no stage ever waits for another phase, and what else would hang is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.pipeline.schedule import Operation, most_alive_tokens, stage_operations
from dynamic_cp.pipeline.ticks import check_ticks, stage_ticks
from dynamic_cp.types import tick_order

SHAPES = [(pp_size, rows) for pp_size in (1, 2, 3, 4, 8) for rows in (1, 2, pp_size, 3 * pp_size + 1)]


@pytest.mark.parametrize(("pp_size", "rows"), SHAPES)
def test_ticks_run_all_operations_and_keep_what_they_say(pp_size: int, rows: int) -> None:
    order = tick_order(pp_size, rows)
    assert len(order) == len(set(order)) == 2 * (rows + pp_size - 1)
    ticks = stage_ticks(pp_size, rows)
    check_ticks(ticks, rows)
    for stage, own in enumerate(ticks):
        operations = [one for one in own if one is not None]
        alive = most_alive_tokens(operations, np.ones((rows, 1), np.int64))[0]
        assert alive == min(rows, 2 * pp_size - 1 - 2 * stage)


def test_the_example_of_the_docstring() -> None:
    assert " ".join(map(str, tick_order(2, 3))) == "F0 F1 B0 F2 B1 F3 B2 B3"
    words = [" ".join(str(one)[1:] if one else "-" for one in own) for own in stage_ticks(2, 3)]
    assert words == ["F0 F1 - F2 B0 - B1 B2", "- F0 B0 F1 B1 F2 B2 -"]


@pytest.mark.parametrize(("pp_size", "rows"), [(2, 2), (4, 8)])
def test_the_stock_schedule_deadlocks_with_a_pool_and_is_refused(pp_size: int, rows: int) -> None:
    stock = [stage_operations(stage, pp_size, rows) for stage in range(pp_size)]
    with pytest.raises(IllegalPlanError, match="tick 0 deadlocks: stage 1 is at 0F0 before 0F0 of stage 0") as caught:
        check_ticks(stock, rows)
    assert "run `tick_order` on all of them" in str(caught.value)
    assert caught.value.tick == 0
    # Also where every stage waits for its input: then phases differ.
    late = [[*[None] * stage, *own, *[None] * (pp_size - 1 - stage)] for stage, own in enumerate(stock)]
    with pytest.raises(IllegalPlanError, match=r"stage \d is at 0[FB]\d, stage \d at 0[FB]\d|before 0"):
        check_ticks(late, rows)


def changed(stage: int, place: int, operation: Operation | None) -> Any:
    ticks = stage_ticks(2, 3)
    ticks[stage][place] = operation
    return ticks


@pytest.mark.parametrize(
    ("ticks", "words"),
    [
        (changed(0, 0, None), "stage 0 runs 0F0 0 times, it must be 1"),
        (changed(1, 0, Operation("F", 2)), "stage 1 runs 0F2 2 times, it must be 1"),
        ([stage_ticks(2, 3)[0], stage_ticks(2, 3)[1][:-1]], "stage 1 has 7 ticks, others have more"),
        ([stage_ticks(2, 3)[0], [*stage_ticks(2, 3)[1][1:], None]], "stage 1 is at 0F0 before 0F0 of stage 0"),
        ([[*stage_ticks(2, 3)[0], None], [None, *stage_ticks(2, 3)[1]]], "stage 1 at 0B0|stage 0 is at 0F2"),
    ],
)
def test_lists_that_hang_are_refused_with_the_stages_that_do(ticks: Any, words: str) -> None:
    with pytest.raises(IllegalPlanError, match=words):
        check_ticks(ticks, 3)
