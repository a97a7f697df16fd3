"""Small micro-batches with any mask, and what a placement of one must be, pair by pair."""

import random

import numpy as np

from dynamic_cp.placement.placed import Placed
from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, KeyRanges, Lambda, Mask, Placement, Sample, SharedQuestion
from dynamic_cp.types.placement import PlacementProblem

LENGTHS = (1, 2, 17, 64, 127, 128, 129, 200, 300, 512, 700)


def dense(sample: Sample) -> np.ndarray:
    """Return [token, key] -> whether it is seen."""
    seen = np.zeros((sample.seqlen, sample.seqlen), bool)
    for token, ranges in enumerate((sample.mask or CAUSAL).key_ranges(sample.seqlen).tolist()):
        for begin, end in zip(ranges[::2], ranges[1::2], strict=True):
            seen[token, begin:end] = True
    return seen


def random_ranges(rng: random.Random, seqlen: int) -> KeyRanges:
    """Return a mask without any rule."""
    ranges = CAUSAL.key_ranges(seqlen)
    for token in range(seqlen):
        begin, end, second, last = sorted(rng.randint(0, seqlen) for _ in range(4))
        if begin <= token < end or second <= token < last:
            ranges[token] = (begin, end, second, last) if second < last else (begin, end, 0, 0)
    return KeyRanges.of(ranges)


def random_sample(rng: random.Random, sample_id: int) -> Sample:
    seqlen = rng.choice(LENGTHS)
    mask: Mask | None = rng.choice(
        [None, None, CAUSAL, FULL, Lambda(0, 1), Lambda(64, 100), Lambda(3, 300), CausalBlockwise(64, 2),
         CausalBlockwise(100, 1, 3), SharedQuestion(1, (1,)), KeyRanges(b"")]
    )  # fmt: skip
    if isinstance(mask, SharedQuestion):
        mask = SharedQuestion(seqlen, tuple(rng.randint(1, 200) for _ in range(rng.randint(1, 4))))
        seqlen += sum(mask.answers)
    if isinstance(mask, KeyRanges):
        mask = random_ranges(rng, seqlen)
    return Sample(sample_id=sample_id, seqlen=seqlen, mask=mask)


def random_samples(rng: random.Random, most: int = 5) -> list[Sample]:
    return [random_sample(rng, 100 + number) for number in range(rng.randint(1, most))]


def random_problem(rng: random.Random) -> PlacementProblem:
    return PlacementProblem(
        num_lanes=rng.choice([1, 2, 3, 4, 5, 7, 8, 12]), node_lanes=rng.choice([1, 2, 3, 4, 8]),
        row_bytes=rng.choice([1, 4]), column_bytes=rng.choice([1, 2]), token_tolerance=rng.choice([0.0, 0.05, 0.3]),
        work_tolerance=rng.choice([0.0, 0.1]),
    )  # fmt: skip


def assert_legal(placed: Placed, samples: list[Sample], problem: PlacementProblem) -> None:
    """Fail unless homes tile all samples, and tiles are the pairs of homes with an allowed pair, each once."""
    assert (placed.homes.dtype, placed.tiles.dtype) == (np.int32, np.int32)
    homes = placed.homes.tolist()
    assert homes == sorted(homes)
    for index, sample in enumerate(samples):
        own = placed.homes[placed.homes[:, 0] == index]
        assert (own[0, 1], own[-1, 2]) == (0, sample.seqlen)
        assert (own[:, 1] < own[:, 2]).all()
        assert (own[1:, 1] == own[:-1, 2]).all()
    assert {home[0] for home in homes} == set(range(len(samples)))
    for lanes in (placed.homes[:, 3], placed.tiles[:, 2]):
        assert 0 <= lanes.min() <= lanes.max() < problem.num_lanes
    expected = {}
    for index, sample in enumerate(samples):
        seen = dense(sample)
        touched = touched_by(seen)
        numbers = [number for number, home in enumerate(homes) if home[0] == index]
        for row in numbers:
            for column in numbers:
                where = np.ix_(range(*homes[row][1:3]), range(*homes[column][1:3]))
                if seen[where].any():
                    expected[row, column] = (int(seen[where].sum()), int(touched[where].sum()))
    counts = zip(placed.pairs.tolist(), placed.touched.tolist(), strict=True)
    found = {(row, column): count for (row, column, _), count in zip(placed.tiles.tolist(), counts, strict=True)}
    assert list(found) == sorted(found)
    assert len(found) == len(placed.tiles), "a tile is there twice"
    assert found == expected


def touched_by(seen: np.ndarray) -> np.ndarray:
    """Return [token, key] -> whether its sub-tile of 128 x 128 holds an allowed pair."""
    size = len(seen)
    num_sub_tiles = -(-size // 128)
    padded = np.zeros((num_sub_tiles * 128,) * 2, bool)
    padded[:size, :size] = seen
    touched = padded.reshape(num_sub_tiles, 128, num_sub_tiles, 128).any((1, 3))
    return np.kron(touched, np.ones((128, 128), bool))[:size, :size]


def placement_of(homes: list[tuple[int, ...]], tiles: list[tuple[int, ...]]) -> Placement:
    return Placement(np.array(homes, np.int32), np.array(tiles, np.int32).reshape(-1, 4))
