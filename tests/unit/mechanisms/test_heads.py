"""Which heads a lane gets when heads are exchanged by all-to-all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.heads import heads_of_rank, kv_heads_of
from tests.unit.support import TINY_MODEL


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "inner", "copies", "per_lane"),
    [(32, 32, 8, 1, 4), (32, 8, 8, 1, 1), (32, 4, 8, 2, 1), (32, 1, 8, 8, 1), (24, 6, 4, 2, 3), (7, 7, 1, 1, 7)],
)
def test_heads_by_hand(query_heads, kv_heads, inner, copies, per_lane):
    assert kv_heads_of(query_heads, kv_heads, inner) == (copies, per_lane)


def test_every_lane_has_the_kv_heads_of_its_query_heads():
    """The rule of the docstring for all small numbers: lanes hold whole groups, and gathering is never cheaper."""
    num_repeated = 0
    for kv_heads in range(1, 13):
        for group in range(1, 17):
            query_heads = kv_heads * group
            for inner in (1, 2, 4, 8, 16):
                if query_heads % inner:
                    with pytest.raises(UnsupportedFeatureError, match=f"{query_heads} query heads .* {inner} lanes"):
                        kv_heads_of(query_heads, kv_heads, inner)
                    continue
                copies, per_lane = kv_heads_of(query_heads, kv_heads, inner)
                repeated = [head for head in range(kv_heads) for _ in range(copies)]
                assert per_lane * inner == len(repeated)
                queries = query_heads // inner
                assert queries % per_lane == 0
                for lane in range(inner):
                    held = repeated[lane * per_lane : (lane + 1) * per_lane]
                    for index in range(queries):
                        served_by = (lane * queries + index) // group
                        assert held[index // (queries // per_lane)] == served_by
                assert per_lane <= kv_heads
                num_repeated += copies > 1
    assert num_repeated > 100


def test_heads_of_a_tp_rank():
    assert heads_of_rank(TINY_MODEL, 1) == (4, 2)
    assert heads_of_rank(TINY_MODEL, 2) == (2, 1)
    assert heads_of_rank(TINY_MODEL, 4) == (1, 1)
    assert heads_of_rank(TINY_MODEL, 3) is None
    assert heads_of_rank(replace(TINY_MODEL, num_attention_heads=12, num_query_groups=3), 2) is None


def test_every_tp_rank_has_the_kv_heads_of_its_query_heads():
    """Of 12 query and 3 KV heads on 4 ranks, rank 1 would have query heads 3 to 5, of KV heads 0 and 1."""
    num_possible = 0
    for kv_heads in range(1, 9):
        for group in range(1, 9):
            model = replace(TINY_MODEL, num_attention_heads=kv_heads * group, num_query_groups=kv_heads)
            for tp_size in range(1, 17):
                heads = heads_of_rank(model, tp_size)
                if heads is None:
                    continue
                num_possible += 1
                query_heads, held = heads
                for rank in range(tp_size):
                    serving = {head // group for head in range(rank * query_heads, (rank + 1) * query_heads)}
                    assert len(serving) == held, (kv_heads, group, tp_size)
    assert num_possible > 150
