"""What all mechanisms have in common; heads and bytes of every exchange, counted by moving tensors on paper."""

from dataclasses import replace

import pytest

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.mechanisms.transfers import heads_of_rank, kv_heads_of, sent_bytes
from dynamic_cp.types import CHOICES, CP_COMM_TYPES, Attention, Bucket, Topology
from tests.sent_bytes import sent_by
from tests.unit.support import TINY_MODEL, problem_of

HEADS = Sharing(heads=(8, 2), node_lanes=4)


def test_every_name_has_a_mechanism():
    names = CHOICES[1:]
    assert {name: one.name for name, one in MECHANISMS.items()} == {name: name for name in names}


def test_a_bucket_accepts_every_inner_size_of_its_mechanism():
    found = set()
    for name in CP_COMM_TYPES:
        mechanism = MECHANISMS[name]
        for cp_size in (2, 4, 8, 16, 32):
            for inner in mechanism.inner_sizes(cp_size, HEADS):
                bucket = Bucket(first_lane=0, cp_size=cp_size, cp_comm_type=name, inner_cp_size=inner)
                assert bucket.attention == Attention(name, inner)
                assert mechanism.why_illegal(bucket, Topology(num_lanes=32, ranks_per_node=4), 64) is None
                found.add((name, cp_size, inner))
    # The ring and gathering serve all, heads up to 8 lanes; two levels have 2 and 4 lanes of a node inside.
    assert len(found) == 5 + 5 + 3 + (0 + 1 + 2 + 2 + 2)


@pytest.mark.parametrize(
    ("name", "cp_size", "sharing", "sizes"),
    [
        ("p2p", 64, Sharing(None, 1), (1,)), ("all_gather", 64, Sharing(None, 1), (1,)), ("a2a", 8, HEADS, (8,)),
        ("a2a", 16, HEADS, ()), ("a2a", 8, Sharing(None, 4), ()), ("a2a+p2p", 16, HEADS, (4, 2)),
        ("a2a+p2p", 16, Sharing((8, 2), 16), (8, 4, 2)), ("a2a+p2p", 16, Sharing((8, 2), 4, allowed=(2, 8)), (2,)),
        ("a2a+p2p", 16, Sharing((6, 2), 4), (2,)), ("a2a+p2p", 2, HEADS, ()), ("a2a+p2p", 16, Sharing(None, 4), ()),
        ("latent", 16, Sharing(None, 4, has_latents=True), (1,)), ("latent", 16, HEADS, ()),
    ],
)  # fmt: skip
def test_inner_sizes(name, cp_size, sharing, sizes):
    assert MECHANISMS[name].inner_sizes(cp_size, sharing) == sizes
    assert attentions_of([name], cp_size, sharing) == [Attention(name, inner) for inner in sizes]


@pytest.mark.parametrize("name", CP_COMM_TYPES)
@pytest.mark.parametrize("sharing", [HEADS, Sharing((6, 2), 2), Sharing((1, 1), 8)])
def test_a_mechanism_that_cannot_serve_every_size_says_which(name, sharing):
    mechanism = MECHANISMS[name]
    serves_all = all(mechanism.inner_sizes(1 << k, sharing) for k in range(1, 8))
    rule = mechanism.size_rule(sharing)
    assert (rule is None) == serves_all == (name in ("p2p", "all_gather"))
    assert rule is None or f"{sharing.heads[0]} query heads" in rule


def test_two_levels_need_groups_of_their_own():
    two_levels = MECHANISMS["a2a+p2p"]
    assert [two_levels.num_more_groups(cp_size, HEADS) for cp_size in (2, 4, 8, 16)] == [0, 1, 2, 2]
    assert all(MECHANISMS[name].num_more_groups(16, HEADS) == 0 for name in ("p2p", "all_gather", "a2a"))


def test_one_shape_of_exchange_in_its_limits():
    """Two levels with an inner group of one lane are the ring, with one of all lanes the all-to-all."""
    stage = StageAttention(TINY_MODEL.stages(1)[0], problem_of(Topology(num_lanes=8)), node_lanes=8)
    two_levels = MECHANISMS["a2a+p2p"]
    assert two_levels.price(stage, 8, 1, 1, 0) == MECHANISMS["p2p"].price(stage, 8, 1, 1, 0)
    assert two_levels.price(stage, 8, 8, 4, 0) == MECHANISMS["a2a"].price(stage, 8, 8, 4, 0)
    for name, inner in (("p2p", 1), ("all_gather", 1), ("a2a", 8), ("a2a+p2p", 2)):
        assert MECHANISMS[name].sent_bytes(8, inner, 3.0, 5.0, 2) == sent_bytes(8, inner, 3.0, 5.0, 2)
    assert MECHANISMS["p2p"].kept_bytes(8, 1, 3.0, 5.0, 1) == 8 * 5.0
    assert MECHANISMS["a2a+p2p"].kept_bytes(8, 2, 3.0, 5.0, 2) == 3.0 + 4 * 2 * 5.0


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


WIDTH, ELEMENT, TOKENS = TINY_MODEL.kv_channels, 2, 10
HEAD = TOKENS * WIDTH * ELEMENT
"""Bytes of one head of a rank's tokens."""


def sent(cp_size: int, exchange: str, inner: int = 1, query_heads: int = 8, kv_heads: int = 8):
    model = replace(TINY_MODEL, num_attention_heads=query_heads, num_query_groups=kv_heads)
    bucket = Bucket(first_lane=0, cp_size=cp_size, cp_comm_type=exchange, inner_cp_size=inner)
    return sent_by(bucket, TOKENS, model, 1, ELEMENT)


def test_a_hierarchy_sends_3_shards_over_the_nic_where_the_ring_sends_31():
    """What makes larger groups pay across nodes; the shards are equally large."""
    flat, both = sent(32, "p2p"), sent(32, "a2a+p2p", 8)
    assert (flat.ring_steps, both.ring_steps) == (31, 3)
    assert flat.ring_step == both.ring_step


def test_figures_of_the_drawing_of_the_four_exchanges():
    """docs/drawings/exchanges: CP 8 on two nodes of 4 lanes, in keys and values of a lane's tokens."""
    kv = 16 * HEAD
    assert sent(8, "p2p")[:2] == sent(8, "all_gather")[:2] == (kv, 7)
    assert (sent(8, "a2a").inner, sent(8, "a2a").ring_steps) == (1.75 * kv, 0)
    two_levels = sent(8, "a2a+p2p", 4)
    assert (two_levels.inner, two_levels.ring_step, two_levels.ring_steps) == (1.5 * kv, kv, 1)
    assert sent(8, "a2a").inner * 4 / 7 == kv  # 4 of the 7 others are on the other node
