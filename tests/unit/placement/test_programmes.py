"""A placement is judged, becomes a programme for each lane, and its programmes fit together and have a price."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.placement.legal import why_misplaced
from dynamic_cp.placement.programme import Programme, buffer_tokens_of, programmes_of
from dynamic_cp.placement.sent import TokenBytes, lane_ends_s, sent_by_lanes
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE, Messages, fetches_of, messages_of
from dynamic_cp.types import CAUSAL, FULL, Placement, Sample, parse_placement
from dynamic_cp.types.placement import COLUMN, ROW, Lanes
from tests.placements import random_placement, random_samples
from tests.unit.placement.instances import placement_of

SEEDS = range(40)


def drawn(seed: int) -> tuple[tuple[Sample, ...], Placement, int, int]:
    """Return samples, a placement of them, its lanes, and the lanes of a node."""
    random = np.random.default_rng(seed)
    num_lanes, node_lanes = int(random.integers(2, 10)), int(random.choice([1, 2, 3, 4, 8]))
    samples = random_samples(random)
    return samples, random_placement(random, samples, num_lanes, int(random.integers(1, 5))), num_lanes, node_lanes


TWO = (Sample(sample_id=7, seqlen=10), Sample(sample_id=8, seqlen=4))
HOMES = [(0, 0, 6, 0), (0, 6, 10, 1), (1, 0, 4, 1)]
TILES = [(0, 0, 0, 0), (1, 0, 1, 0), (1, 1, 1, 0), (2, 2, 1, 0)]


def test_text_is_read_back_and_wrong_text_is_refused() -> None:
    for seed in SEEDS:
        _, placement, _, _ = drawn(seed)
        assert parse_placement(str(placement)) == placement
        assert hash(parse_placement(str(placement))) == hash(placement)
    assert str(placement_of(HOMES, TILES)).startswith("0.0.6.0,0.6.10.1,1.0.4.1/0.0.0.0,1.0.1.0")
    for text in ("", "0.0.6.0", "0.0.6/0.0.0.0", "0.0.6.-1/0.0.0.0"):
        with pytest.raises(InvalidInputError, match="placement"):
            parse_placement(text)
    with pytest.raises(InvalidInputError, match="at most 2147483647"):
        parse_placement("0.0.2147483648.0/0.0.0.0")
    with pytest.raises(InvalidInputError, match=r"shape \(1, 3\)"):
        Placement(np.zeros((1, 3), np.int32), np.zeros((1, 4), np.int32))


@pytest.mark.parametrize(
    ("homes", "tiles", "reason"),
    [
        (HOMES, TILES[:-1], "queries 0 to 4 of sample 8 meet keys 0 to 4 of sample 8 in 0 tiles"),
        (HOMES, [*TILES, TILES[1]], "queries 6 to 10 of sample 7 meet keys 0 to 6 of sample 7 in 2 tiles"),
        (HOMES, [*TILES, (0, 1, 0, 0)], "in 1 tiles, under the mask causal in 0"),
        (HOMES, [*TILES, (2, 0, 0, 0)], "queries 0 to 4 of sample 8 meet keys 0 to 6 of sample 7"),
        (HOMES, [*TILES[:-1], (2, 3, 1, 0)], r"tile 3 .* names homes \[2, 3\] of 3"),
        (HOMES, [*TILES[:-1], (2, 2, 2, 0)], "tile 3 of its placement is on lane 2 of 2"),
        (HOMES, [*TILES[:-1], (2, 2, 1, -1)], "division -1"),
        ([*HOMES[:2], (1, 0, 4, 2)], TILES, "home 2 of its placement is on lane 2 of 2"),
        ([*HOMES[:2], (1, 0, 3, 1)], TILES, "tokens 0 to 3 of sample 1, not 0 to 4"),
        ([(0, 0, 5, 0), *HOMES[1:]], TILES, "home 1 begins at token 6, the one before it ends at 5"),
        ([(0, 0, 0, 0), (0, 0, 10, 1), HOMES[2]], TILES, "home 0 holds tokens 0 to 0, none"),
        (HOMES[:2], TILES[:3], "homes hold 1 samples of 2"),
        ([HOMES[2], *HOMES[:2]], TILES, "sample"),
    ],
)
def test_what_is_wrong_is_named(homes: list, tiles: list, reason: str) -> None:
    assert why_misplaced(placement_of(HOMES, TILES), TWO, 2) is None
    found = why_misplaced(placement_of(homes, tiles), TWO, 2)
    assert found is not None
    assert re.search(reason, found), found
    assert found.endswith("plan these samples again")


def test_masks_say_which_tiles_there_are() -> None:
    placement = placement_of(HOMES, TILES)
    assert "mask full in 1" in str(why_misplaced(placement, TWO, 2, FULL))
    assert why_misplaced(placement_of(HOMES, [*TILES, (0, 1, 0, 0)]), TWO, 2, FULL) is None
    assert why_misplaced(placement, TWO, 2, CAUSAL) is None
    for seed in SEEDS:
        samples, drawn_one, num_lanes, _ = drawn(seed)
        assert why_misplaced(drawn_one, samples, num_lanes) is None
        fewer = Placement(drawn_one.homes, drawn_one.tiles[1:])
        assert "in 0 tiles" in str(why_misplaced(fewer, samples, num_lanes))


@pytest.mark.parametrize("seed", SEEDS)
def test_programmes_fit_together(seed: int) -> None:
    """Everything that is received was sent, was there to be sent, and comes before it is used."""
    _samples, placement, num_lanes, node_lanes = drawn(seed)
    programmes = programmes_of(placement, (), Lanes(num_lanes, 0, node_lanes))
    assert [Programme.read(json.loads(json.dumps(one.as_json()))) for one in programmes] == programmes
    # What a lane holds and of which sample; of what it only hands on it does not know that.
    samples_of = [placement.samples_of(lane) for lane in range(num_lanes)]
    known = {
        (lane, number): samples_of[lane][held.sample]
        for lane, programme in enumerate(programmes)
        for number, held in enumerate(programme.held)
        if held.sample >= 0
    }
    sent, received = {}, {}
    for lane, programme in enumerate(programmes):
        rounds = [(one.division, one.round) for one in programme.exchanges]
        assert rounds == sorted(set(rounds))
        for one in programme.exchanges:
            for book, side in ((sent, one.sends), (received, one.receives)):
                for peer, entries in side:
                    pair = (lane, peer) if book is sent else (peer, lane)
                    book[(one.division, one.round, *pair)] = entries
    assert sent.keys() == received.keys()
    for key in sorted(sent):
        _, _, sender, receiver = key
        for (number, kind), (other, other_kind) in zip(sent[key], received[key], strict=True):
            one, there = programmes[sender].held[number], programmes[receiver].held[other]
            assert (kind, one.start, one.stop) == (other_kind, there.start, there.stop)
            sample = known[sender, number]
            assert known.setdefault((receiver, other), sample) == sample, "what a relay got is what it hands on"
    assert all(sender != receiver for _, _, sender, receiver in sent)
    for (_, when, sender, receiver), _ in sent.items():
        assert (sender // node_lanes != receiver // node_lanes) == (when in (ACROSS, DELIVER))
    # What is fetched is there before its tiles and before it is handed on; it is given back once, after both.
    for lane, programme in enumerate(programmes):
        place = {(number, kind): -1 for number, held in enumerate(programme.held) if held.kind < 0 for kind in (0, 1)}
        last = {}
        for one in programme.exchanges:
            when = 4 * one.division + one.round
            for _, entries in one.receives if one.round in (ACROSS, INSIDE) else ():
                assert not place.keys() & set(entries)
                place |= dict.fromkeys(entries, when)
            for _, entries in one.sends if one.round in (ACROSS, INSIDE) else ():
                assert all(place[entry] < when for entry in entries), "it is handed on before it is there"
            for _, entries in one.sends if one.round in (COLLECT, DELIVER) else ():
                assert not last.keys() & set(entries)
                last |= dict.fromkeys(entries, when)
        fetched = {(number, held.kind) for number, held in enumerate(programme.held) if held.kind >= 0}
        assert last.keys() == fetched
        for division, tiles in enumerate(programme.tiles):
            for row, column in tiles:
                for entry in ((row, ROW), (column, COLUMN)):
                    assert place[entry] <= 4 * division + INSIDE
                    assert entry not in fetched or last[entry] >= 4 * division + COLLECT
        for one in programme.exchanges:
            for _, entries in one.receives if one.round in (COLLECT, DELIVER) else ():
                given_on = [last[entry] for entry in entries if entry in fetched]
                assert all(when > 4 * one.division + one.round for when in given_on)
        computed = sum(map(len, programme.tiles))
        assert computed == int((placement.tiles[:, 2] == lane).sum())
    assert [one.num_tokens for one in programmes] == placement.home_tokens(num_lanes)


@pytest.mark.parametrize("seed", SEEDS)
def test_places_in_buffers_are_used_again_but_never_by_two_at_once(seed: int) -> None:
    _samples, placement, num_lanes, node_lanes = drawn(seed)
    fetches = fetches_of(placement, Lanes(num_lanes, 0, node_lanes))
    programmes = programmes_of(placement, (), Lanes(num_lanes, 0, node_lanes))
    assert [one.buffer_tokens for one in programmes] == buffer_tokens_of(placement, (), Lanes(num_lanes, 0, node_lanes))
    for lane, programme in enumerate(programmes):
        own = np.flatnonzero(fetches.lane == lane)
        held = [one for one in programme.held if one.kind >= 0]
        assert len(held) == len(own)
        spans = []
        for fetch, one in zip(own, held, strict=True):
            begins = fetches.first[fetch] - (2 if fetches.crosses[fetch] else 1)
            spans.append((one.kind, one.place, one.place + one.num_tokens, begins, fetches.last[fetch] + 2))
            assert one.place + one.num_tokens <= programme.buffer_tokens[one.kind]
        for index, (kind, low, high, begins, ends) in enumerate(spans):
            for other, low2, high2, begins2, ends2 in spans[:index]:
                apart_in_time = ends <= begins2 or ends2 <= begins
                assert kind != other or high <= low2 or high2 <= low or apart_in_time


def test_a_block_crosses_to_a_node_once_and_comes_back_as_one_sum() -> None:
    """Lane 0 holds keys that lanes 2, 3 of the other node use, and lane 1 of its own."""
    sample = Sample(sample_id=0, seqlen=40)
    homes = [(0, 10 * lane, 10 * lane + 10, lane) for lane in range(4)]
    tiles = [(row, column, row, 0) for row in range(4) for column in range(row + 1)]
    placement = placement_of(homes, tiles)
    assert why_misplaced(placement, (sample,), 4) is None
    fetches = fetches_of(placement, Lanes(4, 0, 2))
    of_first = [fetch for fetch in range(len(fetches.lane)) if fetches.home[fetch] == 0]
    found = {int(fetches.lane[f]): (int(fetches.source[f]), int(fetches.crosses[f])) for f in of_first}
    assert found[1] == (0, 0)
    relay = next(lane for lane in (2, 3) if found[lane] == (0, 1))
    assert found[5 - relay] == (relay, 0)
    messages = messages_of(fetches, np.full(4, 10), np.array([3.0, 2.0]), np.array([1.0, 0.0]))
    assert messages.num_bytes[messages.round == ACROSS].sum() == 2 * 10 * 2.0  # homes 0 and 1, to the other node
    assert messages.num_bytes[messages.round == INSIDE].sum() == (1 + 2 + 1) * 10 * 2.0
    assert not (messages.round >= COLLECT).any(), "nothing is given back for keys in a forward pass"


@pytest.mark.parametrize("seed", SEEDS)
def test_sent_bytes_are_those_of_what_the_programmes_send(seed: int) -> None:
    _, placement, num_lanes, node_lanes = drawn(seed)
    first_lane = seed % 3 * node_lanes
    lanes = Lanes(num_lanes, first_lane, node_lanes)
    of_token = TokenBytes(query=16.0, kv=8.0, lse=1.0)
    wanted = np.zeros((2, 2, num_lanes))
    between = np.zeros((num_lanes, num_lanes))
    # What an executor puts into the messages of a round: of a (row, a column) forward, and backward.
    contents = {
        ACROSS: ((16.0, 8.0), (3 * 16.0 + 1.0, 8.0)),
        INSIDE: ((16.0, 8.0), (3 * 16.0 + 1.0, 8.0)),
        COLLECT: ((16.0 + 1.0, 0.0), (16.0, 8.0)),
        DELIVER: ((16.0 + 1.0, 0.0), (16.0, 8.0)),
    }
    for lane, programme in enumerate(programmes_of(placement, (), lanes)):
        for one in programme.exchanges:
            for peer, entries in one.sends:
                for number, kind in entries:
                    for direction, bytes_of in enumerate(contents[one.round]):
                        sent = programme.held[number].num_tokens * bytes_of[kind]
                        wanted[direction, int(one.round in (ACROSS, DELIVER)), lane] += sent
                        between[lane, peer] += sent
    found = sent_by_lanes(placement, lanes, of_token)
    nodes = (first_lane + np.arange(num_lanes)) // node_lanes - first_lane // node_lanes
    assert np.array_equal(found.of_lanes(nodes), wanted)
    assert np.array_equal(found.between(np.arange(num_lanes)), between)
    of_nodes = found.between(nodes)
    assert of_nodes.sum() == wanted.sum()
    assert of_nodes.sum() - np.trace(of_nodes) == wanted[:, 1].sum()


def test_time_of_two_lanes_is_as_added_up_by_hand() -> None:
    """Lane 1 fetches 100 bytes in division 1 while it computes division 0, and gives 50 back."""
    fetches = fetches_of(
        placement_of([(0, 0, 10, 0), (0, 10, 20, 1)], [(0, 0, 0, 0), (1, 1, 1, 0), (1, 0, 1, 1)]), Lanes(2, 0, 1)
    )
    messages = messages_of(fetches, np.full(2, 10), np.array([0.0, 10.0]), np.array([0.0, 5.0]))
    attention_s = np.array([[4.0, 3.0], [0.0, 6.0]])
    # There after 0.5 + 100 / 10 s, computed after 6 s more, back after 0.5 + 50 / 10 s.
    assert lane_ends_s(messages, attention_s, 0.5, 1e9, 10.0).tolist() == [22.0, 16.5]
    # Hidden behind division 0 where the link is fast.
    assert lane_ends_s(messages, attention_s, 0.5, 1e9, 100.0).tolist() == [10.0, 9.0]


def test_what_is_fetched_ahead_does_not_wait_for_what_is_given_back() -> None:
    """Lane 0 gives 50 bytes of division 0 back on the link on which, since the beginning, 100 for division 1 travel."""
    columns = zip((0, DELIVER, 0, 1, 50.0), (1, ACROSS, 1, 0, 100.0), strict=True)
    messages = Messages(*(np.array(column) for column in columns))
    attention_s = np.array([[4.0, 3.0], [6.0, 0.0]])
    # There after 100 / 10 + 0.5 s, computed after 6 s more; the other 50 / 10 + 0.5 s after the link is free.
    assert lane_ends_s(messages, attention_s, 0.5, 1e9, 10.0).tolist() == [16.5, 15.5]


@pytest.mark.parametrize("seed", SEEDS)
def test_times_are_above_what_lanes_compute_and_send(seed: int) -> None:
    _, placement, num_lanes, node_lanes = drawn(seed)
    random = np.random.default_rng(seed)
    tokens = (placement.homes[:, 2] - placement.homes[:, 1]).astype(np.int64)
    messages = messages_of(
        fetches_of(placement, Lanes(num_lanes, 0, node_lanes)), tokens, np.array([2.0, 1.0]), np.array([1.0, 1.0])
    )  # fmt: skip
    attention_s = random.random((placement.num_divisions, num_lanes))
    ends = lane_ends_s(messages, attention_s, 0.01, 100.0, 10.0)
    assert (ends >= attention_s.sum(axis=0) - 1e-12).all()
    for link, rounds in ((100.0, (INSIDE, COLLECT)), (10.0, (ACROSS, DELIVER))):
        chosen = np.isin(messages.round, rounds)
        received = np.bincount(messages.receiver[chosen], messages.num_bytes[chosen], num_lanes)
        assert (ends >= received / link - 1e-12).all()
    slower = lane_ends_s(messages, attention_s, 0.01, 50.0, 5.0)
    assert (slower >= ends - 1e-12).all()
    free = lane_ends_s(messages, attention_s, 0.0, 1e30, 1e30)
    assert all(early <= late for early, late in pairwise((free.max(), ends.max(), slower.max())))
