"""Homes cut to what lanes use, or shared out where one lane would send most: the same pairs where they were."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.placement.cuts import Cut, spread, trimmed
from dynamic_cp.placement.divisions import LinkRates
from dynamic_cp.placement.legal import tiles_between, why_misplaced, with_masks
from dynamic_cp.placement.transport import fetches_of, messages_of
from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, KeyRanges, Lambda, Mask, Placement, Sample
from dynamic_cp.types.placement import Lanes
from tests.placements import random_lanes, random_placement, random_samples
from tests.unit.placement.instances import dense, placement_of, random_ranges, touched_by

SEEDS = range(40)
MASKS: dict[str, Callable[[np.random.Generator, int], Mask | None]] = {
    "causal": lambda _random, _seqlen: None,
    "full": lambda _random, _seqlen: FULL,
    "lambda": lambda random, _seqlen: Lambda(int(random.integers(20)), int(random.integers(1, 60))),
    "causal_blockwise": lambda random, _seqlen: CausalBlockwise(
        int(random.integers(1, 40)), int(random.integers(1, 3))
    ),
    "shared_question": lambda _random, seqlen: parse_mask_rule("shared_question:3x0.3")(seqlen),
    "ranges": lambda _random, seqlen: random_ranges(random.Random(seqlen), seqlen),
}


class Drawn(NamedTuple):
    """A placement, and what its samples see; `mask`: of those that bring none."""

    placement: Placement
    samples: tuple[Sample, ...]
    mask: Mask
    num_lanes: int

    @property
    def whole(self) -> Cut:
        """The placement as it is; how much its tiles compute does not matter."""
        return Cut(self.placement, np.zeros(len(self.placement.tiles), np.int64))

    @property
    def seen(self) -> list[np.ndarray]:
        """[sample] -> [token, key] whether it is seen."""
        return [dense(sample) for sample in with_masks(self.samples, self.mask)]

    def trimmed(self) -> Cut:
        return trimmed(self.whole, self.samples, self.mask)


def drawn(seed: int, kind: str) -> Drawn:
    """Return a placement of samples with masks of a kind; every second time a window is that of the layers."""
    rng = np.random.default_rng(seed)
    num_lanes = int(rng.integers(2, 7))
    samples = tuple(
        Sample(sample_id=number, seqlen=seqlen, mask=MASKS[kind](rng, seqlen))
        for number, seqlen in enumerate(rng.integers(1, 220, rng.integers(1, 4)).tolist())
    )
    mask: Mask = CAUSAL
    if kind == "lambda" and seed % 2:
        samples = tuple(Sample(sample_id=one.sample_id, seqlen=one.seqlen) for one in samples)
        mask = Lambda(int(rng.integers(20)), int(rng.integers(1, 60)))
    placement = random_placement(rng, samples, num_lanes, int(rng.integers(1, 4)), mask)
    return Drawn(placement, samples, mask, num_lanes)


def computed(placement: Placement, seen: list[np.ndarray]) -> list[np.ndarray]:
    """Return [sample] -> [token, key] (lane, division) that computes it, -1 where none does."""
    found = [np.full((*of_sample.shape, 2), -1) for of_sample in seen]
    for row, column, lane, division in placement.tiles.tolist():
        (sample, first, last, _), (_, begin, end, _) = placement.homes[[row, column]].tolist()
        tile = seen[sample][first:last, begin:end]
        assert (found[sample][first:last, begin:end][tile] == -1).all(), "a pair is computed twice"
        found[sample][first:last, begin:end][tile] = lane, division
    return found


def lanes_of_tokens(placement: Placement, samples: tuple[Sample, ...]) -> list[np.ndarray]:
    """Return [sample] -> [token] the lane that holds it."""
    found = [np.full(sample.seqlen, -1) for sample in samples]
    for sample, start, stop, lane in placement.homes.tolist():
        found[sample][start:stop] = lane
    return found


def equal(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def sizes_of(placement: Placement) -> np.ndarray:
    return np.diff(placement.homes[:, 1:3])[:, 0].astype(np.int64)


def fetched_by(placement: Placement) -> dict[tuple[int, int], set[int]]:
    """Return (lane, kind) -> homes of other lanes that its tiles use."""
    found = defaultdict(set)
    for row, column, lane, _ in placement.tiles.tolist():
        for kind, home in enumerate((row, column)):
            if placement.homes[home, 3] != lane:
                found[lane, kind].add(home)
    return found


def fetched_tokens(placement: Placement) -> Counter[tuple[int, int]]:
    """Return (lane, kind) -> tokens that it fetches for itself."""
    sizes = sizes_of(placement)
    return Counter({key: int(sizes[sorted(homes)].sum()) for key, homes in fetched_by(placement).items()})


def step_of(size: int) -> int:
    """Return the tokens of a 32nd of a home, rounded down to whole ones."""
    return max(1, size // 32)


def used_steps(one: Drawn) -> dict[tuple[int, int, int], np.ndarray]:
    """Return (lane, kind, home) -> [step of the home] whether the lane needs any of it, of what it does not hold."""
    homes, seen, found = one.placement.homes.tolist(), one.seen, {}
    for row, column, lane, _ in one.placement.tiles.tolist():
        (sample, first, last, _), (_, begin, end, _) = homes[row], homes[column]
        tile = seen[sample][first:last, begin:end]
        for kind, home in enumerate((row, column)):
            if homes[home][3] != lane:
                used = tile.any(axis=1 - kind)
                step = step_of(len(used))
                of_steps = [used[start : start + step].any() for start in range(0, len(used), step)]
                key = (lane, kind, home)
                found[key] = found.get(key, np.zeros(len(of_steps), bool)) | np.array(of_steps)
    return found


def in_strides(used: np.ndarray, stride: int) -> np.ndarray:
    """Return [stride of steps] whether any of its steps is used."""
    return np.array([used[first : first + stride].any() for first in range(0, len(used), stride)])


def ends_of_use(steps: dict[tuple[int, int, int], np.ndarray], stride: int) -> set[tuple[int, int]]:
    """Return the (home, step) at which what a lane uses of a home begins or ends, in whole strides."""
    return {
        (home, stride * int(place) + stride)
        for (_, _, home), used in steps.items()
        for place in np.flatnonzero(np.diff(in_strides(used, stride)))
    }


def parents_of(placement: Placement, whole: Placement) -> list[int]:
    """Return which home each part of one is of."""
    homes = whole.homes.tolist()
    found = [
        [
            home
            for home, (other, first, last, _) in enumerate(homes)
            if other == sample and first <= start < stop <= last
        ]
        for sample, start, stop, _ in placement.homes.tolist()
    ]
    assert all(len(one) == 1 for one in found), "a part of one home"
    return [home for (home,) in found]


@pytest.mark.by_day("causal", "lambda", "ranges")
@pytest.mark.parametrize("kind", MASKS)
def test_trimmed_homes_keep_tokens_and_pairs_where_they_are(kind: str) -> None:
    num_cut = num_pairs = 0
    for seed in SEEDS:
        one = drawn(seed, kind)
        cut = one.trimmed()
        assert why_misplaced(cut.placement, one.samples, one.num_lanes, one.mask) is None
        assert equal(*(lanes_of_tokens(placement, one.samples) for placement in (one.placement, cut.placement)))
        before, after = (computed(placement, one.seen) for placement in (one.placement, cut.placement))
        assert equal(before, after), "on the same lane, in the same division"
        assert cut.placement.layer_masks == one.placement.layer_masks
        assert bool(one.placement.layer_masks) == isinstance(one.mask, Lambda)
        num_pairs += sum(int((of_sample[..., 0] >= 0).sum()) for of_sample in after)
        if len(cut.placement.homes) > len(one.placement.homes):
            num_cut += 1
            parents_of(cut.placement, one.placement)
            touched = [touched_by(seen) for seen in one.seen]
            for (row, column, *_), number in zip(cut.placement.tiles.tolist(), cut.touched.tolist(), strict=True):
                (sample, first, last, _), (_, begin, end, _) = cut.placement.homes[[row, column]].tolist()
                assert touched[sample][first:last, begin:end].sum() == number
        else:
            assert cut.placement is one.placement
    assert num_pairs > 20_000
    assert num_cut == 0 if kind in ("causal", "full") else num_cut > 3


@pytest.mark.by_day("full", "shared_question", "ranges")
@pytest.mark.parametrize("kind", MASKS)
def test_nothing_is_fetched_that_is_unused_but_for_rounding(kind: str) -> None:
    """Every 32nd of a home that a lane fetches, or four or sixteen of them, has something that it needs."""
    fewer = num_steps = 0
    strides: Counter[int] = Counter()
    for seed in SEEDS:
        one = drawn(seed, kind)
        cut, steps = one.trimmed().placement, used_steps(one)
        num_homes = len(one.placement.homes)
        stride = next(stride for stride in (1, 4, 16) if len(ends_of_use(steps, stride)) <= 3 * num_homes)
        strides[stride] += 1
        parents = parents_of(cut, one.placement)
        sizes, starts = sizes_of(one.placement), one.placement.homes[:, 1]
        for (lane, side), homes in fetched_by(cut).items():
            for part in homes:
                home = parents[part]
                first, behind = (cut.homes[part, 1:3] - starts[home]) / (step_of(sizes[home]) * stride)
                used = in_strides(steps[lane, side, home], stride)[int(np.floor(first)) : int(np.ceil(behind))]
                assert used.all(), "a lane fetches what it does not need"
                num_steps += len(used)
        ends = {
            (home := parents[part], int(cut.homes[part, 1] - starts[home]) / step_of(sizes[home]))
            for part in np.flatnonzero(np.diff(parents, prepend=-1) == 0).tolist()
        }
        assert ends == ends_of_use(steps, stride), "where use begins or ends, and nowhere else"
        before, after = fetched_tokens(one.placement), fetched_tokens(cut)
        assert after <= before
        fewer += before.total() - after.total()
    assert num_steps > 500
    assert fewer == 0 if kind in ("causal", "full") else fewer > 500
    assert set(strides) == ({1, 4} if kind == "ranges" else {1})


def test_homes_do_not_become_many_more() -> None:
    """Each run of 16 rows sees 16 keys of its own: in 32nds, most homes would be cut at each of them."""
    random = np.random.default_rng(0)
    seqlen, size = 32768, 512
    starts = random.integers(0, np.maximum(1, np.arange(0, seqlen, 16) - 16)).repeat(16)
    own = np.arange(0, seqlen, 16).repeat(16)
    ranges = np.stack([np.minimum(starts, own), np.minimum(starts + 16, own), own, np.arange(seqlen) + 1], axis=1)
    sample = Sample(sample_id=0, seqlen=seqlen, mask=KeyRanges.of(ranges.astype(np.int32)))
    homes = [(0, start, start + size, start // size % 16) for start in range(0, seqlen, size)]
    found = tiles_between(placement_of(homes, []), (sample,), CAUSAL)
    tiles = [
        (row, column, homes[row][3], 0) for row, column in zip(found.rows.tolist(), found.columns.tolist(), strict=True)
    ]
    cut = trimmed(Cut(placement_of(homes, tiles), found.touched), (sample,), CAUSAL)
    assert len(homes) < len(cut.placement.homes) <= 4 * len(homes)
    assert why_misplaced(cut.placement, (sample,), 16, CAUSAL) is None
    before, after = (fetched_tokens(one) for one in (placement_of(homes, tiles), cut.placement))
    assert after <= before


def sent_s(placement: Placement, lanes: Lanes, rates: LinkRates) -> np.ndarray:
    """Return [home] how long its lane sends it: to each lane of the node that uses it, once to each other node."""
    seconds = np.zeros(len(placement.homes))
    sizes, holder = sizes_of(placement), placement.homes[:, 3]
    to_lanes, to_nodes = set(), set()
    for (lane, kind), homes in fetched_by(placement).items():
        node = (lanes.first + lane) // lanes.of_node
        for home in homes:
            if node == (lanes.first + holder[home]) // lanes.of_node:
                to_lanes.add((lane, kind, home))
            else:
                to_nodes.add((node, kind, home))
    for things, bytes_per_s in ((to_lanes, rates.inside_bytes_per_s), (to_nodes, rates.across_bytes_per_s)):
        for _, kind, home in things:
            seconds[home] += sizes[home] * (rates.row_bytes, rates.column_bytes)[kind] / bytes_per_s
    return seconds


def drawn_for_many(seed: int) -> tuple[Drawn, Lanes, LinkRates, int]:
    rng = np.random.default_rng(seed)
    lanes = random_lanes(rng)
    samples = random_samples(rng, 250)
    placement = random_placement(rng, samples, lanes.number, int(rng.integers(1, 4)))
    rates = LinkRates(*rng.choice([1.0, 2.0, 4.0], 4).tolist(), 0.0)
    most_tokens = int(rng.choice([1.0, 1.3, 2.0]) * sum(sample.seqlen for sample in samples) / lanes.number) + 1
    return Drawn(placement, samples, CAUSAL, lanes.number), lanes, rates, most_tokens


def test_shared_out_homes_stay_in_their_node_and_are_computed_where_they_were() -> None:
    seen: Counter[str] = Counter()
    busiest_s = np.zeros(2)
    for seed in range(100):
        one, lanes, rates, most_tokens = drawn_for_many(seed)
        whole = one.whole
        cut = spread(whole, one.samples, one.mask, lanes, rates, most_tokens)
        placement, before = cut.placement, one.placement
        seconds, holder = sent_s(before, lanes, rates), before.homes[:, 3]
        node_of = (lanes.first + np.arange(lanes.number)) // lanes.of_node
        of_lane = np.bincount(holder, seconds, lanes.number)
        nodes = {node: np.flatnonzero(node_of == node) for node in node_of.tolist()}
        mean_s = {node: float(of_lane[of_node].mean()) for node, of_node in nodes.items()}
        # A home that can be cut: what its lane sends is far above the mean, and so is the home by itself.
        hubs = [
            home
            for home, lane in enumerate(holder.tolist())
            if of_lane[lane] > 1.3 * mean_s[node_of[lane]]
            and seconds[home] > 0.5 * mean_s[node_of[lane]]
            and sizes_of(before)[home] >= 32
        ]
        if cut is whole:
            assert not hubs
            seen["as it was"] += 1
            continue
        assert why_misplaced(placement, one.samples, lanes.number) is None
        assert equal(computed(before, one.seen), computed(placement, one.seen))
        parents = np.array(parents_of(placement, before))
        parts_of = np.bincount(parents, minlength=len(before.homes))
        largest = {}
        for home in np.flatnonzero(parts_of > 1).tolist():
            lane, parts = holder[home], np.flatnonzero(parents == home)
            node = node_of[lane]
            assert seconds[home] > 0.5 * mean_s[node], "homes that hardly count stay whole"
            largest[node] = max(largest.get(node, 0.0), seconds[home])
            assert parts_of[home] <= len(nodes[node])
            assert parts_of[home] < 2.0 * seconds[home] / mean_s[node] + 1.0, "no more than it takes"
            sizes = sizes_of(placement)[parts]
            assert sizes[0] >= 16
            assert sizes[0] == sizes.max()
            assert len(set(sizes[:-1].tolist())) == 1, "equal ones, and a rest"
            assert (node_of[placement.homes[parts, 3]] == node).all()
            seen["goes elsewhere"] += int((placement.homes[parts, 3] != lane).sum())
            seen["in a part of a node"] += len(nodes[node]) < lanes.of_node
        for node, most_s in largest.items():
            senders = {int(holder[home]) for home in np.flatnonzero((seconds == most_s) & (node_of[holder] == node))}
            assert any(of_lane[lane] > 1.3 * mean_s[node] for lane in senders), "the first one is of a busy lane"
        assert {node_of[holder[home]] for home in hubs} == largest.keys()
        assert np.array_equal(placement.homes[parts_of[parents] == 1], before.homes[parts_of == 1])
        tokens = [np.array(each.home_tokens(lanes.number)) for each in (before, placement)]
        above = tokens[1] > most_tokens
        assert (tokens[1] <= tokens[0])[above].all(), "nobody is given more than there is room for"
        seen["is full"] += int(above.sum())
        found = tiles_between(Placement(placement.homes, placement.tiles[:0]), one.samples, one.mask)
        assert cut.touched.tolist() == found.touched.tolist()
        seen["shared out"] += 1
        after_s = np.bincount(placement.homes[:, 3], sent_s(placement, lanes, rates), lanes.number)
        for node in largest:
            busiest_s += of_lane[nodes[node]].max(), after_s[nodes[node]].max()
    for what in ("as it was", "goes elsewhere", "in a part of a node", "is full", "shared out"):
        assert seen[what] > 10, what
    assert 0.0 < busiest_s[1] < 0.8 * busiest_s[0], busiest_s


BLOCKWISE = Sample(sample_id=0, seqlen=320, mask=CausalBlockwise(64, 1))
"""Four blocks on a lane each, of which a row sees the first, its own and the one before; the last 64 rows see all."""
BLOCKS = [(0, 64 * block, 64 * block + 64, min(block, 3)) for block in range(5)]
RATES = LinkRates(8.0, 1.0, 2.0, 1.0, 0.0)


def blockwise() -> Cut:
    """Return the placement in which rows of the last block are computed where keys are, all others where they are."""
    columns_of = (0,), (0, 1), (0, 1, 2), (0, 2, 3), range(5)
    pairs = [(row, column) for row, columns in enumerate(columns_of) for column in columns]
    tiles = [(row, column, BLOCKS[column if row == 4 else row][3], 0) for row, column in pairs]
    placement = placement_of(BLOCKS, tiles)
    assert why_misplaced(placement, (BLOCKWISE,), 4) is None
    return Cut(placement, np.zeros(len(tiles), np.int64))


def bytes_sent(placement: Placement, lanes: Lanes) -> list[float]:
    """Return what lanes send each other before they compute, relays among them."""
    messages = messages_of(fetches_of(placement, lanes), sizes_of(placement), np.array(RATES[:2]), np.zeros(2))
    return np.bincount(messages.sender, messages.num_bytes, lanes.number).tolist()


def test_a_last_block_that_all_lanes_fetch_is_held_by_several() -> None:
    """64 rows of 8 bytes go to three lanes, 1536 bytes; keys of the first block to three, and of two others to one."""
    lanes, whole = Lanes(4, 0, 4), blockwise()
    assert bytes_sent(whole.placement, lanes) == [192, 64, 64, 1536]
    cut = spread(whole, (BLOCKWISE,), CAUSAL, lanes, RATES, 200)
    assert cut.placement.homes[:4].tolist() == whole.placement.homes[:4].tolist()
    # To who sends least at a time: lane 3 (0), 1 (64) and 2 (64), and then 0 (192), as all others send more than 384.
    assert cut.placement.homes[4:, 1:].tolist() == [[256, 272, 3], [272, 288, 1], [288, 304, 2], [304, 320, 0]]
    # 16 rows to three lanes are 384 bytes; the 16 keys are used where those of the last block were, on lane 3.
    assert bytes_sent(cut.placement, lanes) == [192 + 384 + 16, 64 + 384 + 16, 64 + 384 + 16, 384]
