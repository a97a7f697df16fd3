"""Plans and the runtime have ticks in one order, and a rank's part of a planned tick is one that the runtime takes."""

from __future__ import annotations

import pytest

from dynamic_cp.pipeline.ticks import stage_ticks, tick_order
from megatron.dynamic_cp.step.ticks import ticks_of


@pytest.mark.parametrize(("pp_size", "rows"), [(1, 3), (2, 1), (2, 5), (4, 3), (4, 9), (8, 8)])
def test_the_order_of_ticks_is_the_one_that_is_run(pp_size: int, rows: int) -> None:
    order = tick_order(pp_size, rows)
    for stage, operations in enumerate(stage_ticks(pp_size, rows)):
        ran = ticks_of(stage, pp_size, rows)
        assert [(one.is_forward, one.number) for one in ran] == [(one.kind == "F", one.number) for one in order]
        assert [one.micro_batch for one in ran] == [one and one.micro_batch for one in operations]
