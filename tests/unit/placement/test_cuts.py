"""Homes cut to what lanes use of them: the same tokens and pairs where they were, and less to fetch."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from dynamic_cp.placement.cuts import Cut, trimmed
from dynamic_cp.placement.legal import tiles_between, why_misplaced, with_masks
from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, KeyRanges, Lambda, Mask, Placement, Sample, parse_mask_rule
from tests.placements import random_placement
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
    """Every 32nd of a home that a lane fetches has something that the lane needs, and homes are cut for no more.

    Where that made more than four homes of one in the mean, it is four 32nds, or sixteen, together.
    """
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
