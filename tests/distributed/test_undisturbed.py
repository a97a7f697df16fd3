"""Seconds that other programs took are told from those of the ranks."""

from __future__ import annotations

import pytest

from megatron.dynamic_cp.measuring.machine import alone_s


@pytest.mark.parametrize(
    ("elapsed", "own", "busy", "idle", "expected"),
    [
        (10.0, 20.0, 20.0, 0.0, 10.0),  # two cores, all of them the ranks'
        (10.0, 8.0, 20.0, 0.0, 4.0),  # 12 of 20 seconds were others'
        (10.0, 8.0, 12.0, 8.0, 10.0),  # others took 4, and 8 were left over
        (10.0, 4.0, 500.0, 140.0, 10.0),  # 64 cores, most of them others', but some are free
        (10.0, 6.0, 19.0, 1.0, 6.75),  # others took 13, while now and then a core was free
        (10.0, 25.0, 20.0, 0.0, 10.0),  # ticks are coarse
        (10.0, 8.0, 0.0, 0.0, 10.0),  # the system does not say
    ],
)
def test_what_others_took_is_left_out_where_no_core_was_idle(elapsed, own, busy, idle, expected):
    assert alone_s(elapsed, own, busy, idle) == pytest.approx(expected)
