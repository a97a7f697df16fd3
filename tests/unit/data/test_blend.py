"""Blends: in proportion at every prefix, any position at once."""

from __future__ import annotations

import logging
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.trainer.data.stream import MAX_PERIOD, Blend, interleave, whole_shares


def counts_at_prefixes(weights, num_positions):
    """Return the uses of each dataset after 1 .. num_positions positions, [num_positions, datasets]."""
    datasets, _ = Blend(weights).locate(np.arange(num_positions))
    return np.cumsum(datasets[:, None] == np.arange(len(weights)), axis=0)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
@example([900, *[11] * 9])  # strides in proportion to the weights are 4 samples off here
@example([1, 1000])
def test_every_prefix_is_within_one_sample_of_its_target(weights):
    num_positions = 2 * sum(weights)
    targets = np.arange(1, num_positions + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts_at_prefixes([Fraction(w) for w in weights], num_positions) - targets).max() < 1


def test_weights_that_need_a_longer_period_are_rounded_and_logged(caplog):
    weights = [Fraction(w) for w in (1442858730, 4697570389, 8670888578)]
    with caplog.at_level(logging.INFO):
        counts = counts_at_prefixes(weights, 100_000)
    assert "rounded to 1/65536" in caplog.text
    targets = np.arange(1, 100_001)[:, None] * np.array([float(w / sum(weights)) for w in weights])
    assert np.abs(counts - targets).max() < 1 + 100_000 / MAX_PERIOD


def test_decimal_weights_are_exact(caplog):
    with caplog.at_level(logging.INFO):
        assert whole_shares([Fraction("0.3"), Fraction("0.7")]) == (3, 7)
        assert whole_shares([Fraction("30"), Fraction("70.5")]) == (20, 47)
    assert not caplog.text


def test_a_tiny_weight_is_not_lost():
    shares = whole_shares([Fraction("1e-12"), Fraction(1)])
    assert shares == (1, MAX_PERIOD - 1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 10**9), st.integers(1, 500))
def test_draws_of_a_pool_count_up_and_positions_stand_alone(weights, first, num_positions):
    blend = Blend([Fraction(w) for w in weights])
    datasets, draws = blend.locate(np.arange(first, first + num_positions))
    for dataset in range(len(weights)):
        mine = draws[datasets == dataset]
        np.testing.assert_array_equal(mine, np.arange(len(mine)) + (mine[0] if len(mine) else 0))
        # Draws before `first` are as many as its share of that prefix, within one.
        if len(mine):
            assert abs(mine[0] - first * weights[dataset] / sum(weights)) < 1 + 1e-6
    alone = [blend.locate(np.array([position])) for position in range(first, first + min(num_positions, 20))]
    assert [(int(dataset[0]), int(draw[0])) for dataset, draw in alone] == list(
        zip(datasets[:20].tolist(), draws[:20].tolist(), strict=True)
    )


def test_the_docstring_example():
    datasets, draws = Blend([Fraction(1), Fraction(3)]).locate(np.arange(8))
    assert datasets.tolist() == [1, 1, 0, 1, 1, 1, 0, 1]
    assert draws.tolist() == [0, 1, 0, 2, 3, 4, 1, 5]


def test_a_far_position_costs_no_more_than_a_near_one():
    computed_s = []
    for _ in range(3):  # the least counts: whoever shares a core slows this one
        blend = Blend([Fraction("0.3"), Fraction("0.7")])
        start_s = time.process_time()
        datasets, draws = blend.locate(np.array([10**9, 10**9 + 1]))
        computed_s.append(time.process_time() - start_s)
    assert min(computed_s) < 0.1
    assert draws[0] == pytest.approx(10**9 * (0.3, 0.7)[datasets[0]], abs=1)


def test_the_longest_period_is_quick():
    start = time.process_time()
    assert len(interleave((MAX_PERIOD - 1000, 900, 99, 1))) == MAX_PERIOD
    assert time.process_time() - start < 2
