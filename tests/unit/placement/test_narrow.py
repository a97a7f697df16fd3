"""Pairs between any blocks, and layers with a window between the homes of layers without: pairs once, few keys."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.placement.cuts import Cut, narrowed, placement_under, trimmed
from dynamic_cp.placement.legal import tiles_between, why_misplaced
from dynamic_cp.placement.programme import Programme, buffer_tokens_of, programmes_of
from dynamic_cp.placement.runs import count_tiles, cut_samples, runs_of
from dynamic_cp.placement.transport import fetches_of
from dynamic_cp.types import CAUSAL, FULL, Bucket, Lambda, Mask, Placement, Sample, Topology, parse_placement
from dynamic_cp.types.placement import COLUMN, Lanes
from tests.placements import random_placement
from tests.unit.placement.instances import dense, random_samples, touched_by

SEEDS = range(30)


def drawn(seed: int, *, is_mixed: bool = True) -> tuple[tuple[Sample, ...], Placement, Lambda, int, int]:
    """Return samples, a placement of them for layers with a window, that window, lanes, and lanes of a node."""
    random = np.random.default_rng(seed)
    num_lanes, node_lanes = int(random.integers(2, 8)), int(random.choice([1, 2, 4]))
    samples = tuple(Sample(sample_id=i, seqlen=int(n)) for i, n in enumerate(random.integers(1, 300, 4)))
    window = Lambda(int(random.choice([0, 0, 1, 5, 40])), int(random.choice([1, 2, 9, 30, 100])))
    masks: tuple[Mask, ...] = (CAUSAL, window) if is_mixed else (window,)
    placement = random_placement(random, samples, num_lanes, int(random.integers(1, 5)), *masks)
    return samples, placement, window, num_lanes, node_lanes


def computed(placement: Placement, samples: tuple[Sample, ...], mask: Mask) -> list[np.ndarray]:
    """Return [sample] how often each pair is computed, token by token."""
    seen = [dense(replace(sample, mask=mask)) for sample in samples]
    counts = [np.zeros(one.shape, int) for one in seen]
    for row, column, _, _ in placement.tiles.tolist():
        (sample, first, last, _), (of_keys, begin, end, _) = placement.homes[[row, column]].tolist()
        assert sample == of_keys
        counts[sample][first:last, begin:end] += seen[sample][first:last, begin:end]
    return counts


def cut_to(window: Lambda, placement: Placement, samples: tuple[Sample, ...]) -> Placement:
    """Return the placement with its homes cut to what lanes use of them."""
    return trimmed(Cut(placement, np.zeros(len(placement.tiles), np.int64)), samples, window).placement


def lane_of_tokens(placement: Placement) -> list[tuple[int, int, int]]:
    return [
        (sample, token, lane) for sample, start, stop, lane in placement.homes.tolist() for token in range(start, stop)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_pairs_of_a_window_are_computed_once_where_their_queries_are(seed: int) -> None:
    samples, placement, window, num_lanes, node_lanes = drawn(seed)
    own = placement_under(placement, samples, window, Lanes(num_lanes, 0, node_lanes))
    assert placement_under(placement, samples, CAUSAL, Lanes(num_lanes, 0, node_lanes)) is placement
    for mask, one in ((CAUSAL, placement), (window, own)):
        for sample, counts in zip(samples, computed(one, samples, mask), strict=True):
            assert np.array_equal(counts, dense(replace(sample, mask=mask)))
        assert why_misplaced(one, samples, num_lanes, mask) is None
        pairs = tiles_between(Placement(one.homes, one.tiles[:0]), samples, mask).pairs
        assert pairs.sum() == sum(mask.num_pairs(sample.seqlen) for sample in samples)
    assert lane_of_tokens(own) == lane_of_tokens(placement)
    assert (own.homes[own.tiles[:, 0], 3] == own.tiles[:, 2]).all()
    assert own.num_divisions <= placement.num_divisions


def test_lanes_fetch_little_more_than_the_window_shows() -> None:
    fetched, most, whole = 0, 0, 0
    for seed in SEEDS:
        samples, placement, window, num_lanes, node_lanes = drawn(seed)
        own = narrowed(placement, samples, window, Lanes(num_lanes, 0, node_lanes))
        fetches = fetches_of(own, Lanes(num_lanes, 0, node_lanes))
        assert (fetches.kind == COLUMN).all()
        seen = [dense(replace(sample, mask=window)) for sample in samples]
        used = {(lane, column) for _, column, lane, _ in own.tiles.tolist()}
        for lane, home in zip(fetches.lane.tolist(), fetches.home.tolist(), strict=True):
            if (lane, home) not in used:  # it only hands it on, to a neighbour that uses it
                node, holder = lane // node_lanes, int(own.homes[home, 3])
                assert holder // node_lanes != node
                assert any((other, home) in used for other in range(node * node_lanes, (node + 1) * node_lanes))
                continue
            sample, begin, end, _ = own.homes[home].tolist()
            rows = np.concatenate(
                [np.arange(first, last) for of, first, last, on in own.homes.tolist() if (of, on) == (sample, lane)]
            )
            needed = np.flatnonzero(seen[sample][rows].any(axis=0)[begin:end])
            assert len(needed), "fetched, and not needed"
            fetched += end - begin
            # Parts are whole 32nds of homes, which here have less than 32 tokens twice.
            most += len(needed) + 300 // 32
        without_tiles = Placement(placement.homes, placement.tiles[:0])
        found = tiles_between(without_tiles, samples, window)
        holder = placement.homes[:, 3]
        pairs = {
            (holder[row], column)
            for row, column in zip(found.rows.tolist(), found.columns.tolist(), strict=True)
            if holder[row] != holder[column]
        }
        whole += sum(int(placement.homes[column, 2] - placement.homes[column, 1]) for _, column in pairs)
    assert 0 < fetched <= most
    assert fetched < 0.7 * whole


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_homes_keep_tokens_lanes_and_work(seed: int) -> None:
    samples, placement, window, num_lanes, node_lanes = drawn(seed, is_mixed=False)
    cut = cut_to(window, placement, samples)
    assert why_misplaced(cut, samples, num_lanes, window) is None
    assert lane_of_tokens(cut) == lane_of_tokens(placement)
    assert cut.layer_masks == placement.layer_masks == (window,)
    assert placement_under(cut, samples, window, Lanes(num_lanes, 0, node_lanes)) is cut
    work = []
    for one in (placement, cut):
        found = tiles_between(Placement(one.homes, one.tiles[:0]), samples, window)
        pairs = dict(
            zip(zip(found.rows.tolist(), found.columns.tolist(), strict=True), found.pairs.tolist(), strict=True)
        )
        done = np.zeros((num_lanes, placement.num_divisions), int)
        for row, column, lane, division in one.tiles.tolist():
            done[lane, division] += pairs[row, column]
        work.append(done.tolist())
    assert work[0] == work[1]
    # In one node nobody fetches what it does not use, and across nodes relays fetch once what any lane of theirs uses.
    for of_node in (num_lanes, node_lanes):
        fetched = []
        for one in (placement, cut):
            fetches = fetches_of(one, Lanes(num_lanes, 0, of_node))
            counted = fetches.home[(fetches.crosses == 1) | (of_node == num_lanes)]
            fetched.append((one.homes[:, 2] - one.homes[:, 1])[counted].sum())
        assert fetched[1] <= fetched[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_programmes_are_of_all_masks_and_travel(seed: int) -> None:
    samples, placement, window, num_lanes, node_lanes = drawn(seed)
    programmes = programmes_of(placement, samples, Lanes(num_lanes, 0, node_lanes))
    assert [Programme.read(json.loads(json.dumps(one.as_json()))) for one in programmes] == programmes
    lanes = Lanes(num_lanes, 0, node_lanes)
    own = placement_under(placement, samples, window, lanes)
    for lane, (one, alone) in enumerate(zip(programmes, programmes_of(own, samples, lanes), strict=True)):
        narrower = one.of_layers(window)
        assert one.of_layers(CAUSAL) is one
        assert narrower.mask == str(window)
        assert narrower.num_tokens == one.num_tokens == placement.home_tokens(num_lanes)[lane]
        # Samples have the numbers that the lane knows them by; all else is that of the placement by itself.
        numbers = placement.samples_of(lane), own.samples_of(lane)
        for each, other in zip(narrower.held, alone.held, strict=True):
            if each.sample >= 0 and other.sample >= 0:  # of what it only hands on a lane need not know the sample
                assert numbers[0][each.sample] == numbers[1][other.sample]
            assert each[1:] == other[1:]
        assert all(alone.held[number].sample >= 0 for tiles in alone.tiles for tile in tiles for number in tile)
        assert narrower[1:] == alone[1:]
        largest = tuple(map(max, one.buffer_tokens, narrower.buffer_tokens))
        assert buffer_tokens_of(placement, samples, Lanes(num_lanes, 0, node_lanes))[lane] == largest
    says = r"for layers with the masks causal or full, lambda:.* has lambda:0,7"
    with pytest.raises(UnsupportedFeatureError, match=says):
        programmes[0].of_layers(Lambda(0, 7))
    (alone,) = {one.mask for one in programmes_of(own, samples, Lanes(num_lanes, 0, node_lanes))}
    assert alone == str(window)


def test_masks_of_layers_are_in_the_text() -> None:
    for seed in SEEDS:
        for is_mixed in (True, False):
            _, placement, window, _, _ = drawn(seed, is_mixed=is_mixed)
            text = str(placement)
            assert text.endswith(f"/causal/{window}" if is_mixed else f"/{window}")
            assert parse_placement(text) == placement
            assert hash(parse_placement(text)) == hash(placement)
            other = replace(placement, layer_masks=(Lambda(0, 3),))
            assert parse_placement(str(other)) == other != placement
    for text in ("0.0.6.0/0.0.0.0/", "0.0.6.0/0.0.0.0/lambda", "0.0.6.0/0.0.0.0/lambda:0,128/"):
        with pytest.raises(InvalidInputError):
            parse_placement(text)


def test_placements_for_other_masks_of_layers_are_illegal() -> None:
    samples, placement, window, num_lanes, _ = drawn(3)

    def why(given: Placement, of: tuple[Sample, ...] = samples) -> str:
        bucket = Bucket(first_lane=0, cp_size=num_lanes, cp_comm_type="blocks", samples=of, placement=given)
        return MECHANISMS["blocks"].why_illegal(bucket, Topology(num_lanes=num_lanes), 10_000) or ""

    assert why(placement) == ""
    for masks in ((window, CAUSAL), (CAUSAL,), (FULL, window), (CAUSAL, window, window), (window, window)):
        assert "one window is possible, with or without causal layers before it" in why(
            replace(placement, layer_masks=masks)
        )
    assert "in 1 tiles, under the mask lambda:0,1 in 0" in why(replace(placement, layer_masks=(Lambda(0, 1),)))
    assert "in 0 tiles" in why(replace(placement, tiles=placement.tiles[1:]))
    # Tiles of a causal sample are too many for one with a mask of its own.
    masked = (*samples[:3], replace(samples[3], mask=Lambda(0, 1)))
    assert "under the mask lambda:0,1 in 0" in why(placement, masked)


@pytest.mark.parametrize("seed", range(40))
def test_tiles_between_any_cuts_are_counted_exactly(seed: int) -> None:
    rng = random.Random(seed)
    samples = random_samples(rng, most=3)
    runs = runs_of(samples)
    if seed % 2:
        starts, cuts = cut_samples(runs, rng.choice([128, 256]))
    else:  # anywhere
        each = [sorted({0, one.seqlen, *(rng.randint(0, one.seqlen) for _ in range(5))}) for one in samples]
        starts = np.cumsum([0, *map(len, each)])
        cuts = np.concatenate(each)
    tiles = count_tiles(runs, starts, cuts)
    found = list(zip(*(column.tolist() for column in tiles), strict=True))
    expected = []
    first_block = 0
    for number, sample in enumerate(samples):
        own = cuts[starts[number] : starts[number + 1]].tolist()
        seen = dense(sample)
        touched = touched_by(seen)
        for row, (low, high) in enumerate(pairwise(own)):
            for column, (left, right) in enumerate(pairwise(own)):
                if num_pairs := seen[low:high, left:right].sum():
                    where = (first_block + row, first_block + column)
                    expected.append((*where, num_pairs, touched[low:high, left:right].sum()))
        first_block += len(own) - 1
    assert found == expected
    assert sum(tiles.pairs) == sum((one.mask or CAUSAL).num_pairs(one.seqlen) for one in samples)
