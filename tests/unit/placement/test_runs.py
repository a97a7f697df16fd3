"""Pairs and touched pairs between any blocks of samples, against counting them one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dynamic_cp.placement.runs import count_tiles, cut_samples, runs_of, seen_in_run
from dynamic_cp.placement.token_graph import blocks_of
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


def test_what_is_seen_in_a_run_is_what_a_dense_mask_shows() -> None:
    seen: Counter[str] = Counter()
    rng = random.Random(0)
    for _ in range(4000):
        num_rows = rng.randint(1, 12)
        begin_step, end_step = rng.randint(0, 1), rng.randint(0, 1)
        begin = rng.randint(0, 10)
        shrinks = (num_rows - 1) * (begin_step - end_step)
        first_row, end = rng.randint(0, 10), begin + 1 + max(0, shrinks) + rng.randint(0, 6)
        run = np.array([first_row, first_row + num_rows, begin, end, begin_step, end_step])
        mask = np.zeros((40, 40), bool)
        for offset in range(num_rows):
            mask[first_row + offset, begin + offset * begin_step : end + offset * end_step] = True
        row, row_stop = sorted(rng.sample(range(25), 2))
        low, high = sorted(rng.sample(range(32), 2))
        part = mask[row:row_stop, low:high]
        found = seen_in_run(run, row, row_stop, low, high)
        if not part.any():
            assert found[0] >= found[1]
            seen["nothing"] += 1
            continue
        rows, keys = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
        assert found == (row + rows[0], row + rows[-1] + 1, low + keys[0], low + keys[-1] + 1)
        seen[f"{begin_step}{end_step}"] += 1
        seen["not all rows"] += len(rows) < len(mask[row:row_stop].any(axis=1).nonzero()[0])
    assert len(seen) == 6
    assert min(seen.values()) > 200
