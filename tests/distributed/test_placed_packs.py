"""Packs of a placed lane: rows with the same keys are one rectangle, and each pair that masks allow is there once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamic_cp.placement.cuts import Cut, spread, trimmed
from dynamic_cp.placement.divisions import COMMON, Schedule, divided
from dynamic_cp.placement.legal import tiles_between, why_misplaced
from dynamic_cp.placement.programme import Programme, programmes_of
from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, Lambda, Mask, Placement, Sample, SharedQuestion
from dynamic_cp.types.placement import Lanes
from megatron.dynamic_cp.attention.kernels.choice import CPU
from megatron.dynamic_cp.attention.packs import Pack
from megatron.dynamic_cp.attention.placed_packs import PlacedPacks, build_placed_packs
from tests.distributed.naive_attention import assert_all_close, exact, random_qkv
from tests.distributed.naive_attention import sees_of as sample_sees
from tests.distributed.ranged import attend, sees_of
from tests.distributed.test_placed_attention import Case, assert_case
from tests.placements import random_placement

HOST = torch.device("cpu")


def packs_of(programme: Programme, samples: Sequence[Sample]) -> PlacedPacks:
    """Return the packs of a lane that knows these samples, with a token of padding."""
    masks = [sample.mask or CAUSAL for sample in samples]
    seqlens = [sample.seqlen for sample in samples]
    return build_placed_packs(programme, masks, seqlens, programme.num_tokens + 1, HOST)


def rectangles(pack: Pack) -> list[tuple[list[int], list[int]]]:
    """Return the rows and the columns of each rectangle, of those that the lane works with."""
    return [(pack.rows[rows].tolist(), pack.columns[columns].tolist()) for rows, columns in pack.slices()]


SOME = (
    *(Sample(sample_id=i, seqlen=n) for i, n in enumerate((50, 1, 64))),
    Sample(sample_id=3, seqlen=60, mask=FULL),
    Sample(sample_id=4, seqlen=70, mask=Lambda(4, 20)),
    Sample(sample_id=5, seqlen=66, mask=CausalBlockwise(8, 1)),
    Sample(sample_id=6, seqlen=60, mask=SharedQuestion(20, (15, 25))),
)


def as_searched(placement: Placement, samples: Sequence[Sample], lanes: Lanes, num_divisions: int) -> Placement:
    """Return a placement cut to what lanes use, with what many use shared out, in divisions by what is there."""
    cut = trimmed(Cut(placement, np.zeros(len(placement.tiles), np.int64)), samples, CAUSAL)
    cut = spread(cut, samples, CAUSAL, lanes, COMMON, sum(sample.seqlen for sample in samples))
    found = divided(cut.placement, cut.touched, lanes, COMMON, Schedule.of(num_divisions))
    assert why_misplaced(found, samples, lanes.number) is None
    return found


def ranged(pack: Pack) -> Pack:
    """Return a pack with the ranges of keys that its mask gives its rows."""
    if pack.host_ranges is not None:
        return pack
    found = []
    for rows, columns in zip(pack.row_seqlens, pack.column_seqlens, strict=True):
        ranges = np.zeros((rows, 4), np.int32)
        ranges[:, 1] = np.arange(1, rows + 1) if pack.causal else columns
        found.append(ranges)
    return replace(pack, host_ranges=np.concatenate(found))


@pytest.mark.parametrize("num_lanes", [1, 3, 4])
def test_each_pair_is_in_one_pack_of_few_rectangles(num_lanes: int) -> None:
    """Of cut homes: whatever lanes and divisions, all pairs are computed once, and rows with equal keys together."""
    firsts = np.cumsum([0, *(sample.seqlen for sample in SOME)]).tolist()
    seen: Counter[str] = Counter()
    for seed in range(4):
        placement = random_placement(np.random.default_rng(seed), SOME, num_lanes, 1)
        lanes = Lanes(num_lanes, 0, 2)
        placement = as_searched(placement, SOME, lanes, 3)
        counts = np.zeros((firsts[-1], firsts[-1]), np.int64)
        for lane, programme in enumerate(programmes_of(placement, SOME, lanes)):
            numbers = placement.samples_of(lane)
            packs = packs_of(programme, [SOME[number] for number in numbers])
            for tiles, division in zip(programme.tiles, packs.divisions, strict=True):
                # Which token is where, of the rows and of the columns of this division.
                token_of = np.full((2, packs.num_tokens + max(packs.row_room, packs.column_room)), -1)
                for tile in tiles:
                    for side, one in enumerate(programme.held[number] for number in tile):
                        start = one.place + (packs.num_tokens if one.kind >= 0 else 0)
                        token = firsts[numbers[one.sample]] + one.start
                        token_of[side, start : start + one.num_tokens] = np.arange(token, token + one.num_tokens)
                assert len(division) <= 3
                for pack in division:
                    rows, columns = np.nonzero(sees_of(ranged(pack), *token_of.shape[1:] * 2).numpy())
                    counts[token_of[0, rows], token_of[1, columns]] += 1
                    assert len(set(pack.rows.tolist())) == len(pack.rows), "no row twice in a pack"
                    if not pack.causal:
                        keys = [tuple(columns) for _, columns in rectangles(pack)]
                        assert len(set(keys)) == len(keys), "rows with the same keys are together"
                        seen["rectangles"] += len(keys)
                        seen["ranged"] += pack.mask is None
                homes = [
                    row for row, column in tiles
                    if programme.held[row][:3] != programme.held[column][:3]
                    or SOME[numbers[programme.held[row].sample]].mask is not None
                ]  # fmt: skip
                seen["homes of rows"] += len(set(homes))
        wanted = torch.block_diag(*(sample_sees(sample) for sample in SOME)).numpy()
        assert np.array_equal(counts, wanted)
    assert seen["ranged"] > 3
    assert seen["rectangles"] < seen["homes of rows"] - 5


@pytest.mark.parametrize(
    ("mask", "first_keys", "expected"),
    [(FULL, 32, [64, 64]), (CausalBlockwise(16, 1), 48, [16]), (SharedQuestion(24, (16, 24)), 24, [44])],
)
def test_finely_cut_homes_equal_a_dense_softmax(mask: Mask, first_keys: int, expected: list[int]) -> None:
    """Homes of 4 of 64 tokens, on one lane: first all tiles with the first keys, which many rows have in common."""
    sample = Sample(sample_id=0, seqlen=64, mask=mask)
    homes = np.array([(0, start, start + 4, 0) for start in range(0, 64, 4)], np.int32)
    wanted = tiles_between(Placement(homes, np.zeros((0, 4), np.int32)), [sample], CAUSAL)
    tiles = [
        (row, column, 0, int(homes[column, 1] >= first_keys))
        for row, column in zip(wanted.rows.tolist(), wanted.columns.tolist(), strict=True)
    ]
    (programme,) = programmes_of(Placement(homes, np.array(tiles, np.int32)), [sample], Lanes(1, 0, 1))
    packs = [pack for division in packs_of(programme, [sample]).divisions for pack in division]
    inputs = random_qkv(64, 64)
    assert_all_close(attend([x.float() for x in inputs], packs, CPU), exact(inputs, sample_sees(sample).long()))
    assert [rows for pack in packs for rows in pack.row_seqlens if rows > 4] == expected


class Searched(Case):
    """A case whose homes are cut and shared out, with divisions and relays as the planner makes them."""

    @property
    def placement(self) -> Placement:
        return as_searched(super().placement, self.samples, self.lanes, self.num_divisions)


def test_lanes_compute_placements_as_the_planner_makes_them() -> None:
    """Also those that fetch for others what they do not use."""
    seen: Counter[str] = Counter()
    for case in (Searched(4, 2, 3), Searched(3, 1, 2), Searched(6, 3, 4, idle=2)):
        seen += assert_case(case)
        assert len(case.placement.homes) > len(Case(*case).placement.homes)
        for programme in programmes_of(case.placement, case.samples, case.lanes):
            used = {number for tiles in programme.tiles for tile in tiles for number in tile}
            fetched = {number for number, one in enumerate(programme.held) if one.kind >= 0}
            seen["fetched for others alone"] += len(fetched - used)
    assert seen["fetched for others alone"] > 10
    assert seen["relayed"] > 10
