"""What all mechanisms have in common: a name that buckets know, inner sizes that buckets accept, prices, bytes."""

from __future__ import annotations

import pytest

from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of
from dynamic_cp.mechanisms.stage_attention import StageAttention
from dynamic_cp.mechanisms.transfers import sent_bytes
from dynamic_cp.types import CHOICES, CP_COMM_TYPES, Attention, Bucket, Topology
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
        ("p2p", 64, Sharing(None, 1), (1,)),
        ("all_gather", 64, Sharing(None, 1), (1,)),
        ("a2a", 8, HEADS, (8,)),
        ("a2a", 16, HEADS, ()),
        ("a2a", 8, Sharing(None, 4), ()),
        ("a2a+p2p", 16, HEADS, (4, 2)),
        ("a2a+p2p", 16, Sharing((8, 2), 16), (8, 4, 2)),
        ("a2a+p2p", 16, Sharing((8, 2), 4, allowed=(2, 8)), (2,)),
        ("a2a+p2p", 16, Sharing((6, 2), 4), (2,)),
        ("a2a+p2p", 2, HEADS, ()),
        ("a2a+p2p", 16, Sharing(None, 4), ()),
        ("latent", 16, Sharing(None, 4, has_latents=True), (1,)),
        ("latent", 16, HEADS, ()),
    ],
)
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


def test_names_for_people():
    assert [str(Attention(name, 2)) for name in CP_COMM_TYPES] == ["p2p", "a2a", "all_gather", "a2a+p2p/2"]
    assert str(Attention()) == "p2p"
