"""Pairs and touched pairs between any blocks of samples, against counting them one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from dynamic_cp.placement.blocks import blocks_of
from dynamic_cp.placement.runs import count_tiles, cut_samples, runs_of
from dynamic_cp.types import CAUSAL, CausalBlockwise, Lambda, Sample, SharedQuestion
from tests.unit.placement.instances import dense, random_samples, touched_by


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


def test_long_masks_made_by_rules_are_a_handful_of_runs() -> None:
    masks = [None, Lambda(64, 4096), CausalBlockwise(256, 2), SharedQuestion(40000, (20000, 40000))]
    runs = runs_of([Sample(sample_id=0, seqlen=100000, mask=mask) for mask in masks])
    assert np.diff(runs.starts).tolist() == [1, 3, 4, 4]


def test_samples_are_cut_where_their_mask_changes_and_evenly_between() -> None:
    masks = [None, CausalBlockwise(256, 2), SharedQuestion(1000, (500, 700))]
    runs = runs_of([Sample(sample_id=0, seqlen=2200, mask=mask) for mask in masks])
    starts, cuts = cut_samples(runs, 1024)
    causal, blockwise, question = (cuts[starts[one] : starts[one + 1]].tolist() for one in range(3))
    assert causal == [0, 768, 1536, 2200]
    assert {256, 2048} < set(blockwise)
    assert question == [0, 1000, 1500, 2200]


def test_short_samples_share_vertices_and_keep_their_work() -> None:
    samples = [Sample(sample_id=number, seqlen=size) for number, size in enumerate([2000, 300, 700, 1, 512, 600])]
    blocks = blocks_of(samples, 1024, 4, 1)
    assert blocks.order.tolist() == [0, 2, 5, 4, 1, 3]
    assert (blocks.num_own, blocks.bins.tolist()) == (2, [2, 3, 4, 2, 2])
    assert blocks.graph.tokens.tolist() == [1024, 976, 700 + 300 + 1, 600, 512]
    assert blocks.graph.work.sum() == blocks.tiles.touched.sum()
    assert blocks.graph.net_bytes[0].sum() == 4 * sum(sample.seqlen for sample in samples)
